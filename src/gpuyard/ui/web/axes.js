/** The axes of a chart: numbers with their unit on the left, times below. Text around the drawing, which is stretched. */

import {el, say} from "./dom.js";

const TENTHS = [1, 2, 4, 5, 6, 8, 10];

/** A frame for the drawing; what its labels say, its `aria-label` says to screen readers. */
export function makeAxes(drawing) {
  const labels = (kind) => el("div", {class: kind, "aria-hidden": "true"}, [0, 1, 2].map(() => el("span")));
  const [values, times] = [labels("values"), labels("times")];
  return {node: el("div", {class: "axes"}, values, drawing, times), values, times};
}

/** Label the axes at both ends and in the middle. `format` writes a value, `formatTime` a time; values start at `bottom`. */
export function setAxes({values, times}, {from, until, top, bottom = 0}, format, formatTime) {
  const lowest = bottom ? format(bottom) : "0";
  [format(bottom + top), format(bottom + top / 2), lowest].forEach((text, place) => say(values.children[place], text));
  [from, (from + until) / 2, until].forEach((at, place) => say(times.children[place], formatTime(at)));
}

/** The lowest size in MB, at least `mb`, whose half is a short number too. */
export function roundUp(mb) {
  const unit = mb >= 1024 ? 1024 : 1;
  const tenth = 10 ** Math.floor(Math.log10(Math.max(mb / unit, 1)));
  return unit * tenth * TENTHS.find((each) => each * tenth * unit >= mb - 1e-6);
}
