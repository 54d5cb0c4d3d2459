/** A chart of an attempt's memory over time, with the reserved amount. */

import {areaPath, linePath} from "./charts.js";
import {el, say, set, svg} from "./dom.js";
import {duration, memory} from "./format.js";

export class Curve {
  constructor() {
    this.under = svg("path", {class: "under", "vector-effect": "non-scaling-stroke"});
    this.line = svg("path", {class: "line", "vector-effect": "non-scaling-stroke"});
    this.limit = svg("path", {class: "limit", "vector-effect": "non-scaling-stroke"});
    const grid = svg("path", {class: "grid", d: "M0 0H300M0 50H300M0 100H300", "vector-effect": "non-scaling-stroke"});
    this.drawing = svg(
      "svg",
      {class: "chart tall", viewBox: "0 0 300 100", preserveAspectRatio: "none", role: "img"},
      grid,
      this.under,
      this.line,
      this.limit
    );
    this.words = el("p", {class: "hint"});
    [this.top, this.end] = [el("span", {class: "number"}), el("span", {class: "number"})];
    const frame = el(
      "div", {class: "framed"}, this.top, this.drawing, el("div", {class: "axis"}, el("span", {text: "0s"}), this.end)
    );
    this.frame = frame;
    this.node = el("div", {}, this.words, frame);
  }

  show(attempt) {
    const curve = attempt?.curve ?? [];
    this.frame.hidden = curve.length < 2;
    if (curve.length < 2)
      return say(
        this.words,
        attempt ? (attempt.ended_at ? "No measurements." : "No measurements yet.") : "Not started yet."
      );
    const reserved = attempt.reserved_mb === null ? null : attempt.reserved_mb * Math.max(1, attempt.devices.length);
    const peak = Math.max(...curve.map(([, mb]) => mb));
    const until = curve.at(-1)[0];
    const box = {from: 0, until: until || 1, top: 1.12 * Math.max(peak, reserved ?? 0) || 1};
    const [at, values] = [curve.map(([second]) => second), curve.map(([, mb]) => mb)];
    set(this.under, "d", areaPath(at, at.map(() => 0), values, box, Infinity));
    set(this.line, "d", linePath(at, values, box, Infinity));
    set(this.limit, "d", reserved === null ? "" : linePath([0, until], [reserved, reserved], box, Infinity));
    const against = reserved === null ? "Alone on its GPU." :
                                        `${memory(reserved)} reserved (dashed), ${share(peak, reserved)}.`;
    say(this.words, `Peak ${memory(peak)}. ${against}`);
    set(this.drawing, "aria-label", `Memory over ${duration(until)}: peak ${memory(peak)}. ${against}`);
    say(this.top, memory(box.top));
    say(this.end, duration(until));
  }
}

const share = (peak, reserved) =>
  (peak > reserved ? `${memory(peak - reserved)} more than that was used` :
                     `${Math.round((100 * peak) / reserved)}% of it used`);
