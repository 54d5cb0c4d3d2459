/**
 * The queue: one page of rows, which the daemon filters, searches and sorts; rows are updated in place. What a row shows
 * is in `queue_columns.js`. Jobs can be selected, some or all that match the filter, and a toolbar acts on them.
 */

import {BulkActions} from "./bulk_actions.js";
import {button, byId, el, keep, say, set} from "./dom.js";
import {count, plural} from "./format.js";
import {COLUMNS} from "./queue_columns.js";
import {Selection} from "./selection.js";
import {Sorting} from "./sorting.js";
import {queryOf} from "./api.js";

const PAGE = 50;
const TYPING_MS = 250;

export class Queue {
  /** `go(filter)` shows another page, filter or order; `isReadOnly` hides everything that changes jobs. */
  constructor({go, isReadOnly}) {
    this.go = go;
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
    const isOther = filter.state !== this.filter.state || filter.search !== this.filter.search;
    this.filter = filter;
    this.sorting.show(filter.order);
    if (isOther) this.select([]);
    if (document.activeElement !== byId("search")) byId("search").value = filter.search;
  }

  /** The target to watch for this filter. */
  get target() {
    const {state, search, order, after} = this.filter;
    // Spaces separate the targets of a stream, so a space inside a target is %20.
    return `/jobs?${queryOf({all: 1, state, search, order, limit: PAGE, after: after || ""}).replaceAll("+", "%20")}`;
  }

  show(answer) {
    const empty = byId("jobs-empty");
    empty.hidden = !answer.error && answer.jobs.length > 0;
    if (answer.error) return say(empty, [answer.error, answer.hint].filter(Boolean).join(": "));
    keep(byId("jobs-body"), answer.jobs, (job) => job.id, (job) => this.makeRow(job), updateRow);
    this.page = answer.jobs;
    this.total = answer.total ?? null;
    this.counts = answer.counts;
    this.selection.learn(answer.jobs);
    this.showSelection();
    this.showPlace(answer);
    const how = this.isReadOnly ? "" : ": submit one here, or with `gpuyard submit -- python train.py`";
    say(empty, this.isFiltered ? "No jobs match." : `No jobs yet${how}.`);
  }

  get isFiltered() {
    return Boolean(this.filter.state || this.filter.search);
  }

  showPlace(answer) {
    const {filter: {after}, total} = this;
    const last = after + answer.jobs.length;
    const range = `${count(after + 1)}–${count(last)}${total === null ? "" : ` of ${count(total)}`}`;
    say(this.range, answer.jobs.length ? range : "");
    const matching = this.isFiltered ? ` that match${total === 1 ? "es" : ""}` : "";
    say(byId("queue-total"), total === null ? "" : plural(total, "job") + matching);
    this.first.disabled = this.previous.disabled = after === 0;
    this.next.disabled = answer.next === null;
    byId("pages").hidden = after === 0 && answer.next === null;
  }

  // Selecting: some jobs, or all that match the filter

  get isWholePage() {
    return this.page.length > 0 && this.page.every(({id}) => this.selection.has(id));
  }

  toggle(job) {
    const {selection} = this;
    if (selection.isAll) selection.set(this.page);
    if (selection.has(job.id)) selection.remove([job]);
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
    this.whole.input.indeterminate = !isWholePage && this.page.some(({id}) => selection.has(id));
    this.whole.input.checked = isWholePage;
    for (const row of byId("jobs-body").children) {
      const isSelected = selection.has(row.job.id);
      set(row, "data-chosen", isSelected);
      if (row.pick) row.pick.input.checked = isSelected;
    }
  }

  // Rows

  makeRow(job) {
    const row = el("tr");
    row.pick = this.isReadOnly ? null : makePick(`Select job ${job.id}`, () => this.toggle(row.job));
    row.parts = COLUMNS.map((column) => column.make(job));
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

function updateRow(row, job) {
  row.job = job;
  COLUMNS.forEach((column, place) => column.update(row.parts[place], job));
}
