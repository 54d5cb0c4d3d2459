/** "Submit again": a job like this one, with its command or its options changed. */

import {note} from "./dialogs.js";
import {el} from "./dom.js";
import {Fields, complain, makeComplaint, makeField} from "./fields.js";
import {asSize, asTime} from "./format.js";
import {post} from "./api.js";

const NAMES = ["name", "gpus", "vram", "priority", "time-limit", "retries", "tag"];

export class Resubmit {
  constructor(job) {
    this.job = job;
    this.command = el("textarea", {name: "command", rows: 3, spellcheck: "false", autocapitalize: "off"});
    this.command.value = job.command;
    this.fields = new Fields("again", NAMES, []);
    this.before = asTyped(job);
    for (const [name, value] of Object.entries(this.before)) this.fields.inputs[name].value = value;
    this.complaint = makeComplaint();
    this.button = el("button", {type: "submit", class: "primary", text: "Submit again"});
    this.dialog = el(
      "dialog", {class: "wide", "aria-labelledby": "again-title", onclose: () => this.dialog.remove()}, this.makeForm()
    );
    document.body.append(this.dialog);
    this.dialog.showModal();
    this.command.focus();
  }

  makeForm() {
    const command = makeField("again-command", "Command", "As in a shell.", this.command);
    command.classList.add("wide", "mono");
    return el(
      "form",
      {class: "submit", novalidate: true, onsubmit: (event) => this.send(event)},
      el("h2", {id: "again-title", text: `Submit job ${this.job.id} again`}),
      el("p", {class: "hint", text: "A new job, with the same folder and environment. Change what should differ."}),
      command,
      el("div", {class: "grid"}, this.fields.nodes),
      this.complaint,
      el(
        "div",
        {class: "row end"},
        el("button", {type: "button", class: "quiet", text: "Close", onclick: () => this.dialog.close()}),
        this.button,
      ),
    );
  }

  /** The changed values; the daemon keeps all others. */
  changes() {
    const now = Object.entries(this.fields.inputs).map(([name, input]) => [name, input.value.trim()]);
    const options = Object.fromEntries(
      now.filter(([name, value]) => value !== this.before[name]).map(([name, value]) => [name, value || null])
    );
    const line = this.command.value.trim();
    return {...(line === this.job.command ? {} : {command: line}), ...(Object.keys(options).length ? {options} : {})};
  }

  async send(event) {
    event.preventDefault();
    this.button.disabled = true;
    try {
      const answer = await post(`/jobs/${this.job.id}/resubmit`, this.changes());
      this.dialog.close();
      note(`Job ${answer.ids} is in the queue`, answer.notes.join("; "));
      window.location.hash = `#/job/${answer.first}`;
    } catch (error) {
      complain(this.complaint, error);
      (this.fields.mark(error.message) ?? this.command).focus();
    } finally {
      this.button.disabled = false;
    }
  }
}

/** The values of the job as text, as a user would type them. */
const asTyped = (job) => ({
  name: job.name ?? "",
  gpus: String(job.gpus),
  vram: asSize(job.vram_mb),
  priority: String(job.priority),
  "time-limit": asTime(job.time_limit_s),
  retries: String(job.retries),
  tag: job.tag ?? "",
});
