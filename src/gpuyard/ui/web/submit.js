/** The forms that submit a job: a new one, or many; and a job like an earlier one. */

import {note} from "./dialogs.js";
import {openModal} from "./modal.js";
import {button, byId, el, remember, remembered, say, set, setAll} from "./dom.js";
import {asSize, asTime, plural} from "./format.js";
import {SUBMIT_OPTIONS} from "./submit_options.js";
import {Refusal, post} from "./api.js";

const PLAIN = ["name", "gpus", "vram", "priority", "time-limit", "retries", "tag", "after"];
const MORE = ["array", "sweep", "sample", "seed", "env", "image", "mount"];
const FLAGS = ["exclusive", "linked", "same-node", "hold", "preempt"];
const AGAIN = ["name", "gpus", "vram", "priority", "time-limit", "retries", "tag"];
// Characters that a shell interprets, and an assignment before the command; not placeholders such as {lr}.
const SHELL_SYNTAX = /[|&;<>()$`\\*?[\]#~!\n]|^\s*\w+=|\{(?!\w+\})/;
const QUOTED = /"([^"]*)"|'([^']*)'/g;
const WORDS = /(?:"[^"]*"|'[^']*'|[^\s"'])+/g;

/** Whether an option takes several values, one per line. */
const isMany = (name) => SUBMIT_OPTIONS[name].kind === "texts";

/** An input with its label and hint; `kind` is a CSS class. */
function makeField(id, label, hint, input, kind = "field") {
  setAll(input, {id, "aria-describedby": `${id}-hint`});
  const name = el("label", {for: id, text: label});
  return el("div", {class: kind}, name, input, el("small", {id: `${id}-hint`, message: hint}));
}

/** The command, a field for each option, and errors. Subclasses request the job in `send()`. */
class JobForm {
  /** `prefix` keeps the ids of two forms apart; `names` and `flags` are options; `word` is on the button. */
  constructor(prefix, names, flags, word, command) {
    this.command = el("textarea", {name: "command", spellcheck: "false", autocapitalize: "off", ...command});
    this.inputs = {};
    this.nodes = names.map((name) => this.makeInput(prefix, name));
    this.flags = Object.fromEntries(flags.map((name) => [name, el("input", {type: "checkbox", name})]));
    this.flagNodes = flags.map((name) => el("label", {class: "check"}, this.flags[name], SUBMIT_OPTIONS[name].label));
    this.complaint = el("div", {class: "complaint", role: "alert", hidden: true});
    this.button = el("button", {type: "submit", class: "primary", text: word});
  }

  makeInput(prefix, name) {
    const {label, placeholder, help, kind} = SUBMIT_OPTIONS[name];
    const many = isMany(name);
    const shape = many ? {rows: 2} : {type: "text", inputmode: kind === "whole" ? "numeric" : null};
    const plain = {name, placeholder, autocomplete: "off", spellcheck: "false"};
    this.inputs[name] = el(many ? "textarea" : "input", {...shape, ...plain});
    return makeField(`${prefix}-${name}`, label, many ? `${help} One per line.` : help, this.inputs[name]);
  }

  /** The options that are filled in, in the form of a request. */
  options() {
    const options = {};
    for (const [name, input] of Object.entries(this.inputs)) {
      const text = input.value.trim();
      if (text) options[name] = isMany(name) ? text.split("\n").map((line) => line.trim()).filter(Boolean) : text;
    }
    for (const [name, input] of Object.entries(this.flags))
      if (input.checked) options[name] = true;
    return options;
  }

  async onSubmit(event) {
    event.preventDefault();
    this.button.disabled = true;
    try {
      await this.send();
    } catch (error) {
      this.refuse(error);
    } finally {
      this.button.disabled = false;
    }
  }

  /** Show an error, and move the focus to the field that it names, or to the command. */
  refuse(error) {
    const named = this.mark(error.message) ?? this.command;
    named.closest("details")?.setAttribute("open", "");
    this.complain(error);
    named.focus();
    this.complaint.scrollIntoView({block: "nearest"});
  }

  complain(error) {
    this.complaint.hidden = !error;
    this.complaint.replaceChildren();
    if (error) this.complaint.append(el("strong", {message: error.message}));
    if (error?.hint) this.complaint.append(el("p", {message: error.hint}));
  }

  /** Mark the fields of the options that an error message names. Returns the first, or null. */
  mark(message) {
    const named = Object.entries(this.inputs).filter(([name]) => new RegExp(`--${name}(?![\\w-])`).test(message));
    for (const input of Object.values(this.inputs)) set(input, "aria-invalid", null);
    for (const [, input] of named) set(input, "aria-invalid", "true");
    return named[0]?.[1] ?? null;
  }
}

export class SubmitForm extends JobForm {
  constructor() {
    const command = {rows: 2, required: true, placeholder: "python train.py --lr 3e-4"};
    super("submit", [...PLAIN, ...MORE], FLAGS, "Submit", command);
    const plain = {type: "text", name: "cwd", autocomplete: "off", spellcheck: "false"};
    this.folder = el("input", {...plain, placeholder: "your home folder", value: remembered("folder", "")});
    this.shellNote = el("p", {class: "hint"});
    this.command.addEventListener("input", () => this.noteShell());
    this.command.addEventListener(
      "keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.form.requestSubmit()
    );
    this.build();
  }

  noteShell() {
    say(this.shellNote, needsShell(this.command.value) ? "A shell runs it, because it contains shell syntax." : "");
  }

  build() {
    const commandHint = "As in a shell. Ctrl-Enter submits it.";
    const folderHint = "Its working directory, as an absolute path.";
    const grid = (nodes) => el("div", {class: "grid"}, nodes);
    const more = el("summary", {text: "More: array, sweep, variables"});
    const label = {"aria-labelledby": "submit-title"};
    this.form = el(
      "form",
      {class: "panel submit", novalidate: true, ...label, onsubmit: (event) => this.onSubmit(event)},
      makeField("submit-command", "Command", commandHint, this.command, "field wide mono"),
      this.shellNote,
      makeField("submit-cwd", "Folder", folderHint, this.folder, "field wide mono"),
      grid(this.nodes.slice(0, PLAIN.length)),
      el("div", {class: "row"}, this.flagNodes),
      el("details", {class: "wide"}, more, grid(this.nodes.slice(PLAIN.length))),
      this.complaint,
      el("div", {class: "row end"}, this.button),
    );
    const head = el("div", {class: "head"}, el("h2", {id: "submit-title", text: "Submit a job"}));
    byId("view-submit").append(el("section", label, head, this.form));
  }

  show() {
    document.title = "Submit · gpuyard";
    this.command.focus();
  }

  async send() {
    const line = this.command.value.trim();
    const command = asWords(line);
    if (!line)
      throw new Refusal(0, {error: "There is no program to run.", hint: "Write a command, such as python train.py."});
    if (command === null) throw new Refusal(0, {error: "A quote in the command is left open.", hint: "Close it."});
    const cwd = this.folder.value.trim();
    const answer = await post("/submissions", {command, cwd, options: this.options()});
    remember("folder", cwd);
    this.clear();
    const many = `${plural(answer.count, "job")} are in the queue: ${answer.ids}`;
    note(answer.count === 1 ? `Job ${answer.ids} is in the queue` : many, answer.notes.join("; "));
    window.location.hash = answer.count === 1 ? `#/job/${answer.first}` : "#/";
  }

  /** Empty the form, except for the folder. */
  clear() {
    this.complain(null);
    this.mark("");
    for (const input of [this.command, ...Object.values(this.inputs)]) input.value = "";
    for (const input of Object.values(this.flags)) input.checked = false;
    this.noteShell();
  }
}

