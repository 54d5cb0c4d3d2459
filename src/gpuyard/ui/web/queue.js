/**
 * The queue: one page of rows, which the daemon filters, searches and sorts; rows are updated in place. What a row shows
 * is in `queue_columns.js`. Jobs can be selected, some or all that match the filter, and a toolbar acts on them.
 *
 * In the queue's own order, without a filter, a sweep is one row that opens into its runs. Each run is a row of its own in
 * other orders, and in what a filter finds.
 */

import {BulkActions} from "./bulk_actions.js";
import {button, byId, el, keep, say, sayMessage, set} from "./dom.js";
import {count, plural} from "./format.js";
import {COLUMNS} from "./queue_columns.js";
import {Selection} from "./selection.js";
import {Sorting} from "./sorting.js";
import {OpenSweeps, keyOf} from "./sweep.js";
import {queryOf} from "./api.js";

const PAGE = 50;
const TYPING_MS = 250;

export class Queue {
  /** `go(filter)` shows another page, filter or order; `rewatch` watches `targets` again; `isReadOnly` hides everything
   * that changes jobs. */
  constructor({go, rewatch, isReadOnly}) {
    this.go = go;
    this.sweeps = new OpenSweeps(COLUMNS.length + (isReadOnly ? 0 : 1), () => {
      this.showRows();
      rewatch();
    });
    this.isReadOnly = isReadOnly;
    this.filter = {state: "", search: "", order: "", after: 0};
    Object.assign(this, {page: [], total: null, selection: new Selection()});
    this.sorting = new Sorting(COLUMNS, byId("order"), (order) => this.go({...this.filter, order, after: 0}));
    this.whole = makePick("Select all jobs on this page", () => this.togglePage());
    byId("jobs-head").append(...(isReadOnly ? [] : [el("th", {scope: "col", class: "pick"}, this.whole)]));
    byId("jobs-head").append(...this.sorting.heads);
    this.bulk = new BulkActions(this);
    this.makePages();
    byId("search").addEventListener("input", () => this.onTyping());
    byId("search").addEventListener("keydown", (event) => this.onSearchKey(event));
  }

  makePages() {
    this.first = button("First", () => this.turn(0));
    this.previous = button("Previous", () => this.turn(Math.max(0, this.filter.after - PAGE)));
    this.next = button("Next", () => this.turn(this.filter.after + PAGE));
    this.range = el("span", {class: "number hint"});
    byId("pages").append(this.range, this.first, this.previous, this.next);
  }

  turn(after) {
    this.go({...this.filter, after});
    byId("queue").scrollIntoView({block: "start"});
  }

