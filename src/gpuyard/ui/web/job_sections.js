/**
 * The sections of a job's page, from top to bottom. Each is a function of the page that returns
 *   node           its element
 *   show(job)      shows the job
 *   showChosen(job)  optional: called when the user has chosen an attempt
 *   targets(path)  optional: further targets to watch, below the path of the job, with their listeners
 *   close()        optional: called when the page is left
 */

import {attemptsSection} from "./job_attempts.js";
import {Curve} from "./charts.js";
import {el, keep, say, sayMessage} from "./dom.js";
import {factsSection} from "./job_facts.js";
import {clock} from "./format.js";
import {Log} from "./log.js";
import {progressSection} from "./progress.js";
import {resultSection} from "./job_result.js";
import {makeSection} from "./section.js";

export const SECTIONS = [
  resultSection,
  whySection,
  logSection,
  memorySection,
  factsSection,
  progressSection,
  attemptsSection,
  historySection,
];

/** Why a job waits. It costs the daemon work, so it is watched only while the job waits. */
function whySection(page) {
  const [summary, reasons, estimate] = [el("p"), el("ul"), el("p", {class: "estimate"})];
  const node = makeSection("Why it waits", "why-title", [summary, reasons, estimate], {kind: "why"});
  node.hidden = true;
  const showWhy = (why) => {
    node.hidden = !page.waits || Boolean(why.error);
    if (why.error) return;
    sayMessage(summary, why.summary);
    keep(reasons, whyLines(why), (text) => text, (text) => el("li", {message: text}));
    sayMessage(estimate, why.estimate);
  };
  const show = () => (node.hidden ||= !page.waits);
  return {node, show, targets: (path) => (page.waits ? [[`${path}/why`, showWhy]] : [])};
}

/** Why a job waits, as lines: each different reason once, with all GPUs that it holds for; then what changes it. */
function whyLines({reasons, device_labels: labels}) {
  const places = new Map();
  for (const {device_id: device, text} of reasons) {
    if (!places.has(text)) places.set(text, []);
    if (device) places.get(text).push(labels[device] ?? device);
  }
  const lines = [...places].map(([text, at]) => (at.length ? `GPU ${at.join(", ")}: ${text}` : text));
  const remedies = reasons.filter(({remedy}) => remedy).map(({remedy}) => `To change that: ${remedy}`);
  return [...lines, ...new Set(remedies)];
}

/** The log of the attempt that was chosen; else from the first attempt on, and again when a finished job is retried. */
function logSection(page) {
  const [place, beside] = [el("div"), el("span", {class: "hint"})];
  const node = makeSection("Log", "log-title", place, {beside});
  let log = null, attempt = 0;
  const open = (job) => {
    log?.close();
    log = new Log(page.id, page.choice.chosen);
    attempt = job.attempt;
    place.replaceChildren(log.node);
    beside.replaceChildren(log.note);
  };
  const show = (job) => {
    if (!job.attempt && !log) return say(beside, "not started yet");
    if (!log || (page.choice.chosen === null && log.isOver && job.attempt > attempt)) open(job);
  };
  return {node, show, showChosen: open, close: () => log?.close()};
}

function memorySection(page) {
  const curve = new Curve();
  const node = makeSection("Memory", "memory-title", curve.node, {kind: "half", beside: page.choice.node});
  const show = (job) => {
    node.hidden = !job.attempts.length;
    curve.show(page.choice.show(job.attempts));
  };
  return {node, show, showChosen: show};
}

function historySection() {
  const list = el("ol", {class: "history"});
  const showHistory = (history) =>
    history.error || keep(list, history.events, (event) => event.id + event.kind, makeEvent);
  const node = makeSection("History", "history-title", list);
  return {node, show: () => null, targets: (path) => [[`${path}/history`, showHistory]]};
}

function makeEvent(event) {
  const time = el("time", {datetime: event.at, class: "number hint", text: clock(event.at)});
  return el("li", {}, time, el("strong", {text: event.kind}), el("span", {message: event.text}));
}
