/**
 * Charts in SVG: series over time, stacked or as a line. Unknown values are gaps. The view box has a fixed size and is
 * scaled to the width of the page; lines keep their width.
 */

import {makeAxes, roundUp, setAxes} from "./axes.js";
import {el, say, set, svg} from "./dom.js";
import {clockShort, duration, isKnown, memory} from "./format.js";

const WIDTH = 300;
const HEIGHT = 100;

/** The drawing, with a path for each of `kinds`, and horizontal lines at `heights`. */
function makeDrawing(kind, kinds, heights, label = null) {
  const makePath = (name, d = null) => svg("path", {class: name, d, "vector-effect": "non-scaling-stroke"});
  const paths = kinds.map((name) => makePath(name));
  const grid = makePath("grid", heights.map((y) => `M0 ${y}H${WIDTH}`).join(""));
  const box =
    {class: kind, viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label};
  return {drawing: svg("svg", box, grid, paths), paths};
}

/** A chart with its title, its peak and its axes; `format` writes a value. */
export function makeChart(title, kinds, format) {
  const {drawing, paths} = makeDrawing("chart", kinds, [0, HEIGHT / 2], title);
  const most = el("span", {class: "most number"});
  const axes = makeAxes(drawing);
  const node = el("figure", {class: "plot"}, el("figcaption", {}, el("span", {text: title}), most), axes.node);
  return {node, drawing, paths, most, axes, format};
}

/** Label the axes of a chart over wall time, in seconds. */
const labelAxes = ({axes, format}, box, formatTime = (at) => clockShort(1000 * at)) =>
  setAxes(axes, box, format, formatTime);

/** Segments of known points `[time, value, index]`, split where a value is unknown or a gap is too long. */
function segments(at, values, longestGap) {
  const found = [];
  at.forEach((when, place) => {
    if (!isKnown(values[place])) return;
    const goesOn = place > 0 && isKnown(values[place - 1]) && when - at[place - 1] <= longestGap;
    if (!goesOn) found.push([]);
    found.at(-1).push([when, values[place], place]);
  });
  return found;
}

/** A line, or the area above `below`, which must be known where `values` are. */
function pathOf(at, values, {from, until, top, longestGap}, below = null) {
  const x = (when) => ((WIDTH * (when - from)) / (until - from)).toFixed(1);
  const y = (value) => (HEIGHT - (HEIGHT * Math.min(Math.max(value, 0), top)) / (top || 1)).toFixed(1);
  const draw = (segment) => {
    const forth = segment.map(([when, value]) => `${x(when)} ${y(value)}`).join("L");
    if (below === null) return `M${forth}`;
    const back = segment.map(([when, , place]) => `${x(when)} ${y(below[place] ?? 0)}`).reverse();
    return `M${forth}L${back.join("L")}Z`;
  };
  return segments(at, values, longestGap).map(draw).join("");
}

/** Draw stacked series, from the bottom. */
export function drawStack(chart, at, series, box) {
  labelAxes(chart, box);
  let below = at.map(() => 0);
  series.forEach((values, place) => {
    const under = below;
    const above = values.map((value, index) => (isKnown(value) ? value + (under[index] ?? 0) : null));
    set(chart.paths[place], "d", pathOf(at, above, box, under));
    below = above.map((value, index) => value ?? under[index]);
  });
}

/** Draw a line and the area under it. `formatTime` writes a time if it is not wall time. */
export function drawLine(chart, at, values, box, formatTime) {
  labelAxes(chart, box, formatTime);
  drawArea(chart, at, values, box);
}

function drawArea(chart, at, values, box) {
  set(chart.paths[0], "d", pathOf(at, values, box, at.map(() => 0)));
  set(chart.paths[1], "d", pathOf(at, values, box));
}

/** The memory of an attempt over time, with the reserved amount. */
export class Curve {
  constructor() {
    this.chart = makeDrawing("chart tall", ["under", "line", "limit"], [0, HEIGHT / 2, HEIGHT]);
    this.words = el("p", {class: "hint"});
    this.axes = makeAxes(this.chart.drawing);
    this.node = el("div", {}, this.words, this.axes.node);
  }

  show(attempt) {
    const curve = attempt?.curve ?? [];
    this.axes.node.hidden = curve.length < 2;
    if (!attempt) return say(this.words, "Not started yet.");
    if (curve.length < 2) return say(this.words, attempt.ended_at ? "No measurements." : "No measurements yet.");
    const reserved = attempt.reserved_mb === null ? null : attempt.reserved_mb * Math.max(1, attempt.devices.length);
    const [at, values] = [curve.map(([second]) => second), curve.map(([, mb]) => mb)];
    const [peak, until] = [Math.max(...values), at.at(-1)];
    const top = roundUp(1.05 * Math.max(peak, reserved ?? 0));
    const box = {from: 0, until: until || 1, top, longestGap: Infinity};
    drawArea(this.chart, at, values, box);
    setAxes(this.axes, box, memory, duration);
    set(this.chart.paths[2], "d", reserved === null ? "" : pathOf([0, until], [reserved, reserved], box));
    const text = `${memory(peak)}. ${compare(peak, reserved)}`;
    say(this.words, `Peak ${text}`);
    set(this.chart.drawing, "aria-label", `Memory over ${duration(until)}: peak ${text}`);
  }
}

function compare(peak, reserved) {
  if (reserved === null) return "Alone on its GPU.";
  const used = peak > reserved ? `${memory(peak - reserved)} more than that was used` :
                                 `${Math.round((100 * peak) / reserved)}% of it used`;
  return `${memory(reserved)} reserved (dashed), ${used}.`;
}
