/** A GPU: one line with its memory, its load and its jobs, which opens into all figures and charts. */

import {drawLine, drawStack, makeChart} from "./charts.js";
import {el, keep, number, say, sayMessage, set} from "./dom.js";
import {makeFold} from "./fold.js";
import {degrees, memory, percent, watts} from "./format.js";
import {NAME_END, makeShortened, sayShortened} from "./shortened.js";

/** How many jobs the line of a GPU names. */
const MOST_NAMED = 3;

/** The parts of a GPU's memory: CSS class, label, and size in MB. */
export const PARTS = [
  ["own", "queue, used", (m) => Math.min(m.own_used_mb ?? m.own_mb, m.own_mb)],
  ["reserved", "queue, reserved", (m) => Math.max(0, m.own_mb - (m.own_used_mb ?? m.own_mb))],
  ["others", "other leases", (m) => m.others_mb],
  ["foreign", "without a lease", (m) => m.foreign_mb],
  ["free", "free", (m) => m.free_mb],
];

/** `isOpen` and `onToggle` are those of the fold. */
export function makeStrip(device, isOpen, onToggle) {
  const strip = {...makeLine(), ...makeMore()};
  const more = el(
    "div",
    {class: "more", id: `device-${device.id}`},
    el("p", {class: "row"}, strip.name, strip.links),
    strip.fault,
    strip.closed,
    strip.facts,
    strip.leases,
    el("div", {class: "charts"}, strip.memoryChart.node, strip.loadChart.node)
  );
  const line = el("div", {class: "line"}, strip.amount, strip.load, strip.power, strip.heat, strip.bar, strip.holders);
  strip.fold = makeFold({line, more, isOpen, onToggle});
  strip.node = el("article", {class: "strip"}, line, more);
  strip.node.strip = strip;
  return strip.node;
}

const makeLine = () => ({
  bar: el("div", {class: "membar", role: "img"}, PARTS.map(([kind]) => el("span", {class: kind}))),
  amount: el("span", {class: "number amount"}),
  load: el("span", {class: "number load", title: "utilisation"}),
  power: el("span", {class: "number hint power", title: "power"}),
  heat: el("span", {class: "number hint heat", title: "temperature"}),
  holders: el("span", {class: "holders"}),
});

function makeMore() {
  const figures = {figurePower: number(), figureHeat: number(), free: number()};
  const fact = (word, value) => el("div", {}, el("dt", {text: word}), el("dd", {}, value));
  return {
    ...figures,
    facts: el(
      "dl",
      {class: "facts"},
      fact("Free memory", figures.free),
      fact("Power", figures.figurePower),
      fact("Temperature", figures.figureHeat)
    ),
    name: el("span", {class: "hint name"}),
    links: el("span", {class: "hint links"}),
    fault: el("p", {class: "fault"}),
    closed: el("p", {class: "closed"}),
    leases: el("ul", {class: "leases"}),
    memoryChart: makeChart("Memory", ["own", "others", "foreign"], memory),
    loadChart: makeChart("Utilisation", ["under", "line"], percent),
  };
}

/** `nameOf(job)` returns the name of a job, if known. */
export function updateStrip(strip, device, nameOf) {
  const label = `GPU ${device.label ?? "?"}`;
  const faults = device.issues.filter((issue) => issue.severity === "fault" && issue.kind !== "lost");
  const fault = [device.fault, ...faults.map(issueText)].filter(Boolean).join("; ");
  strip.fold.setTitle(label);
  set(strip.node, "aria-label", label);
  set(strip.node, "data-fault", Boolean(fault));
  updateBar(strip, device);
  say(strip.load, percent(device.utilization_percent));
  for (const node of [strip.power, strip.figurePower]) say(node, watts(device.power_draw_w, device.power_limit_w));
  for (const node of [strip.heat, strip.figureHeat]) say(node, degrees(device.temperature_c));
  updateHolders(strip.holders, device, fault, nameOf);
  say(strip.name, device.name);
  say(strip.links, linksText(device));
  sayMessage(strip.fault, fault);
  sayMessage(strip.closed, closedText(device));
  keep(strip.leases, device.leases, (lease) => lease.id, makeLease, (node, lease) => updateLease(node, lease, nameOf));
}

