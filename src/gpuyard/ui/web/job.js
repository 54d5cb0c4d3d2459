/** The page of a job: its name, its state, its actions, and the sections of `job_sections.js`. */

import {act, actButton} from "./actions.js";
import {AttemptChoice} from "./attempt_choice.js";
import {setElapsed} from "./clock.js";
import {button, byId, el, keep, number, printable, say, sayMessage} from "./dom.js";
import {title} from "./format.js";
import {SECTIONS} from "./job_sections.js";
import {Resubmit} from "./submit.js";
import {ACTS, FINISHED, TIMED, setState, stateChip, stateWord} from "./states.js";

export class JobPage {
  /** Calls `rewatch()` when its targets change. */
  constructor(id, {isReadOnly, rewatch}) {
    this.id = id;
    this.isReadOnly = isReadOnly;
    this.rewatch = rewatch;
    this.waits = true;
    this.job = null;
    this.choice = new AttemptChoice(() => this.showChosen());
    this.sections = SECTIONS.map((make) => make(this));
    this.build();
  }

  build() {
    this.title = el("h2", {id: "job-title", text: `Job ${this.id}`});
    this.state = stateChip();
    this.state.hidden = true;
    this.ran = number();
    this.actions = el("div", {class: "row actions", role: "toolbar", "aria-label": "Actions on this job"});
    this.command = el("code", {class: "command", tabindex: 0});
    const back = el("a", {class: "back", href: "#/", text: "← Queue"});
    const head = el("div", {class: "head"}, back, this.title, this.state, this.ran, this.actions);
    this.missing = el("p", {class: "complaint", role: "alert", hidden: true});
    this.body = el("div", {}, this.command, el("div", {class: "jobgrid"}, this.sections.map(({node}) => node)));
    byId("view-job").replaceChildren(head, this.missing, this.body);
  }

  /** The targets to watch: the job, and those of its sections. */
  targets() {
    const path = `/jobs/${this.id}`;
    return [[path, (answer) => this.show(answer)], ...this.sections.flatMap((section) => section.targets?.(path) ?? [])];
  }

  close() {
    for (const section of this.sections) section.close?.();
  }

  show(job) {
    this.missing.hidden = !job.error;
    this.body.hidden = Boolean(job.error);
    if (job.error) return sayMessage(this.missing, [job.error, job.hint].filter(Boolean).join(". "));
    this.job = job;
    document.title = `${printable(title(job))} · gpuyard`;
    say(this.title, job.name ? `${job.name} · job ${job.id}` : `Job ${job.id}`);
    this.state.hidden = false;
    setState(this.state, job.state, stateWord(job));
    setElapsed(this.ran, job.elapsed_s ?? job.waited_s, TIMED.has(job.state));
    this.showActions(job);
    say(this.command, job.command);
    this.setWaits(!FINISHED.has(job.state) && job.state !== "running");
    for (const section of this.sections) section.show(job);
  }

  /** Show the attempt that the user has chosen. */
  showChosen() {
    if (!this.job) return;
    for (const section of this.sections) section.showChosen?.(this.job);
  }

  /** Whether the job waits; its sections may then have other targets. */
  setWaits(waits) {
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
    return actButton(verb, () => act(verb, {ids: String(this.id)}, 1, {priority: this.job.priority}));
  }
}
