/** The devices: a card for each, with its memory by owner, its leases, and charts of the last minutes or hours. */

import {drawLine, drawStack, makeChart} from "./charts.js";
import {noteRefusal} from "./dialogs.js";
import {byId, el, keep, remember, remembered, say, set} from "./dom.js";
import {degrees, memory, percent, watts} from "./format.js";
import {History, SPANS, usedOf} from "./history.js";
import {makeSpans} from "./range_picker.js";

/** The parts of a card's memory: CSS class, label, and size in MB. */
const PARTS = [
  ["own", "queue, used", (m) => Math.min(m.own_used_mb ?? m.own_mb, m.own_mb)],
  ["reserved", "queue, reserved", (m) => Math.max(0, m.own_mb - (m.own_used_mb ?? m.own_mb))],
  ["others", "other leases", (m) => m.others_mb],
  ["foreign", "without a lease", (m) => m.foreign_mb],
  ["free", "free", (m) => m.free_mb],
];

export class Devices {
  /** `nameOf(job)` returns the name of a job, if known. */
  constructor(nameOf) {
    this.nameOf = nameOf;
    this.history = new History(remembered("history", "10m"));
    this.answer = null;
    byId("legend").append(...PARTS.map(([kind, word]) => el("li", {}, el("span", {class: `swatch ${kind}`}), word)));
    makeSpans(byId("history-spans"), SPANS, this.history.span, (span) => this.load(span));
    this.hostStrip = makeHost();
    byId("hoststrip").append(this.hostStrip.node);
  }

