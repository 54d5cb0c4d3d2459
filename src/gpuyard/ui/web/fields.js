/** The fields of a submission, as the form and "submit again" have them, and what they come to as options. */

import {el, set} from "./dom.js";

/** By option: its label, what it looks like, what to say about it, and more attributes. */
const FIELDS = {
  name: ["Name", "one word", "What the queue calls it."],
  gpus: ["GPUs", "1", "0 for none.", {inputmode: "numeric"}],
  vram: ["Memory on each GPU", "learned", "Such as 8G. Left out, it is learned from runs before."],
  priority: ["Priority", "0", "Higher starts earlier.", {inputmode: "numeric"}],
  "time-limit": ["Time limit", "none", "Such as 4h or 30m."],
  retries: ["Retries", "0", "After a failure. Out of memory is not counted.", {inputmode: "numeric"}],
  tag: ["Tag", "", "Marks jobs that belong together."],
  after: ["After", "", "Jobs that have to succeed first, such as 17 or 17-20."],
  array: ["Array", "0-99%8", "A job for each {index}; at most 8 at once."],
  sweep: ["Sweep", "lr=1e-3,1e-4", "A job for each {lr}. One name on each line makes all pairs.", {rows: 2}],
  env: ["Variables", "NAME=VALUE", "One on each line.", {rows: 2}],
};
const MANY = new Set(["sweep", "env"]);
const FLAGS = {
  exclusive: "Alone on its GPU",
  hold: "Hold it until it is released",
  preempt: "Urgent: have others make room"
};

export function makeField(id, label, hint, input) {
  input.id = id;
  input.setAttribute("aria-describedby", `${id}-hint`);
  return el("div", {class: "field"}, el("label", { for: id, text: label
            }), input, el("small", {id: `${id}-hint`, text: hint}));
}

/** Inputs for these options; `prefix` keeps the ids of two forms apart. */
export class Fields {
  constructor(prefix, names, flags) {
    this.inputs = {};
    this.nodes = names.map((name) => {
      const [label, placeholder, hint, more = {}] = FIELDS[name];
      const plain = {name, placeholder, autocomplete: "off", spellcheck: "false", ...more};
      this.inputs[name] = el(more.rows ? "textarea" : "input", more.rows ? plain : {type: "text", ...plain});
      return makeField(`${prefix}-${name}`, label, hint, this.inputs[name]);
    });
    this.flags = Object.fromEntries(flags.map((name) => [name, el("input", {type: "checkbox", name})]));
    this.flagNodes = flags.map((name) => el("label", {class: "check"}, this.flags[name], FLAGS[name]));
  }

  /** Those that are filled in, as the daemon takes them. */
  options() {
    const options = {};
    for (const [name, input] of Object.entries(this.inputs)) {
      const text = input.value.trim();
      if (text) options[name] = MANY.has(name) ? text.split("\n").map((line) => line.trim()).filter(Boolean) : text;
    }
    for (const [name, input] of Object.entries(this.flags))
      if (input.checked) options[name] = true;
    return options;
  }

  /** A refusal names the option it is about; that field says so and gets the focus. */
  mark(message) {
    const named = Object.entries(this.inputs).filter(([name]) => new RegExp(`--${name}(?![\\w-])`).test(message));
    for (const input of Object.values(this.inputs)) set(input, "aria-invalid", null);
    for (const [, input] of named) set(input, "aria-invalid", "true");
    return named[0]?.[1] ?? null;
  }

  clear() {
    this.mark("");
    for (const input of Object.values(this.inputs)) input.value = "";
    for (const input of Object.values(this.flags)) input.checked = false;
  }
}

/** Where a form's refusals are shown. */
export function makeComplaint() {
  return el("div", {class: "complaint", role: "alert", hidden: true});
}

export function complain(node, error) {
  node.hidden = !error;
  node.replaceChildren(
    ...(error ? [el("strong", {text: error.message}), ...(error.hint ? [el("p", {text: error.hint})] : [])] : [])
  );
}
