/**
 * The columns of the queue, from left to right, one object each:
 *   title   its heading; on a phone, also the label of its value
 *   sort    its name in the daemon's `order`; without it, the column cannot be sorted
 *   isDown  whether its first click sorts from the highest value
 *   kind    a CSS class of its cells
 *   make    creates the content of a cell; its second argument opens or closes a sweep
 *   update  shows a job in that content
 */

import {setElapsed} from "./clock.js";
import {el, number, say, sayMessage, set} from "./dom.js";
import {UNKNOWN, memory, title} from "./format.js";
import {makeProgress, setProgress} from "./progress.js";
import {COMMAND_END, NAME_END, makeShortened, sayShortened} from "./shortened.js";
import {TIMED, setState, stateChip, stateWord, toneOf} from "./states.js";
import {keyOf, makeSweepName, sweepProgress} from "./sweep.js";

/** A column whose cells are a number or a short text. */
const textColumn = (column, textOf) => ({...column, make: number, update: (node, job) => say(node, textOf(job))});

export const COLUMNS = [
  textColumn({title: "Job", sort: "id", kind: "id", isDown: true}, keyOf),
  {title: "State", sort: "state", kind: "is", make: stateChip, update: updateState},
  {title: "Name and command", sort: "name", kind: "what", make: makeName, update: updateName},
  {title: "Reason", sort: "reason", kind: "reason", make: makeReason, update: updateReason},
  textColumn({title: "GPU", sort: "gpu", kind: "gpu"}, gpusOf),
  textColumn({title: "Memory", sort: "memory", kind: "memory right", isDown: true}, memoryOf),
  textColumn({title: "Priority", sort: "priority", kind: "priority right", isDown: true}, (job) => job.priority),
  {title: "Time", sort: "time", kind: "time right", isDown: true, make: number, update: updateTime},
];

function updateState(node, job) {
  setState(node, job.state, stateWord(job));
}

function makeName(job, toggle) {
  const node = el("div");
  const name = job.group ? makeSweepName(job, toggle) : makeShortened("a", {href: `#/job/${job.id}`});
  const parts = {name, tag: el("span", {class: "tag"}), command: makeShortened("code")};
  node.append(el("div", {class: "named"}, parts.name, parts.tag), parts.command);
  node.parts = parts;
  return node;
}

function updateName({parts}, job) {
  sayShortened(parts.name, title(job), NAME_END);
  sayShortened(parts.command, job.name ? job.command : "", COMMAND_END);
  say(parts.tag, job.tag);
}

/** A running job has its progress in place of a reason; a sweep has how many of its runs are in which state. */
function makeReason() {
  const parts = {words: el("span"), progress: makeProgress()};
  return Object.assign(el("div", {}, parts.words, parts.progress), {parts});
}

function updateReason({parts}, job) {
  const words = [job.group?.text, job.reason].filter(Boolean).join("; ");
  sayMessage(parts.words, words);
  set(parts.words, "title", words || null);
  set(parts.words, "data-tone", toneOf(job.state));
  setProgress(parts.progress, job.group ? sweepProgress(job) : job);
}

function updateTime(node, job) {
  setElapsed(node, job.elapsed_s ?? job.waited_s, TIMED.has(job.state));
  set(node, "title", job.elapsed_s === null ? "waiting time" : "run time");
}

function gpusOf(job) {
  const on = job.gpu_labels.filter((label) => label !== null);
  if (job.place) return job.place;
  if (on.length) return on.join(", ");
  return job.gpus ? `x${job.gpus}` : UNKNOWN;
}

/** The memory reserved, estimated or requested. */
function memoryOf(job) {
  const given = job.reserved_mb ?? job.estimated_mb ?? job.vram_mb;
  if (!job.gpus) return UNKNOWN;
  return given === null ? "alone" : memory(given);
}