  async load(span = this.history.span) {
    remember("history", span);
    try {
      if ((await this.history.load(span)) && this.answer) this.show(this.answer);
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
    const devices = answer.devices.filter(
      (device) => device.is_usable || !answer.devices.some((other) => other.parent === device.id)
    );
    keep(byId("cards"), devices, (device) => device.id, makeCard, (node, device) => this.update(node.card, device));
    this.showHost(answer.host);
  }

  get box() {
    return {from: this.now - this.history.spanS, until: this.now};
  }

  update(card, device) {
    say(card.title, `GPU ${device.index ?? "?"}`);
    say(card.name, device.name ?? "");
    set(card.node, "data-fault", Boolean(device.fault));
    say(card.fault, device.fault ?? "");
    card.fault.hidden = !device.fault;
    updateBar(card, device);
    say(card.load, percent(device.utilization_percent));
    say(card.power, watts(device.power_draw_w, device.power_limit_w));
    say(card.heat, degrees(device.temperature_c));
    keep(card.leases, device.leases, (lease) => lease.id, makeLease, (node, lease) => this.updateLease(node, lease));
    card.idle.hidden = device.leases.length > 0;
    this.draw(card, device);
  }

  updateLease(node, lease) {
    const [, , beside, amount] = node.children;
    say(beside, lease.job && lease.is_own ? this.nameOf(lease.job) : lease.user);
    say(amount, `${memory(lease.measured_mb)} ${lease.is_exclusive ? "alone" : `of ${memory(lease.reserved_mb)}`}`);
  }

  draw(card, device) {
    const series = this.history.seriesOf(device.id);
    const top = device.memory?.capacity_mb ?? device.memory_total_mb ?? Math.max(1, ...series.used_mb);
    const gap = this.history.longestGap;
    drawStack(
      card.memoryChart, series.at, [series.own_mb, series.others_mb, series.foreign_mb], {...this.box, top}, gap
    );
    drawLine(card.loadChart, series.at, series.utilization_percent, {...this.box, top: 100}, gap);
    describe(card.memoryChart, `Memory of GPU ${device.index} over ${this.history.span}`, series.used_mb, memory);
    describe(
      card.loadChart,
      `Utilisation of GPU ${device.index} over ${this.history.span}`,
      series.utilization_percent,
      percent
    );
  }

  showHost(host) {
    const {hostStrip: strip, box, history} = this;
    const used = usedOf(host);
    say(strip.cpu, `${percent(host.cpu_percent)}${host.cpu_count ? ` of ${+host.cpu_count.toFixed(1)} CPUs` : ""}`);
    say(strip.ram, `${memory(used)} of ${memory(host.memory_total_mb)}`);
    drawLine(strip.cpuChart, history.host.at, history.host.cpu_percent, {...box, top: 100}, history.longestGap);
    drawLine(
      strip.ramChart,
      history.host.at,
      history.host.memory_used_mb,
      {...box, top: host.memory_total_mb || 1},
      history.longestGap
    );
    describe(strip.cpuChart, `CPU over ${history.span}`, history.host.cpu_percent, percent);
    describe(strip.ramChart, `RAM over ${history.span}`, history.host.memory_used_mb, memory);
  }
}

/** Describe a chart for screen readers; its peak is also shown beside its title. */
function describe(chart, title, values, format) {
  const known = values.filter((value) => value !== null && value !== undefined);
  const most = known.length ? Math.max(...known) : null;
  say(chart.most, `peak ${format(most)}`);
  set(
    chart.drawing,
    "aria-label",
    known.length ? `${title}: now ${format(known.at(-1))}, peak ${format(most)}` : `${title}: no data yet`
  );
}

function makeCard() {
  const title = el("h3");
  const name = el("span", {class: "hint name"});
  const fault = el("p", {class: "fault", hidden: true});
  const parts = PARTS.map(([kind]) => el("span", {class: kind}));
  const bar = el("div", {class: "membar", role: "img"}, parts);
  const [amount, detail, load, power, heat] = Array.from({length: 5}, () => el("span", {class: "number"}));
  const leases = el("ul", {class: "leases"});
  const idle = el("p", {class: "hint idle", text: "idle"});
  const memoryChart = makeChart("Memory", ["own", "others", "foreign"]);
  const loadChart = makeChart("Utilisation", ["under", "line"]);
  const facts = el("dl", {class: "facts"}, fact("Utilisation", load), fact("Power", power), fact("Temperature", heat));
  const node = el(
    "article",
    {class: "card"},
    el("header", {}, title, name),
    fault,
    el("div", {class: "amounts"}, amount, detail),
    bar,
    facts,
    leases,
    idle,
    el("div", {class: "charts"}, memoryChart.node, loadChart.node)
  );
  detail.classList.add("hint");
  node.card =
    {node, title, name, fault, parts, bar, amount, detail, load, power, heat, leases, idle, memoryChart, loadChart};
  return node;
}

const fact = (word, value) => el("div", {}, el("dt", {text: word}), el("dd", {}, value));

function updateBar(card, device) {
  const m = device.memory ?? {};
  const total = m.capacity_mb || 0;
  const amounts = PARTS.map(([, , amount]) => (total ? amount(m) : 0) || 0);
  card.parts.forEach((part, place) => {
    part.style.flexGrow = String(amounts[place]);
    part.hidden = amounts[place] <= 0;
  });
  say(card.amount, `${memory(device.memory_used_mb)} used`);
  say(card.detail, total ? `${memory(m.free_mb)} free of ${memory(total)}` : "memory unknown");
  const words = PARTS.map(([, word], place) => amounts[place] > 0 && `${word} ${memory(amounts[place])}`);
  const summary = words.filter(Boolean).join(", ");
  set(card.bar, "aria-label", `Memory: ${summary || "unknown"}`);
  set(card.bar, "title", summary);
}

function makeLease(lease) {
  const link = lease.job && el("a", {href: `#/job/${lease.job}`, text: `job ${lease.job}`});
  const who = link || el("span", {text: lease.who || `pid ${lease.pid}`});
  const swatch = el("span", {class: `swatch ${lease.is_own ? "own" : "others"}`});
  return el("li", {}, swatch, who, el("span", {class: "hint beside"}), el("span", {class: "number hint amount"}));
}

function makeHost() {
  const [cpu, ram] = [el("span", {class: "number"}), el("span", {class: "number"})];
  const [cpuChart, ramChart] = [makeChart("CPU", ["under", "line"]), makeChart("RAM", ["under", "line"])];
  const side = (word, value, chart) => {
    chart.node.firstChild.hidden = true;
    return el("div", {class: "meter"}, el("span", {class: "word", text: word}), value, chart.node);
  };
  const node = el("div", {class: "panel hostmeters"}, side("CPU", cpu, cpuChart), side("RAM", ram, ramChart));
  return {node, cpu, ram, cpuChart, ramChart};
}
