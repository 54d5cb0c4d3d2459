/** The GPUs and the host: a line for each, and which of them are open. */

import {DeviceHistory} from "./device_history.js";
import {PARTS, drawCharts, makeStrip, updateStrip} from "./device_strip.js";
import {noteRefusal} from "./dialogs.js";
import {byId, el, keep, makeSpans, remember, remembered, say, set} from "./dom.js";
import {isKnown, plural} from "./format.js";
import {drawHost, makeHostStrip, updateHost} from "./host_strip.js";

const SPANS = ["10m", "1h", "24h"];
const HOST = "host";
/** More GPUs than this are shown in two columns. */
const ONE_COLUMN = 4;

export class Devices {
  /** `nameOf(job)` returns the name of a job, if known. */
  constructor(nameOf) {
    this.nameOf = nameOf;
    this.history = new DeviceHistory(makeSpans("history", SPANS, "10m", (span) => this.load(span)));
    this.answer = null;
    this.devices = [];
    this.open = new Set(remembered("open-devices", "").split(" ").filter(Boolean));
    byId("legend").append(...PARTS.map(([kind, word]) => el("li", {}, el("span", {class: `swatch ${kind}`}), word)));
    this.host = makeHostStrip(this.open.has(HOST), (isOpen) => this.onToggle(HOST, isOpen));
    this.columns = [el("div"), el("div")];
    byId("strips").append(el("div", {class: "gpus"}, this.columns), this.host.node);
    byId("open-devices").addEventListener("click", () => this.toggleAll());
    byId("to-devices").addEventListener("click", () => byId("devices").scrollIntoView({block: "start"}));
    this.showOpen();
  }

  // Opening

  onToggle(id, isOpen) {
    if (isOpen) this.open.add(id);
    else this.open.delete(id);
    remember("open-devices", [...this.open].join(" "));
    this.showOpen();
    if (this.answer) this.draw();
  }

  /** Open all GPUs, or close all if one is open. */
  toggleAll() {
    const opens = this.open.size === 0;
    const folds = this.strips.map((strip) => strip.fold);
    for (const fold of [...folds, ...(opens ? [] : [this.host.fold])]) fold.setOpen(opens);
    this.open = new Set(opens ? this.devices.map((device) => device.id) : []);
    remember("open-devices", [...this.open].join(" "));
    this.showOpen();
    if (this.answer) this.draw();
  }

  showOpen() {
    const isAnyOpen = this.open.size > 0;
    say(byId("open-devices"), isAnyOpen ? "Close all" : "Open all");
    byId("history-spans").hidden = !isAnyOpen;
  }

  // Answers

  async load(span = this.history.span) {
    try {
      if ((await this.history.load(span)) && this.answer) this.draw();
    } catch (error) {
      noteRefusal(error);
    }
  }

  show(answer) {
    if (answer.error) return;
    const isNew = this.answer?.taken_at !== answer.taken_at;
    this.answer = answer;
    this.now = answer.taken_at ? Date.parse(answer.taken_at) / 1000 : Date.now() / 1000;
    if (isNew) this.history.add(answer, this.now);
    this.devices = answer.devices.filter(
      (device) => device.is_usable || !answer.devices.some((other) => other.parent === device.id)
    );
    this.showStrips();
    updateHost(this.host, answer);
    this.showTotal();
    this.draw();
  }

  /** Show the strips again, as when the name of a job has become known. */
  showStrips() {
    const make = (device) =>
      makeStrip(device, this.open.has(device.id), (isOpen) => this.onToggle(device.id, isOpen));
    const columns = this.devices.length > ONE_COLUMN ? 2 : 1;
    const half = Math.ceil(this.devices.length / columns);
    set(byId("strips"), "data-columns", columns);
    this.columns.forEach((column, place) => {
      const shown = this.devices.slice(place * half, (place + 1) * half);
      keep(column, shown, (device) => device.id, make, (node, device) => updateStrip(node.strip, device, this.nameOf));
    });
  }

  /** The strips, in the order of the devices. */
  get strips() {
    return this.columns.flatMap((column) => [...column.children]).map((node) => node.strip);
  }

  showTotal() {
    const idle = this.devices.filter((device) => device.is_usable && !device.leases.length).length;
    const text = this.devices.length ? `${plural(this.devices.length, "GPU")}, ${idle} idle` : "No GPU found";
    say(byId("devices-total"), text);
    say(byId("to-devices"), `${text} ↓`);
  }

  // Charts, of open strips only

  draw() {
    const box = (top) => this.box(top);
    const describe = (...parts) => this.describe(...parts);
    const {strips} = this;
    this.devices.forEach((device, place) => {
      const strip = strips[place];
      if (strip.fold.isOpen) drawCharts(strip, device, this.history.seriesOf(device.id), box, describe);
    });
    if (this.open.has(HOST)) drawHost(this.host, this.answer.host, this.history.host, box, describe);
  }

  /** The time range of the charts, and their highest value. */
  box(top) {
    const {spanS, stepS} = this.history;
    return {from: this.now - spanS, until: this.now, top, longestGap: Math.max(4 * stepS, 10)};
  }

  /** Describe a chart for screen readers; its peak is also shown beside its title. */
  describe(chart, title, values) {
    const known = values.filter(isKnown);
    const most = known.length ? Math.max(...known) : null;
    say(chart.most, `peak ${chart.format(most)}`);
    const text = known.length ? `now ${chart.format(known.at(-1))}, peak ${chart.format(most)}` : "no data yet";
    set(chart.drawing, "aria-label", `${title} over ${this.history.span}: ${text}`);
  }
}