  onTyping() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.go({...this.filter, search: byId("search").value.trim(), after: 0}), TYPING_MS);
  }

  /** Move the focus from the search field to the results. */
  onSearchKey(event) {
    if (event.key !== "Enter" && event.key !== "ArrowDown") return;
    event.preventDefault();
    this.step(1);
  }

  setFilter(filter) {
    const {state, search, order} = this.filter;
    const isOther = filter.state !== state || filter.search !== search;
    // Runs that are selected one by one are no rows of the folded queue, and the other way round.
    const isFoldedOtherwise = Boolean(filter.order) !== Boolean(order);
    this.filter = filter;
    this.sorting.show(filter.order);
    if (isOther || isFoldedOtherwise) this.select([]);
    if (document.activeElement !== byId("search")) byId("search").value = filter.search;
  }

  /** The target to watch for this filter. */
  get target() {
    const {state, search, order, after} = this.filter;
    const query = queryOf({all: 1, fold: this.isFolded ? 1 : "", state, search, order, limit: PAGE, after: after || ""});
    // Spaces separate the targets of a stream, so a space inside a target is %20.
    return `/jobs?${query.replaceAll("+", "%20")}`;
  }

  /** All targets to watch, each with what its answers are for. */
  targets() {
    return [[this.target, (answer) => this.show(answer)], ...(this.isFolded ? this.sweeps.targets() : [])];
  }

  show(answer) {
    const empty = byId("jobs-empty");
    empty.hidden = !answer.error && answer.jobs.length > 0;
    if (answer.error) return sayMessage(empty, [answer.error, answer.hint].filter(Boolean).join(": "));
    this.page = answer.jobs;
    this.showRows();
    this.rows = answer.total ?? null;
    this.counts = answer.counts;
    this.total = this.isFolded && this.rows !== null ? sumOf(answer.counts) : this.rows;
    this.selection.learn(answer.jobs, this.filter.after === 0 && answer.next === null);
    this.showSelection();
    this.showPlace(answer);
    const how = this.isReadOnly ? "" : ": submit one here, or with `gpuyard submit -- python train.py`";
    sayMessage(empty, this.isFiltered ? "No jobs match." : `No jobs yet${how}.`);
  }

  get isFiltered() {
    return Boolean(this.filter.state || this.filter.search);
  }

  /** Whether a sweep is one row. */
  get isFolded() {
    return !this.isFiltered && !this.filter.order;
  }

  showPlace(answer) {
    const {filter: {after}, rows, total} = this;
    const last = after + answer.jobs.length;
    const range = `${count(after + 1)}–${count(last)}${rows === null ? "" : ` of ${count(rows)}`}`;
    say(this.range, answer.jobs.length ? range : "");
    const matching = this.isFiltered ? ` that match${total === 1 ? "es" : ""}` : "";
    say(byId("queue-total"), total === null ? "" : plural(total, "job") + matching);
    this.first.disabled = this.previous.disabled = after === 0;
    this.next.disabled = answer.next === null;
    byId("pages").hidden = after === 0 && answer.next === null;
  }

  // Selecting: some jobs, or all that match the filter

  get isWholePage() {
    return this.page.length > 0 && this.page.every((job) => this.selection.has(job));
  }

  toggle(job) {
    const {selection} = this;
    if (selection.isAll) selection.set(this.page);
    if (selection.has(job)) selection.remove([job]);
    else selection.add([job]);
    this.showSelection();
  }

  togglePage() {
    const {selection} = this;
    if (selection.isAll) selection.clear();
    else if (this.isWholePage) selection.remove(this.page);
    else selection.add(this.page);
    this.showSelection();
  }

  select(jobs, isAll = false) {
    this.selection.set(jobs);
    this.selection.isAll = isAll;
    this.showSelection();
  }

  showSelection() {
    const {isWholePage, selection} = this;
    this.bulk.show();
    this.whole.input.indeterminate = !isWholePage && this.page.some((job) => selection.has(job));
    this.whole.input.checked = isWholePage;
    for (const row of byId("jobs-body").children) {
      if (!row.job) continue;
      const isSelected = selection.has(row.job);
      set(row, "data-chosen", isSelected);
      if (row.pick) row.pick.input.checked = isSelected;
    }
  }

  // Rows

  /** Show the jobs of the page, and below each open sweep the table of its runs. */
  showRows() {
    byId("jobs").style.setProperty("--id-length", Math.max(0, ...this.page.map((job) => String(keyOf(job)).length)));
    const key = (job) => (job.runsOf ? `runs of ${job.runsOf}` : keyOf(job));
    const make = (job) => (job.runsOf ? this.sweeps.makeRow(job.runsOf) : this.makeRow(job));
    const update = (row, job) => job.runsOf || this.updateRow(row, job);
    keep(byId("jobs-body"), this.sweeps.withRuns(this.page), key, make, update);
  }

  updateRow(row, job) {
    row.job = job;
    COLUMNS.forEach((column, place) => column.update(row.parts[place], job));
    if (job.group) set(row.querySelector(".fold"), "aria-expanded", String(this.sweeps.isOpen(job.id)));
  }

  makeRow(job) {
    const row = el("tr");
    row.pick = this.isReadOnly ? null : makePick(`Select job ${keyOf(job)}`, () => this.toggle(row.job));
    row.parts = COLUMNS.map((column) => column.make(job, (id) => this.sweeps.toggle(id)));
    row.append(...(row.pick ? [el("td", {class: "pick"}, row.pick)] : []));
    row.append(...COLUMNS.map(({title, kind}, place) => el("td", {"data-label": title, class: kind}, row.parts[place])));
    return row;
  }

  /** Move the focus to the next or previous job (j and k, or the arrows). */
  step(by) {
    const links = [...byId("jobs-body").querySelectorAll(".named a")];
    const at = links.findIndex((link) => link.closest("tr").contains(document.activeElement));
    const next = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + by, 0), links.length - 1)];
    next?.focus();
    next?.scrollIntoView({block: "nearest"});
  }

  /** Select the job that has the focus. */
  pick() {
    const row = document.activeElement?.closest("#jobs-body tr");
    if (row?.pick) this.toggle(row.job);
  }
}

/** A checkbox in a label that is large enough for a finger. */
function makePick(label, onchange) {
  const input = el("input", {type: "checkbox", "aria-label": label, onchange});
  const node = el("label", {class: "pickbox"}, input);
  node.input = input;
  return node;
}

const sumOf = (counts) => Object.values(counts).reduce((all, jobs) => all + jobs, 0);
