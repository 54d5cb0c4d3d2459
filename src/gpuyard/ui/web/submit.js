/** The form that submits a job, or many. */

import {note} from "./dialogs.js";
import {byId, el, remember, remembered, say} from "./dom.js";
import {Fields, complain, makeComplaint, makeField} from "./fields.js";
import {plural} from "./format.js";
import {asWords, needsShell} from "./shell.js";
import {post} from "./api.js";

const PLAIN = ["name", "gpus", "vram", "priority", "time-limit", "retries", "tag", "after"];
const MORE = ["array", "sweep", "env"];

export class SubmitForm {
  constructor() {
    this.command = el("textarea", {
      name: "command",
      rows: 2,
      required: true,
      placeholder: "python train.py --lr 3e-4",
      spellcheck: "false",
      autocapitalize: "off"
    });
    this.folder = el("input", {
      type: "text",
      name: "cwd",
      placeholder: "your home folder",
      autocomplete: "off",
      spellcheck: "false",
      value: remembered("folder", "")
    });
    this.fields = new Fields("submit", PLAIN, ["exclusive", "hold", "preempt"]);
    this.more = new Fields("submit", MORE, []);
    this.complaint = makeComplaint();
    this.shellNote = el("p", {class: "hint"});
    this.button = el("button", {type: "submit", class: "primary", text: "Submit"});
    this.command.addEventListener(
      "input",
      () => say(
        this.shellNote,
        needsShell(this.command.value) ? "A shell runs it, because it contains shell syntax." : ""
      )
    );
    this.command.addEventListener(
      "keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.form.requestSubmit()
    );
    this.build();
  }

  build() {
    const command = makeField("submit-command", "Command", "As in a shell. Ctrl-Enter submits it.", this.command);
    command.classList.add("wide", "mono");
    const folder = makeField("submit-cwd", "Folder", "Its working directory, as an absolute path.", this.folder);
    folder.classList.add("wide", "mono");
    const more = el(
      "details",
      {class: "wide"},
      el("summary", {text: "More: array, sweep, variables"}),
      el("div", {class: "grid"}, this.more.nodes)
    );
    this.form = el(
      "form",
      {
        class: "panel submit",
        novalidate: true,
        "aria-labelledby": "submit-title",
        onsubmit: (event) => this.send(event)
      },
      command,
      this.shellNote,
      folder,
      el("div", {class: "grid"}, this.fields.nodes),
      el("div", {class: "row"}, this.fields.flagNodes),
      more,
      this.complaint,
      el("div", {class: "row end"}, this.button),
    );
    byId("view-submit")
      .append(el(
        "section",
        {"aria-labelledby": "submit-title"},
        el("div", {class: "head"}, el("h2", {id: "submit-title", text: "Submit a job"})),
        this.form
      ));
  }

  show() {
    document.title = "Submit · gpuyard";
    this.command.focus();
  }

  async send(event) {
    event.preventDefault();
    const line = this.command.value.trim();
    const words = asWords(line);
    if (!line)
      return this.refuse(
        {message: "There is no program to run.", hint: "Write a command, such as python train.py."}, this.command
      );
    if (words === null)
      return this.refuse({message: "A quote in the command is left open.", hint: "Close it."}, this.command);
    this.button.disabled = true;
    try {
      const options = {...this.fields.options(), ...this.more.options()};
      this.done(await post("/submissions", {command: words, cwd: this.folder.value.trim(), options}));
    } catch (error) {
      this.refuse(error);
    } finally {
      this.button.disabled = false;
    }
  }

  refuse(error, field = null) {
    const named = this.fields.mark(error.message) ?? this.more.mark(error.message) ?? field;
    named?.closest("details")?.setAttribute("open", "");
    complain(this.complaint, error);
    (named ?? this.complaint).focus?.();
    this.complaint.scrollIntoView({block: "nearest"});
  }

  done(answer) {
    remember("folder", this.folder.value.trim());
    complain(this.complaint, null);
    this.command.value = "";
    say(this.shellNote, "");
    for (const fields of [this.fields, this.more]) fields.clear();
    const many = `${plural(answer.count, "job")} are in the queue: ${answer.ids}`;
    note(answer.count === 1 ? `Job ${answer.ids} is in the queue` : many, answer.notes.join("; "));
    window.location.hash = answer.count === 1 ? `#/job/${answer.first}` : "#/";
  }
}
