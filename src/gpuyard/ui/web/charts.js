/**
 * Charts in SVG: series over time, stacked or as a line. Unknown values are gaps. The view box has a fixed size and is
 * scaled to the width of the page; lines keep their width.
 */

import {el, set, svg} from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;

/** The frame of a chart: title, drawing and peak label. */
export function makeChart(title, kinds) {
  const paths = kinds.map((kind) => svg("path", {class: kind, "vector-effect": "non-scaling-stroke"}));
  const grid =
    svg("path", {class: "grid", d: `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}`, "vector-effect": "non-scaling-stroke"});
  const drawing = svg(
    "svg",
    {class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title},
    grid,
    paths
  );
  const most = el("span", {class: "most number"});
  const node = el("figure", {class: "plot"}, el("figcaption", {}, el("span", {text: title}), most), drawing);
  return {node, drawing, paths, most};
}

const isKnown = (value) => value !== null && value !== undefined;

/** Segments of known points, `[[x, y, index], …]` each, split where a value is unknown or a gap is too long. */
function segments(at, values, longestGap) {
  const found = [];
  let segment = [];
  at.forEach((when, place) => {
    const value = values[place];
    const isLate = segment.length > 0 && when - at[place - 1] > longestGap;
    if ((!isKnown(value) || isLate) && segment.length) {
      found.push(segment);
      segment = [];
    }
    if (isKnown(value)) segment.push([when, value, place]);
  });
  if (segment.length) found.push(segment);
  return found;
}

const scale = ({from, until, top}) => ({
  x: (when) => ((WIDTH * (when - from)) / (until - from)).toFixed(1),
  y: (value) => (HEIGHT - (HEIGHT * Math.min(Math.max(value, 0), top)) / (top || 1)).toFixed(1),
});

export function linePath(at, values, box, longestGap) {
  const {x, y} = scale(box);
  return segments(at, values, longestGap)
    .map((segment) => `M${segment.map(([when, value]) => `${x(when)} ${y(value)}`).join("L")}`)
    .join("");
}

/** The area between two series; where `above` is known, `below` must be known too. */
export function areaPath(at, below, above, box, longestGap) {
  const {x, y} = scale(box);
  return segments(at, above, longestGap)
    .map((segment) => {
      const forth = segment.map(([when, value]) => `${x(when)} ${y(value)}`);
      const back = segment.map(([when, , place]) => `${x(when)} ${y(below[place] ?? 0)}`).reverse();
      return `M${forth.join("L")}L${back.join("L")}Z`;
    })
    .join("");
}

/** Draw stacked series, from the bottom. */
export function drawStack(chart, at, series, box, longestGap) {
  let below = at.map(() => 0);
  series.forEach((values, place) => {
    const under = below;
    const above = values.map((value, index) => (isKnown(value) ? value + (under[index] ?? 0) : null));
    set(chart.paths[place], "d", areaPath(at, below, above, box, longestGap));
    below = above.map((value, index) => value ?? below[index]);
  });
}

/** Draw a line and the area under it. */
export function drawLine(chart, at, values, box, longestGap) {
  set(chart.paths[0], "d", areaPath(at, at.map(() => 0), values, box, longestGap));
  set(chart.paths[1], "d", linePath(at, values, box, longestGap));
}
