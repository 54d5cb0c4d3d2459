/** The toolbar above the queue: the actions that apply to the selected jobs. */

import {act, actButton, actWord} from "./actions.js";
import {button, byId, el, say} from "./dom.js";
import {count, plural} from "./format.js";
import {countIn} from "./selection.js";
import {ACTS, STATES} from "./states.js";
import {keyOf, sizeOf} from "./sweep.js";

export class BulkActions {
  constructor(queue) {
    this.queue = queue;
    this.summary = el("strong", {class: "number"});
    this.elsewhere = el("span", {class: "hint"});
    this.everything = button("", () => queue.select([], true), "link");
    this.buttons = new Map(Object.keys(ACTS).map((verb) => [verb, actButton(verb, () => this.act(verb))]));
    const clear = button("Clear", () => queue.select([]), "quiet");
    const row = (...children) => el("div", {class: "row"}, ...children);
    byId("bulk").append(row(this.summary, this.elsewhere, this.everything), row(...this.buttons.values(), clear));
  }

  get selected() {
    const {selection, total} = this.queue;
    return selection.isAll ? (total ?? 0) : selection.size;
  }

  show() {
    const {selection, page, total, isWholePage} = this.queue;
    byId("bulk").hidden = this.selected === 0;
    const all = selection.isAll ? `All ${plural(total, "job")}` : plural(this.selected, "job");
    say(this.summary, `${all} selected`);
    const shown = page.filter((job) => selection.has(job)).reduce((all, job) => all + sizeOf(job), 0);
    const hidden = this.selected - shown;
    say(this.elsewhere, hidden && !selection.isAll ? `${count(hidden)} of them not shown here` : "");
    this.everything.hidden = selection.isAll || !isWholePage || total === null || total <= selection.size;
    say(this.everything, `Select all ${count(total)} that match`);
    for (const [verb, node] of this.buttons) this.showAction(verb, node);
  }

  /** An action that applies to no selected job is hidden; if it applies to some only, the button says to how many. */
  showAction(verb, node) {
    const {selection} = this.queue;
    const applies = selection.isAll ? (this.mayApplyToAll(verb) ? this.selected : 0) : selection.countFor(verb);
    node.hidden = applies === 0;
    say(node, actWord(verb, applies === this.selected ? null : applies));
  }

  /** Whether jobs exist that the filter may match and the action applies to. */
  mayApplyToAll(verb) {
    const {filter, counts} = this.queue;
    const states = filter.state ? filter.state.split(",") : STATES.filter((state) => counts[state]);
    return states.some((state) => ACTS[verb].may(state));
  }

  async act(verb) {
    const {filter: {state, search}, isFiltered, page, selection} = this.queue;
    const rows = selection.isAll ? page.filter((job) => countIn(job, verb) > 0) : selection.rowsFor(verb);
    const all = isFiltered ? {where: {state, search}} : {ids: "all"};
    const which = selection.isAll ? all : {ids: rows.map(keyOf).join(" ")};
    const many = selection.isAll ? this.selected : selection.countFor(verb);
    if (await act(verb, which, many, {rows})) this.queue.select([]);
  }
}
