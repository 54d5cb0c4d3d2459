/** The page of a sweep or an array: its progress, its actions and the table of its runs. `#/sweep/18` is its address, with
 * the order and the place in the table. */

import {act, actButton, actWord} from "./actions.js";
import {byId, el, keep, say} from "./dom.js";
import {clock} from "./format.js";
import {makeProgress, setProgress} from "./progress.js";
import {countIn} from "./selection.js";
import {ACTS} from "./states.js";
import {SweepRuns, sweepProgress} from "./sweep.js";
import {queryOf} from "./api.js";

export class SweepPage {
  /** `id` is that of any run. Calls `rewatch()` when its targets change. */
  constructor(id, {query, isReadOnly, rewatch}) {
    Object.assign(this, {id, isReadOnly, rewatch});
    const place = {sort: query.get("sort") ?? "", after: Number(query.get("after")) || 0};
    this.runs = Object.assign(new SweepRuns(id, () => this.turn()), place);
    this.title = el("h2", {id: "job-title", text: `Sweep ${id}`});
    this.counts = el("span", {class: "hint"});
    this.actions = el("div", {class: "row actions", role: "toolbar", "aria-label": "Actions on these jobs"});
    this.command = el("code", {class: "command", tabindex: 0});
    this.progress = makeProgress();
    const back = el("a", {class: "back", href: "#/", text: "← Queue"});
    const head = el("div", {class: "head"}, back, this.title, this.counts, this.actions);
    const table = el("section", {class: "panel", "aria-labelledby": "job-title"}, this.runs.node);
    this.body = el("div", {hidden: true}, this.command, this.progress);
    byId("view-job").replaceChildren(head, this.body, table);
  }

  targets() {
    return [[this.runs.target, (answer) => this.show(answer)]];
  }

  /** Keep the order and the place in the address, so that a reload and Back show them again. */
  turn() {
    const query = queryOf({sort: this.runs.sort, after: this.runs.after || ""});
    history.replaceState(history.state, "", `#/sweep/${this.id}${query && `?${query}`}`);
    this.rewatch();
  }

  show(answer) {
    this.runs.show(answer);
    if (answer.error) return;
    const {command, name, progress: group, submitted_at: when, tag} = answer;
    this.job = {name, command, group, figures: {}, ended_at: null};
    this.body.hidden = false;
    say(this.title, `${name ? `${name} · jobs` : "Jobs"} ${group.ids}`);
    document.title = `${this.title.textContent} · gpuyard`;
    say(this.counts, [group.text, `submitted ${clock(when)}`, tag].filter(Boolean).join(" · "));
    say(this.command, command);
    setProgress(this.progress, sweepProgress(this.job));
    if (this.isReadOnly) return;
    const verbs = Object.keys(ACTS).filter((verb) => countIn(this.job, verb) > 0);
    keep(this.actions, verbs, (verb) => verb, (verb) => actButton(verb, () => this.act(verb)), (node, verb) => {
      const many = countIn(this.job, verb);
      say(node, actWord(verb, many === group.count ? null : many));
    });
  }

  act(verb) {
    act(verb, {ids: this.job.group.ids}, countIn(this.job, verb), {rows: [this.job]});
  }
}
