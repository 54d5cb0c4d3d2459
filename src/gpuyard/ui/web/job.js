/** The page of a job: state, reasons, memory, log, attempts, history, and actions. */

import {act, actButton} from "./actions.js";
import {Curve} from "./charts.js";
import {setElapsed} from "./clock.js";
import {codeFacts} from "./code.js";
import {button, byId, el, keep, number, printable, say, set} from "./dom.js";
import {UNKNOWN, clock, duration, energy, memory, title} from "./format.js";
import {Log} from "./log.js";
import {Resubmit} from "./submit.js";
import {ACTS, FINISHED, TIMED, attemptTone, setState, stateChip, stateWord} from "./states.js";

const ATTEMPT_COLUMNS = ["Attempt", "Outcome", "Where", "Started", "Ran", "Reserved", "Peak", "Energy", "Details"];

export class JobPage {
  /** Calls `rewatch()` when its targets change. */
  constructor(id, {isReadOnly, rewatch}) {
    this.id = id;
    this.isReadOnly = isReadOnly;
    this.rewatch = rewatch;
    this.waits = true;
    this.job = null;
    this.curve = new Curve();
    this.build();
  }

  build() {
    this.title = el("h2", {id: "job-title", text: `Job ${this.id}`});
    this.state = stateChip();
    this.state.hidden = true;
    this.ran = number();
    this.actions = el("div", {class: "row actions", role: "toolbar", "aria-label": "Actions on this job"});
    this.command = el("code", {class: "command", tabindex: 0});
    this.facts = el("dl", {class: "facts many"});
    this.why = {summary: el("p"), reasons: el("ul"), estimate: el("p", {class: "estimate"})};
    this.whyPart = el(
      "section",
      {class: "panel why", "aria-labelledby": "why-title", hidden: true},
      el("h3", {id: "why-title", text: "Why it waits"}),
      ...Object.values(this.why)
    );
    this.advice = el("ul", {class: "advice"});
    this.attempts = el("tbody");
    this.history = el("ol", {class: "history"});
    this.logPlace = el("div");
    this.logNote = el("span");
    const back = el("a", {class: "back", href: "#/", text: "← Queue"});
    const head = el("div", {class: "head"}, back, this.title, this.state, this.ran, this.actions);
    const columns = el("tr", {}, ATTEMPT_COLUMNS.map((word) => el("th", {scope: "col", text: word})));
    const table = el("table", {class: "attempts"}, el("thead", {}, columns), this.attempts);
    this.missing = el("p", {class: "complaint", role: "alert", hidden: true});
    this.body = el(
      "div",
      {class: "jobgrid"},
      el("section", {class: "panel", "aria-label": "Facts"}, this.command, this.facts, this.advice),
      this.whyPart,
      part("Memory", "memory-title", this.curve.node),
      part("Log", "log-title", this.logPlace, this.logNote),
      part("Attempts", "attempts-title", table),
      part("History", "history-title", this.history),
    );
    byId("view-job").replaceChildren(head, this.missing, this.body);
  }

  /** The targets to watch. `why` costs the daemon work, so it is watched only while the job waits. */
  targets() {
    const path = `/jobs/${this.id}`;
    return [
      [path, (answer) => this.show(answer)],
      [`${path}/history`, (answer) => this.showHistory(answer)],
      ...(this.waits ? [[`${path}/why`, (answer) => this.showWhy(answer)]] : []),
    ];
  }

  close() {
    this.log?.close();
  }

  show(job) {
    this.missing.hidden = !job.error;
    this.body.hidden = Boolean(job.error);
    if (job.error) return say(this.missing, [job.error, job.hint].filter(Boolean).join(". "));
    this.job = job;
    document.title = `${printable(title(job))} · gpuyard`;
    say(this.title, job.name ? `${job.name} · job ${job.id}` : `Job ${job.id}`);
    this.state.hidden = false;
    setState(this.state, job.state, stateWord(job));
    setElapsed(this.ran, job.elapsed_s ?? job.waited_s, TIMED.has(job.state));
    this.showActions(job);
    say(this.command, job.command);
    const facts = factsOf(job).filter(([, value]) => value !== null && value !== "");
    keep(this.facts, facts, ([word]) => word, makeFact, updateFact);
    keep(this.advice, job.advice, (text) => text, (text) => el("li", {text}));
    this.curve.show(job.attempts.at(-1));
    keep(this.attempts, [...job.attempts].reverse(), (attempt) => attempt.number, makeAttempt, updateAttempt);
    this.followLog(job);
    this.setWaits(!FINISHED.has(job.state) && job.state !== "running");
  }

  setWaits(waits) {
    if (!waits) this.whyPart.hidden = true;
    if (waits === this.waits) return;
    this.waits = waits;
    this.rewatch();
  }