/** A job like this one, with its command or its options changed. */
export class Resubmit extends JobForm {
  constructor(job) {
    super("again", AGAIN, [], "Submit again", {rows: 3, text: job.command});
    this.job = job;
    this.before = asTyped(job);
    for (const [name, value] of Object.entries(this.before)) this.inputs[name].value = value;
    this.dialog = el("dialog", {class: "wide", "aria-labelledby": "again-title"}, this.makeForm());
    this.closed = openModal(this.dialog);
    this.command.focus();
  }

  makeForm() {
    const close = button("Close", () => this.dialog.close(), "quiet");
    return el(
      "form",
      {class: "submit", novalidate: true, onsubmit: (event) => this.onSubmit(event)},
      el("h2", {id: "again-title", text: `Submit job ${this.job.id} again`}),
      el("p", {class: "hint", text: "A new job, with the same folder and environment. Change what should differ."}),
      makeField("again-command", "Command", "As in a shell.", this.command, "field wide mono"),
      el("div", {class: "grid"}, this.nodes),
      this.complaint,
      el("div", {class: "row end"}, close, this.button),
    );
  }

  /** The changed values; the daemon keeps all others. */
  changes() {
    const now = Object.entries(this.inputs).map(([name, input]) => [name, input.value.trim()]);
    const options = Object.fromEntries(
      now.filter(([name, value]) => value !== this.before[name]).map(([name, value]) => [name, value || null])
    );
    const line = this.command.value.trim();
    return {...(line === this.job.command ? {} : {command: line}), ...(Object.keys(options).length ? {options} : {})};
  }

  async send() {
    const answer = await post(`/jobs/${this.job.id}/resubmit`, this.changes());
    this.dialog.close();
    await this.closed;
    note(`Job ${answer.ids} is in the queue`, answer.notes.join("; "));
    window.location.hash = `#/job/${answer.first}`;
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

const needsShell = (line) => SHELL_SYNTAX.test(withoutQuotes(line));

/** Drop quoted parts; a shell interprets $, ` and \ in double quotes too, so such a part becomes `$`. */
const withoutQuotes = (line) =>
  line.replace(/'[^']*'|"([^"]*)"/g, (_, inner = "") => (/[$`\\]/.test(inner) ? "$" : ""));

/** The arguments of a typed command line; null if a quote is not closed. A shell runs a line with shell syntax. */
export function asWords(line) {
  if (needsShell(line)) return ["/bin/sh", "-c", line];
  if (line.replace(WORDS, "").trim()) return null;
  return (line.match(WORDS) ?? []).map((word) => word.replace(QUOTED, "$1$2"));
}
