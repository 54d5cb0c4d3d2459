/** The devices: a card for each, with its memory by owner, its leases, and charts of the last minutes or hours. */

import {drawLine, drawStack, makeChart} from "./charts.js";
import {noteRefusal} from "./dialogs.js";
import {byId, el, keep, makeSpans, number, say, set} from "./dom.js";
import {UNKNOWN, degrees, isKnown, memory, percent, watts} from "./format.js";
import {get} from "./api.js";

/** The series that are drawn, and their values in an answer of the stream about a device, or about the host. */
const DEVICE_SERIES = {
  own_mb: (device) => device.memory?.own_used_mb,
  others_mb: (device) => device.memory?.others_used_mb,
  foreign_mb: (device) => device.memory?.foreign_mb,
  used_mb: (device) => device.memory_used_mb,
  utilization_percent: (device) => device.utilization_percent,
};
const HOST_SERIES = {cpu_percent: (host) => host.cpu_percent, memory_used_mb: usedOf};
const SPANS = ["10m", "1h", "24h"];

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
    this.history = new History(makeSpans("history", SPANS, "10m", (span) => this.load(span)));
    this.answer = null;
    byId("legend").append(...PARTS.map(([kind, word]) => el("li", {}, el("span", {class: `swatch ${kind}`}), word)));
    this.hostStrip = makeHost();
    byId("hoststrip").append(this.hostStrip.node);
  }

  async load(span = this.history.span) {
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
    this.showHost(answer.host, answer.host_reserved);
    this.showDisk(answer.disks);
  }

  /** The time range of the charts, and their highest value. */
  box(top) {
    const {spanS, stepS} = this.history;
    return {from: this.now - spanS, until: this.now, top, longestGap: Math.max(4 * stepS, 10)};
  }

  update(card, device) {
    say(card.title, `GPU ${device.label ?? "?"}`);
    say(card.name, device.name);
    const faults = device.issues.filter((issue) => issue.severity === "fault" && issue.kind !== "lost");
    set(card.node, "data-fault", Boolean(device.fault) || faults.length > 0);
    say(card.fault, [device.fault, ...faults.map(issueText)].filter(Boolean).join("; "));
    say(card.closed, closedText(device));
    say(card.links, linksText(device));
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
    const parts = [series.own_mb, series.others_mb, series.foreign_mb];
    drawStack(card.memoryChart, series.at, parts, this.box(top));
    this.describe(card.memoryChart, `Memory of GPU ${device.label}`, series.used_mb, memory);
    const load = series.utilization_percent;
    this.drawLine(card.loadChart, `Utilisation of GPU ${device.label}`, series.at, load, 100, percent);
  }

  showHost(host, reserved) {
    const {cpu, ram, cpuChart, ramChart} = this.hostStrip;
    const {at, cpu_percent: load, memory_used_mb: used} = this.history.host;
    say(cpu, `${percent(host.cpu_percent)}${host.cpu_count ? ` of ${+host.cpu_count.toFixed(1)} CPUs` : ""}`);
    const kept = reserved.leases ? ` · ${memory(reserved.ram_mb)} reserved by ${reserved.leases}` : "";
    say(ram, `${memory(usedOf(host))} of ${memory(host.memory_total_mb)}${kept}`);
    this.drawLine(cpuChart, "CPU", at, load, 100, percent);
    this.drawLine(ramChart, "RAM", at, used, host.memory_total_mb || 1, memory);
  }

  /** The fullest disk that the queue writes to. */
  showDisk(disks) {
    const known = disks.filter((disk) => isKnown(disk.free_mb));
    const least = known.reduce((one, other) => (other.free_mb < (one?.free_mb ?? Infinity) ? other : one), null);
    const {disk} = this.hostStrip;
    say(disk, least ? `${memory(least.free_mb)} free of ${memory(least.total_mb)}` : UNKNOWN);
    set(disk, "title", known.map((each) => `${each.what}: ${memory(each.free_mb)} free (${each.folder})`).join("\n"));
    set(disk, "data-tone", known.some((each) => each.free_mb < each.min_free_mb) ? "bad" : "");
  }

  drawLine(chart, title, at, values, top, format) {
    drawLine(chart, at, values, this.box(top));
    this.describe(chart, title, values, format);
  }

  /** Describe a chart for screen readers; its peak is also shown beside its title. */
  describe(chart, title, values, format) {
    const known = values.filter(isKnown);
    const most = known.length ? Math.max(...known) : null;
    say(chart.most, `peak ${format(most)}`);
    const text = known.length ? `now ${format(known.at(-1))}, peak ${format(most)}` : "no data yet";
    set(chart.drawing, "aria-label", `${title} over ${this.history.span}: ${text}`);
  }
}

/** What is wrong with the device, since when, and what to do. */
function issueText({text, since, remedy}) {
  return `${text}${since ? `, since ${new Date(since).toLocaleString()}` : ""} (${remedy})`;
}