  showActions(job) {
    if (this.isReadOnly) return;
    const verbs = [...Object.keys(ACTS).filter((verb) => ACTS[verb].may(job.state)), "again"];
    keep(this.actions, verbs, (verb) => verb, (verb) => this.makeAction(verb));
  }

  makeAction(verb) {
    if (verb === "again") return button("Submit again…", () => new Resubmit(this.job));
    return actButton(verb, () => act(verb, {ids: String(this.id)}, 1, this.job.priority));
  }

  showWhy(why) {
    this.whyPart.hidden = !this.waits || Boolean(why.error);
    if (why.error) return;
    say(this.why.summary, why.summary);
    const nameOf = (device) => (why.device_labels[device] ? `GPU ${why.device_labels[device]}` : device);
    const reasons = why.reasons.map(({device_id: device, text}) => (device ? `${nameOf(device)}: ${text}` : text));
    const remedies = why.reasons.filter(({remedy}) => remedy).map(({remedy}) => `To change that: ${remedy}`);
    keep(this.why.reasons, [...new Set([...reasons, ...remedies])], (text) => text, (text) => el("li", {text}));
    say(this.why.estimate, why.estimate);
  }

  showHistory(history) {
    if (history.error) return;
    keep(this.history, history.events, (event) => event.id + event.kind, makeEvent);
  }

  /** Follow the log from the first attempt on, and again when a finished job is retried. */
  followLog(job) {
    if (!job.attempt && !this.log) return say(this.logNote, "not started yet");
    if (this.log && !(this.log.isOver && job.attempt > this.logOf)) return;
    this.openLog(job);
  }

  openLog(job) {
    this.log?.close();
    this.logOf = job.attempt;
    this.log = new Log(this.id);
    this.logPlace.replaceChildren(this.log.node);
    this.logNote.replaceChildren(this.log.note);
  }
}

function part(word, id, body, beside = null) {
  const head = el("div", {class: "parthead"}, el("h3", {id, text: word}), beside);
  return el("section", {class: "panel", "aria-labelledby": id}, head, body);
}

function makeEvent(event) {
  const time = el("time", {datetime: event.at, class: "number hint", text: clock(event.at)});
  return el("li", {}, time, el("strong", {text: event.kind}), el("span", {text: event.text}));
}

const makeFact = ([word]) => el("div", {}, el("dt", {text: word}), el("dd"));

function updateFact(node, [, value]) {
  if (Array.isArray(value)) keep(node.lastChild, value, (each) => each.id + each.state, linkTo);
  else say(node.lastChild, value);
}

const linkTo = ({id, state}) => el("a", {href: `#/job/${id}`, text: `${id} (${state})`});

function factsOf(job) {
  const gpus = job.gpu_labels.filter((label) => label !== null);
  return [
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
    ["Array", job.array === null ? null : `${job.array}${job.index === null ? "" : `, index ${job.index}`}`],
    ["Values", Object.entries(job.values).map(([name, value]) => `${name}=${value}`).join(" ")],
    ["Engine", job.engine === "local" ? null : [job.engine, job.place].filter(Boolean).join(", ")],
    ["Result", FINISHED.has(job.state) ? job.reason : null],
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

function makeAttempt() {
  const row = el("tr");
  row.values = ATTEMPT_COLUMNS.map((word) => row.appendChild(el("td", {"data-label": word})));
  row.values[4].append(number());
  return row;
}

function updateAttempt(row, attempt) {
  const [which, outcome, where, started, ran, reserved, peak, used, details] = row.values;
  say(which, attempt.number);
  say(outcome, attempt.outcome?.replaceAll("-", " ") ?? (attempt.parked ? "suspended" : "running"));
  set(outcome, "data-tone", attemptTone(attempt.outcome, attempt.parked ? "suspended" : "running"));
  say(where, attempt.place ?? (attempt.devices.join(", ") || "no GPU"));
  say(started, clock(attempt.started_at));
  setElapsed(ran.firstChild, attempt.ran_s, attempt.ended_at === null && !attempt.parked);
  say(reserved, attempt.reserved_mb === null ? "alone" : memory(attempt.reserved_mb));
  const peaks = Object.values(attempt.peaks_mb);
  say(peak, peaks.length ? memory(Math.max(...peaks)) : UNKNOWN);
  say(used, energy(attempt.energy));
  say(details, attemptDetails(attempt));
}

function attemptDetails(attempt) {
  const lack = attempt.lack;
  if (!lack) return attempt.reason ?? "";
  const others = lack.others.map((other) => `${other.who} held ${memory(other.memory_mb)}`).join(", ");
  const needed = lack.needed_mb && `it needed ${memory(lack.needed_mb)}`;
  return [(attempt.reason ?? lack.says)?.replace(/\.$/, ""), needed, others].filter(Boolean).join("; ");
}
