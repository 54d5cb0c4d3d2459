/** The progress of a job: a bar for rows, and bars with charts of its figures for the page of a job. */

import {drawLine, makeChart} from "./charts.js";
import {el, keep, number, say, set} from "./dom.js";
import {UNKNOWN, duration, isKnown} from "./format.js";
import {makeSection} from "./section.js";

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

/** The section of a job's page: the progress and the figures of the last attempt, each with a chart over its run time. */
export function progressSection() {
  const [bar, charts] = [makeProgress(), el("div", {class: "figures"})];
  const node = makeSection("Progress", "progress-title", [bar, charts]);
  const show = (job) => {
    const names = Object.keys(job.figures);
    node.hidden = !job.progress && !names.length;
    if (node.hidden) return;
    setProgress(bar, job, Infinity);
    const curves = job.attempts.at(-1)?.figure_curves ?? {times_s: [], values: {}};
    const figures = names.map((name) => ({name, figure: job.figures[name], values: curves.values[name] ?? []}));
    keep(charts, figures, ({name}) => name, makeFigure, (row, each) => updateFigure(row, each, curves.times_s));
  };
  return {node, show};
}

const makeFigure = ({name}) => {
  const chart = makeChart(name, ["under", "line"], figureText);
  return Object.assign(chart.node, {chart, name});
};

/** Points without a value are left out: a figure that is printed once per epoch is a line all the same. */
function updateFigure({chart, name}, {figure, values}, times) {
  say(chart.most, lastText(figure));
  const points = times.map((at, place) => [at, values[place]]).filter(([, value]) => isKnown(value));
  chart.axes.node.hidden = points.length < 2;
  if (points.length < 2) return;
  const at = points.map(([when]) => when);
  const known = points.map(([, value]) => value);
  const bottom = Math.min(...known);
  const box = {from: at[0], until: at.at(-1), bottom, top: Math.max(...known) - bottom || 1, longestGap: Infinity};
  drawLine(chart, at, known.map((value) => value - bottom), box, duration);
  set(chart.drawing, "aria-label", `${name}: from ${figureText(known[0])} to ${figureText(known.at(-1))}`);
}
