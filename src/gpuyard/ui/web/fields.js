/** The fields of a submission, for the submit form and "submit again", and the options made from them. */

import {el, set} from "./dom.js";
import {SUBMIT_OPTIONS} from "./submit_options.js";

/** Whether an option takes several values, one per line. */
const isMany = (name) => SUBMIT_OPTIONS[name].kind === "texts";

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
      const {label, placeholder, help, kind} = SUBMIT_OPTIONS[name];
      const plain = {name, placeholder, autocomplete: "off", spellcheck: "false"};
      if (kind === "whole") plain.inputmode = "numeric";
      const many = isMany(name);
      this.inputs[name] = el(many ? "textarea" : "input", many ? {rows: 2, ...plain} : {type: "text", ...plain});
      return makeField(`${prefix}-${name}`, label, many ? `${help} One per line.` : help, this.inputs[name]);
    });
    this.flags = Object.fromEntries(flags.map((name) => [name, el("input", {type: "checkbox", name})]));
    this.flagNodes = flags.map((name) => el("label", {class: "check"}, this.flags[name], SUBMIT_OPTIONS[name].label));
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

  /** Mark the fields of the options that an error message names. Returns the first, or null. */
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

/** The element that shows the errors of a form. */
export function makeComplaint() {
  return el("div", {class: "complaint", role: "alert", hidden: true});
}

export function complain(node, error) {
  node.hidden = !error;
  node.replaceChildren(
    ...(error ? [el("strong", {text: error.message}), ...(error.hint ? [el("p", {text: error.hint})] : [])] : [])
  );
}