/** Why nothing new starts on the device, or why it is the last choice; empty if work may start there. */
function closedText(device) {
  if (device.banned) return "banned in the configuration: nothing starts here";
  if (!device.drain) {
    const alarms = device.issues.filter((issue) => issue.severity === "alarm");
    return alarms.map((issue) => `used last: ${issueText(issue)}`).join("; ");
  }
  const {user, since, reason} = device.drain;
  return `drained by ${user} since ${new Date(since).toLocaleString()}${reason ? `: ${reason}` : ""}`;
}

/** The GPUs that NVLink or XGMI joins to the device, and its NUMA node; empty where both are unknown. */
function linksText(device) {
  const {linked_to: others, numa_node: node} = device;
  const joined = others.length ? `${device.vendor === "amd" ? "XGMI" : "NVLink"} to GPU ${others.join(", ")}` : "";
  return [joined, node === null ? "" : `NUMA node ${node}`].filter(Boolean).join(" · ");
}

function makeCard() {
  const card = {
    title: el("h3"),
    name: el("span", {class: "hint name"}),
    fault: el("p", {class: "fault"}),
    closed: el("p", {class: "closed"}),
    links: el("p", {class: "hint links"}),
    amount: number(),
    detail: el("span", {class: "number hint"}),
    load: number(),
    power: number(),
    heat: number(),
    bar: el("div", {class: "membar", role: "img"}, PARTS.map(([kind]) => el("span", {class: kind}))),
    leases: el("ul", {class: "leases"}),
    idle: el("p", {class: "hint idle", text: "idle"}),
    memoryChart: makeChart("Memory", ["own", "others", "foreign"]),
    loadChart: makeChart("Utilisation", ["under", "line"]),
  };
  const facts = [fact("Utilisation", card.load), fact("Power", card.power), fact("Temperature", card.heat)];
  card.node = el(
    "article",
    {class: "card"},
    el("header", {}, card.title, card.name),
    card.fault,
    card.closed,
    card.links,
    el("div", {class: "amounts"}, card.amount, card.detail),
    card.bar,
    el("dl", {class: "facts"}, facts),
    card.leases,
    card.idle,
    el("div", {class: "charts"}, card.memoryChart.node, card.loadChart.node)
  );
  card.node.card = card;
  return card.node;
}

const fact = (word, value) => el("div", {}, el("dt", {text: word}), el("dd", {}, value));

function updateBar(card, device) {
  const m = device.memory ?? {};
  const total = m.capacity_mb || 0;
  const amounts = PARTS.map(([, , amount]) => (total ? amount(m) : 0) || 0);
  [...card.bar.children].forEach((part, place) => {
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
  const [cpu, ram, disk] = [number(), number(), number()];
  const [cpuChart, ramChart] = [makeChart("CPU", ["under", "line"]), makeChart("RAM", ["under", "line"])];
  const side = (word, value, chart) => {
    chart.node.firstChild.hidden = true;
    return el("div", {class: "meter"}, el("span", {class: "word", text: word}), value, chart.node);
  };
  const space = el("div", {class: "meter"}, el("span", {class: "word", text: "Disk"}), disk);
  const parts = [side("CPU", cpu, cpuChart), side("RAM", ram, ramChart), space];
  return {node: el("div", {class: "panel hostmeters"}, parts), cpu, ram, disk, cpuChart, ramChart};
}

/** RAM in use in MB; null if unknown. */
function usedOf(host) {
  const {memory_total_mb: total, memory_available_mb: available} = host;
  return isKnown(total) && isKnown(available) ? total - available : null;
}

const makeSeries = (values) => Object.fromEntries(["at", ...Object.keys(values)].map((name) => [name, []]));

/** Recent measurements of each device: requested once, then extended by the event stream. */
class History {
  constructor(span) {
    this.span = span;
    this.spanS = 600;
    this.stepS = 2;
    this.devices = new Map();
    this.host = makeSeries(HOST_SERIES);
    this.asked = 0;
  }

  /** Load a time range. Returns false if another one was requested meanwhile. */
  async load(span) {
    const asked = ++this.asked;
    const answer = await get(`/devices/history?span=${span}`);
    if (asked !== this.asked) return false;
    Object.assign(this, {span, spanS: answer.span_s, stepS: answer.step_s || 1, host: answer.host});
    this.devices = new Map(Object.entries(answer.devices));
    return true;
  }

  /** Add an answer of the stream about all devices. */
  add(answer, at) {
    for (const device of answer.devices) this.append(this.seriesOf(device.id), at, DEVICE_SERIES, device);
    this.append(this.host, at, HOST_SERIES, answer.host);
  }

  seriesOf(id) {
    if (!this.devices.has(id)) this.devices.set(id, makeSeries(DEVICE_SERIES));
    return this.devices.get(id);
  }

  /** Keep at most one point per step, as the daemon does; the newest value is always the last point. */
  append(series, at, values, source) {
    const last = series.at.length - 1;
    const replaces = last > 0 && at - series.at[last - 1] < this.stepS;
    const place = replaces ? last : last + 1;
    series.at[place] = at;
    for (const [name, valueOf] of Object.entries(values)) series[name][place] = valueOf(source) ?? null;
    while (series.at.length > 2 && series.at[1] < at - this.spanS)
      for (const list of Object.values(series)) list.shift();
  }
}
