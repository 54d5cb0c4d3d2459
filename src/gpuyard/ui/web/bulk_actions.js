/** The toolbar above the queue: the actions that apply to the selected jobs. */

import {act, actButton, actWord} from "./actions.js";
import {button, byId, el, say} from "./dom.js";
import {count, plural} from "./format.js";
import {ACTS, STATES} from "./states.js";
import {sizeOf} from "./sweep.js";
import {get} from "./api.js";

/** How many selected jobs are asked for at most after an action, to learn their new states. */
const MOST_ASKED = 500;
const MOST_SWEEPS_ASKED = 20;

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
    const {filter: {state, search}, isFiltered, selection} = this.queue;
    if (selection.isAll) {
      const which = isFiltered ? {where: {state, search}} : {ids: "all"};
      // Jobs that match from now on were not selected.
      if (await act(verb, which, this.selected)) this.queue.select([]);
      return;
    }
    const which = {ids: selection.idsFor(verb).join(" ")};
    if (await act(verb, which, selection.countFor(verb))) await this.learnStates();
  }

  /** Ask for the states of the selected jobs: after an action, the list may no longer show them. */
  async learnStates() {
    const {selection} = this.queue;
    const isSweep = (key) => typeof key === "string";
    const ids = selection.keys.filter((key) => !isSweep(key)).slice(0, MOST_ASKED);
    const sweeps = selection.keys.filter(isSweep).slice(0, MOST_SWEEPS_ASKED);
    if (ids.length) selection.learn((await get(`/jobs?ids=${ids.join(",")}&limit=${MOST_ASKED}`)).jobs);
    const answers = await Promise.all(sweeps.map((key) => get(`/sweeps/${parseInt(key, 10)}?limit=1`)));
    selection.learn(answers.map(({progress}) => ({group: progress})));
    this.queue.showSelection();
  }
}
