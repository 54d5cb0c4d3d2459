/** The choice of an attempt on a job's page: its log and memory curve are shown. By default the last one, as it comes. */

import {el, keep, say} from "./dom.js";

export class AttemptChoice {
  /** Calls `onChange()` when the user has chosen. */
  constructor(onChange) {
    this.chosen = null;
    this.select = el("select", {"aria-label": "Attempt"});
    this.node = el("label", {class: "attemptchoice", hidden: true}, "Attempt ", this.select);
    this.select.addEventListener("change", () => {
      this.chosen = this.select.value === "last" ? null : Number(this.select.value);
      onChange();
    });
  }

  /** List the attempts, the last first, and return the one to show; undefined before the first. */
  show(attempts) {
    this.node.hidden = attempts.length < 2;
    const options = [{value: "last", text: "last"}, ...[...attempts].reverse().map(optionOf)];
    keep(this.select, options, ({value}) => value, ({value}) => el("option", {value}), (node, {text}) => say(node, text));
    this.select.value = this.chosen ?? "last";
    return attempts.find(({number}) => number === this.chosen) ?? attempts.at(-1);
  }
}

const optionOf = ({number, outcome}) => (
  {value: String(number), text: outcome ? `${number}: ${outcome.replaceAll("-", " ")}` : String(number)}
);
