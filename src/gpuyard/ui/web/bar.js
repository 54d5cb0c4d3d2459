/** A bar of the timeline: how it is drawn, and its tooltip. */

import {svg} from "./dom.js";
import {clock, clockShort, duration, memory} from "./format.js";

/** The legend of the colours. */
export const LEGEND = [
  ["live", "running"],
  ["suspended", "suspended"],
  ["good", "succeeded"],
  ["bad", "failed"],
  ["oom", "out of memory"],
  ["over", "cancelled"]
];

/** A time on the axis. */
export const makeTick = (at) => svg("g", {}, svg("line", {y1: 0}), svg("text", {text: clockShort(at * 1000)}));

/** One run of a job in the timeline. */
export const makeStretch = (stretch) => svg(
  "g",
  {class: "stretch", role: "link", tabindex: -1, "data-job": stretch.job},
  svg("rect", {rx: 3, class: "body"}),
  svg("g")
);

export function open(node) {
  if (node) window.location.hash = `#/job/${node.dataset.job}`;
}

/** The lines of the tooltip of a bar. */
export function describe(stretch, now) {
  const until = stretch.until ?? now;
  const how = stretch.outcome?.replaceAll("-", " ") ?? stretch.state;
  const end = stretch.until === null ? "now" : clock(stretch.until * 1000);
  const attempt = stretch.attempt > 1 ? `, attempt ${stretch.attempt}` : "";
  const parked = stretch.suspended.reduce((sum, [from, to]) => sum + (to ?? now) - from, 0);
  return [
    `${stretch.name ? `${stretch.name} · ` : ""}job ${stretch.job}${attempt}`,
    `${how}${stretch.reserved_mb ? `, ${memory(stretch.reserved_mb)} reserved` : ""}`,
    `${clock(stretch.from * 1000)} – ${end}, ${duration(until - stretch.from)}`,
    ...(parked >= 1 ? [`suspended for ${duration(parked)}`] : []),
    ...(stretch.name ? [] : [stretch.command]),
  ].filter(Boolean);
}