/** Draw the charts of an open strip. `box(top)` is the range that they show, `describe` labels a chart. */
export function drawCharts(strip, device, series, box, describe) {
  const top = device.memory?.capacity_mb ?? device.memory_total_mb ?? Math.max(1, ...series.used_mb);
  drawStack(strip.memoryChart, series.at, [series.own_mb, series.others_mb, series.foreign_mb], box(top));
  describe(strip.memoryChart, `Memory of GPU ${device.label}`, series.used_mb);
  drawLine(strip.loadChart, series.at, series.utilization_percent, box(100));
  describe(strip.loadChart, `Utilisation of GPU ${device.label}`, series.utilization_percent);
}

function updateBar(strip, device) {
  const m = device.memory ?? {};
  const total = m.capacity_mb || 0;
  const amounts = PARTS.map(([, , amount]) => (total ? amount(m) : 0) || 0);
  [...strip.bar.children].forEach((part, place) => {
    part.style.flexGrow = String(amounts[place]);
    part.hidden = amounts[place] <= 0;
  });
  const used = memory(device.memory_used_mb);
  say(strip.amount, total ? `${used} of ${memory(total)}` : `${used} used`);
  say(strip.free, total ? `${memory(m.free_mb)} of ${memory(total)}` : "unknown");
  const words = PARTS.map(([, word], place) => amounts[place] > 0 && `${word} ${memory(amounts[place])}`);
  const summary = words.filter(Boolean).join(", ");
  set(strip.bar, "aria-label", `Memory: ${summary || "unknown"}`);
  set(strip.bar, "title", summary);
}

/** What the end of the line says: a fault, why nothing starts, the jobs, or that it is idle. */
function updateHolders(node, device, fault, nameOf) {
  const named = device.leases.slice(0, MOST_NAMED).map((lease) => holderOf(lease, nameOf));
  const left = device.leases.length - named.length;
  const items = [
    ...(fault ? [{key: "fault", text: "faulty", kind: "fault"}] : []),
    ...(device.drain ? [{key: "drain", text: "drained", kind: "closed"}] : []),
    ...(device.banned ? [{key: "ban", text: "banned", kind: "closed"}] : []),
    ...named,
    ...(left > 0 ? [{key: "left", text: `+${left}`, kind: "hint"}] : []),
  ];
  if (!items.length) items.push({key: "idle", text: "idle", kind: "hint"});
  keep(node, items, (item) => `${item.key} ${item.text}`, makeHolder);
}

function holderOf(lease, nameOf) {
  const isJob = lease.job && lease.is_own;
  const text = isJob ? nameOf(lease.job) || `job ${lease.job}` : `${lease.who || `pid ${lease.pid}`} (${lease.user})`;
  return {key: lease.id, text, job: isJob ? lease.job : null, kind: "holder"};
}

function makeHolder({text, job, kind}) {
  if (!job) return el("span", {class: kind, text});
  const link = makeShortened("a", {href: `#/job/${job}`});
  sayShortened(link, text, NAME_END);
  return link;
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

function makeLease(lease) {
  const link = lease.job && el("a", {href: `#/job/${lease.job}`, text: `job ${lease.job}`});
  const who = link || el("span", {text: lease.who || `pid ${lease.pid}`});
  const swatch = el("span", {class: `swatch ${lease.is_own ? "own" : "others"}`});
  return el("li", {}, swatch, who, el("span", {class: "hint beside"}), el("span", {class: "number hint amount"}));
}

function updateLease(node, lease, nameOf) {
  const [, , beside, amount] = node.children;
  say(beside, lease.job && lease.is_own ? nameOf(lease.job) : lease.user);
  say(amount, `${memory(lease.measured_mb)} ${lease.is_exclusive ? "alone" : `of ${memory(lease.reserved_mb)}`}`);
}
