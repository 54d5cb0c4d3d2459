/** The progress of a job: a bar for rows, and bars with charts of its figures for the page of a job. */

import {drawLine, makeChart} from "./charts.js";
import {el, keep, number, say, set} from "./dom.js";
import {UNKNOWN, duration, isKnown} from "./format.js";

const shorten = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(1));

/** `epoch 4.5/10`; empty where the percentage says the same. */
const amountOf = ({done, total, unit}) =>
  unit === "%" ? "" : `${unit} ${shorten(done)}${total === null ? "" : `/${shorten(total)}`}`.trim();

export const figureText = (value) => (isKnown(value) ? String(Number(value.toPrecision(4))) : UNKNOWN);

const lastText = (figure) => (figure.last === null ? "not a number" : figureText(figure.last));

/** A bar with its text, hidden while nothing is known. */
export function makeProgress() {
  const fill = el("span");
  const words = number();
  const track = el("span", {class: "progresstrack", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100}, fill);
  const node = el("span", {class: "progress", hidden: true}, track, words);
  return Object.assign(node, {parts: {fill, track, words}});
}

/** `most` figures are named beside the bar. */
export function setProgress(node, job, most = 2) {
  const {fill, track, words} = node.parts;
  const {progress} = job;
  const isOver = job.ended_at !== null;
  node.hidden = (!progress || isOver) && !(most > 2 && progress);
  if (node.hidden) return;
  const {percent, left_s: left} = progress;
  track.hidden = percent === null;
  fill.style.width = `${percent ?? 0}%`;
  set(track, "aria-valuenow", percent === null ? null : Math.round(percent));
  set(track, "aria-label", `Progress of job ${job.id}`);
  const figures = Object.entries(job.figures).slice(0, most).map(([name, figure]) => `${name} ${lastText(figure)}`);
  const texts = [
    percent === null ? null : `${Math.floor(percent)}%`,
    amountOf(progress),
    isOver || left === null ? null : `${duration(left)} left`,
    ...(most > 2 ? [] : figures),
  ];
  say(words, texts.filter(Boolean).join(" · "));
}

/** The progress and the figures of the last attempt, with a small chart of each figure over its run time. */
export class ProgressPanel {
  constructor() {
    this.bar = makeProgress();
    this.charts = el("div", {class: "figures"});
    this.node = el("section", {class: "panel", "aria-labelledby": "progress-title", hidden: true},
      el("h3", {id: "progress-title", text: "Progress"}), this.bar, this.charts);
  }

  show(job) {
    const names = Object.keys(job.figures);
    this.node.hidden = !job.progress && !names.length;
    if (this.node.hidden) return;
    setProgress(this.bar, job, Infinity);
    const curves = job.attempts.at(-1)?.figure_curves ?? {times_s: [], values: {}};
    const figures = names.map((name) => ({name, figure: job.figures[name], values: curves.values[name] ?? []}));
    keep(this.charts, figures, ({name}) => name, makeFigure, (node, each) => updateFigure(node, each, curves.times_s));
  }
}

function makeFigure({name}) {
  const chart = makeChart(name, ["under", "line"]);
  const range = el("span", {class: "hint number"});
  const end = el("span", {class: "hint number"});
  chart.node.append(el("div", {class: "axis"}, range, end));
  return Object.assign(chart.node, {chart, range, end});
}

/** Points without a value are left out: a figure that is printed once per epoch is a line all the same. */
function updateFigure(node, {figure, values}, times) {
  say(node.chart.most, lastText(figure));
  const points = times.map((at, place) => [at, values[place]]).filter(([, value]) => isKnown(value));
  set(node.chart.drawing, "hidden", points.length < 2 ? "" : null);
  say(node.range, figure.least === null ? "" : `${figureText(figure.least)} to ${figureText(figure.most)}`);
  say(node.end, points.length < 2 ? "" : duration(times.at(-1)));
  if (points.length < 2) return;
  const known = points.map(([, value]) => value);
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const at = points.map(([when]) => when);
  const box = {from: at[0], until: at.at(-1) || 1, top: 1.08 * (most - least) || 1, longestGap: Infinity};
  drawLine(node.chart, at, known.map((value) => value - least), box);
  set(node.chart.drawing, "aria-label", `${node.firstChild.firstChild.textContent}: from ${figureText(known[0])} to ${figureText(known.at(-1))}`);
}
