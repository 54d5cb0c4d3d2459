/** The host: one line with CPU, RAM and disk, which opens into charts of CPU and RAM. */

import {drawLine, makeChart} from "./charts.js";
import {usedOf} from "./device_history.js";
import {el, number, say, set} from "./dom.js";
import {makeFold} from "./fold.js";
import {UNKNOWN, isKnown, memory, percent} from "./format.js";

export function makeHostStrip(isOpen, onToggle) {
  const [cpu, ram, disk] = [number(), number(), number()];
  const cpuChart = makeChart("CPU", ["under", "line"], percent);
  const ramChart = makeChart("RAM", ["under", "line"], memory);
  const meter = (word, value) => el("span", {class: "meter"}, el("span", {class: "hint", text: word}), " ", value);
  const line = el("div", {class: "line"}, el("span", {class: "meters"}, meter("CPU", cpu), meter("RAM", ram), meter("Disk", disk)));
  const more = el("div", {class: "more", id: "host-charts"}, el("div", {class: "charts"}, cpuChart.node, ramChart.node));
  const fold = makeFold({line, more, isOpen, onToggle});
  fold.setTitle("Host");
  return {node: el("article", {class: "strip hoststrip", "aria-label": "Host"}, line, more), fold, cpu, ram, disk, cpuChart, ramChart};
}

export function updateHost({cpu, ram, disk}, {host, host_reserved: reserved, disks}) {
  say(cpu, `${percent(host.cpu_percent)}${host.cpu_count ? ` of ${+host.cpu_count.toFixed(1)} CPUs` : ""}`);
  const kept = reserved.leases ? ` · ${memory(reserved.ram_mb)} reserved by ${reserved.leases}` : "";
  say(ram, `${memory(usedOf(host))} of ${memory(host.memory_total_mb)}${kept}`);
  showDisk(disk, disks);
}

/** Draw the charts of the open strip, as `device_strip.drawCharts`. */
export function drawHost({cpuChart, ramChart}, host, series, box, describe) {
  drawLine(cpuChart, series.at, series.cpu_percent, box(100));
  describe(cpuChart, "CPU", series.cpu_percent);
  drawLine(ramChart, series.at, series.memory_used_mb, box(host.memory_total_mb || 1));
  describe(ramChart, "RAM", series.memory_used_mb);
}

/** The fullest disk that the queue writes to. */
function showDisk(node, disks) {
  const known = disks.filter((disk) => isKnown(disk.free_mb));
  const least = known.reduce((one, other) => (other.free_mb < (one?.free_mb ?? Infinity) ? other : one), null);
  say(node, least ? `${memory(least.free_mb)} free of ${memory(least.total_mb)}` : UNKNOWN);
  set(node, "title", known.map((each) => `${each.what}: ${memory(each.free_mb)} free (${each.folder})`).join("\n"));
  set(node, "data-tone", known.some((each) => each.free_mb < each.min_free_mb) ? "bad" : "");
}
