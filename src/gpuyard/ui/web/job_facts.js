/** What the job was submitted with, and where and when it ran. */

import {el, keep, say} from "./dom.js";
import {clock, duration, energy, memory} from "./format.js";

export function factsSection() {
  const [list, advice] = [el("dl", {class: "facts many"}), el("ul", {class: "advice"})];
  const node = el("section", {class: "panel half", "aria-label": "Facts"}, list, advice);
  const show = (job) => {
    const facts = factsOf(job).filter(([, value]) => value !== null && value !== "");
    keep(list, facts, ([word]) => word, makeFact, updateFact);
    keep(advice, job.advice, (text) => text, (text) => el("li", {message: text}));
  };
  return {node, show};
}

const makeFact = ([word]) => el("div", {}, el("dt", {text: word}), el("dd"));

function updateFact(node, [, value]) {
  if (Array.isArray(value)) keep(node.lastChild, value, (each) => each.id + each.state, linkTo);
  else say(node.lastChild, value);
}

const linkTo = ({id, state, href = `#/job/${id}`, text = state ? `${id} (${state})` : `Job ${id}`}) => el("a", {href, text});

const arrayText = ({array, index}) => `${array}${index === null ? "" : `, index ${index}`}`;

function factsOf(job) {
  const gpus = job.gpu_labels.filter((label) => label !== null);
  return [
    ["Resubmitted from", job.resubmitted_from ? [{id: job.resubmitted_from}] : null],
    ["Not before", job.not_before && clock(job.not_before)],
    ["Directory", job.cwd],
    ...codeFacts(job),
    ["Container", job.container && `${job.container.image} (${job.container.tool})`],
    ["User", job.user],
    ["GPUs", gpus.length ? `${job.gpus} (on ${gpus.join(", ")})` : String(job.gpus)],
    ["Memory", memoryText(job)],
    ["Energy", job.energy && energyText(job.energy)],
    ["Priority", String(job.priority)],
    ["Tag", job.tag],
    ["Submitted", clock(job.submitted_at)],
    ["Started", job.started_at && clock(job.started_at)],
    ["Ended", job.ended_at && clock(job.ended_at)],
    ["Time limit", job.time_limit_s && duration(job.time_limit_s)],
    ["Retries", job.retries ? `${Math.min(job.failures, job.retries)} of ${job.retries} used` : null],
    ["After", job.after.length ? job.after : null],
    ["Array", job.array === null ? null : [{id: job.array, href: `#/sweep/${job.array}`, text: arrayText(job)}]],
    ["Values", Object.entries(job.values).map(([name, value]) => `${name}=${value}`).join(" ")],
    ["Engine", job.engine === "local" ? null : [job.engine, job.place].filter(Boolean).join(", ")],
  ];
}

/** The code of a job: the commit, the script, and the snapshot that it runs in. */
function codeFacts({code}) {
  if (!code) return [];
  const isGone = code.snapshot !== null && !code.snapshot_exists;
  return [
    ["Code", code.text],
    ["Script", code.script],
    ["Snapshot", isGone ? "removed" : code.snapshot],
  ];
}

/** The energy of all attempts, their mean power, and how long they held GPUs without using them. */
function energyText(used) {
  const power = used.mean_w === null ? null : `${Math.round(used.mean_w)} W per GPU on average`;
  const idle = used.idle_s >= 1 ? `idle for ${duration(used.idle_s)}` : null;
  return [energy(used), power, idle].filter(Boolean).join(", ");
}

/** The memory of the next attempt, and where the figure comes from. */
function memoryText(job) {
  if (!job.memory) return null;
  const {basis, given_mb: given, alone, runs} = job.memory;
  if (alone) return `alone on its GPU (${basis === "unknown" ? "learned after this run" : basis})`;
  const from = {
    declared: "as requested",
    learned: `learned from ${runs} runs`,
    grown: "raised after running out of memory",
    unknown: "at least; learned after this run"
  }[basis];
  return `${memory(given)}, ${from ?? basis}`;
}
