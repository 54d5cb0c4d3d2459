/**
 * The queue: one page of rows, which the daemon filters and searches; rows are updated in place. Jobs can be selected,
 * some or all that match the filter, and a toolbar acts on them.
 */

import {act, actButton} from "./actions.js";
import {setElapsed} from "./clock.js";
import {button, byId, el, keep, number, say, set} from "./dom.js";
import {UNKNOWN, count, memory, plural, title} from "./format.js";
import {ACTS, TIMED, setState, stateChip, stateWord, toneOf} from "./states.js";
import {OpenSweeps, keyOf, makeSweepName, sizeOf} from "./sweep.js";
import {queryOf} from "./api.js";

const PAGE = 50;
const TYPING_MS = 250;
const COLUMNS = ["Job", "State", "Name and command", "GPU", "Memory", "Priority", "Time"];
const sideOf = (column) => (["Memory", "Priority", "Time"].includes(column) ? "right" : null);

export class Queue {
  /** `go(filter)` shows another page or filter; `rewatch` watches `targets` again; `isReadOnly` hides everything that
   * changes jobs. */
  constructor({go, rewatch, isReadOnly}) {
    this.go = go;
    this.sweeps = new OpenSweeps(() => {
      this.showRows();
      rewatch();
    });
    this.isReadOnly = isReadOnly;
    this.filter = {state: "", search: "", after: 0};
    Object.assign(this, {page: [], jobs: [], total: null, selected: new Set(), isAllSelected: false});
    this.whole = makePick("Select all jobs on this page", () => this.togglePage());
    const heads = COLUMNS.map((word) => el("th", {scope: "col", text: word, class: sideOf(word)}));
    byId("jobs-head").append(...(isReadOnly ? [] : [el("th", {scope: "col", class: "pick"}, this.whole)]), ...heads);
    this.makePages();
    this.makeToolbar();
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

  makeToolbar() {
    this.summary = el("strong", {class: "number"});
    this.everything = button("", () => this.select(this.selected, true), "link");
    const acts = Object.keys(ACTS).map((verb) => actButton(verb, () => this.act(verb)));
    const clear = button("Clear", () => this.select([]), "quiet");
    const row = (...children) => el("div", {class: "row"}, ...children);
    byId("bulk").append(row(this.summary, this.everything), row(acts, clear));
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
    if (filter.state !== this.filter.state || filter.search !== this.filter.search) this.select([]);
    this.filter = filter;
    if (document.activeElement !== byId("search")) byId("search").value = filter.search;
  }

  /** The target to watch for this filter. */
  get target() {
    const {state, search, after} = this.filter;
    // Spaces separate the targets of a stream, so a space inside a target is %20.
    return `/jobs?${queryOf({all: 1, fold: 1, state, search, limit: PAGE, after: after || ""}).replaceAll("+", "%20")}`;
  }

  /** All targets to watch, each with what its answers are for. */
  targets() {
    return [[this.target, (answer) => this.show(answer)], ...this.sweeps.targets()];
  }

  showRows() {
    const rows = this.sweeps.withRuns(this.jobs);
    const key = (job) => (job.runsOf ? `runs of ${job.runsOf}` : keyOf(job));
    const make = (job) => (job.runsOf ? this.sweeps.makeRow(job.runsOf) : this.makeRow(job));
    keep(byId("jobs-body"), rows, key, make, (row, job) => job.runsOf || this.updateRow(row, job));
  }

  updateRow(row, job) {
    updateRow(row, job);
    if (job.group) set(row.cells_.name, "aria-expanded", String(this.sweeps.isOpen(job.id)));
  }

  show(answer) {
    const empty = byId("jobs-empty");
    empty.hidden = !answer.error && answer.jobs.length > 0;
    if (answer.error) return say(empty, [answer.error, answer.hint].filter(Boolean).join(": "));
    this.jobs = answer.jobs;
    this.sizes = new Map([...(this.sizes ?? []), ...answer.jobs.map((job) => [keyOf(job), sizeOf(job)])]);
    this.showRows();
    this.page = answer.jobs.map(keyOf);
    this.rows = answer.total ?? null;
    const all = Object.values(answer.counts).reduce((sum, jobs) => sum + jobs, 0);
    this.total = this.isFiltered || this.rows === null ? this.rows : all;
    this.showSelection();
    this.showPlace(answer);
    const how = this.isReadOnly ? "" : ": submit one here, or with `gpuyard submit -- python train.py`";
    say(empty, this.isFiltered ? "No jobs match." : `No jobs yet${how}.`);
  }

  get isFiltered() {
    return Boolean(this.filter.state || this.filter.search);
  }

  showPlace(answer) {
    const {filter: {after}, total, rows} = this;
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

  isSelected(id) {
    return this.isAllSelected || this.selected.has(id);
  }

  get isWholePage() {
    return this.page.length > 0 && this.page.every((id) => this.isSelected(id));
  }

  get selectedCount() {
    const chosen = [...this.selected].reduce((sum, key) => sum + (this.sizes?.get(key) ?? 1), 0);
    return this.isAllSelected ? (this.total ?? 0) : chosen;
  }

  toggle(id) {
    const ids = new Set(this.isAllSelected ? this.page : this.selected);
    if (!ids.delete(id)) ids.add(id);
    this.select(ids);
  }

  togglePage() {
    if (this.isAllSelected) return this.select([]);
    const others = [...this.selected].filter((id) => !this.page.includes(id));
    this.select(this.isWholePage ? others : [...others, ...this.page]);
  }

  select(ids, isAll = false) {
    Object.assign(this, {selected: new Set(ids), isAllSelected: isAll});
    this.showSelection();
  }

  showSelection() {
    const {isAllSelected: isAll, isWholePage, total} = this;
    byId("bulk").hidden = this.selectedCount === 0;
    say(this.summary, `${isAll ? `All ${plural(total, "job")}` : plural(this.selectedCount, "job")} selected`);
    this.everything.hidden = isAll || !isWholePage || total === null || total <= this.selectedCount;
    say(this.everything, `Select all ${count(total)} that match`);
    this.whole.checked = isWholePage;
    this.whole.indeterminate = !isWholePage && this.page.some((id) => this.isSelected(id));
    for (const row of byId("jobs-body").children) {
      const isSelected = this.isSelected(row.cells_.id);
      set(row, "data-chosen", isSelected);
      if (row.cells_.pick) row.cells_.pick.checked = isSelected;
    }
  }

  async act(verb) {
    const {state, search} = this.filter;
    const matching = this.isFiltered ? {where: {state, search}} : {ids: "all"};
    const which = this.isAllSelected ? matching : {ids: [...this.selected].join(" ")};
    if (await act(verb, which, this.selectedCount)) this.select([]);
  }

  // Rows

  makeRow(job) {
    const cells = {
      id: keyOf(job),
      pick: this.isReadOnly ? null : makePick(`Select job ${keyOf(job)}`, () => this.toggle(keyOf(job))),
      state: stateChip(),
      name: job.group ? makeSweepName(job, (id) => this.sweeps.toggle(id)) : el("a", {href: `#/job/${job.id}`}),
      command: el("code"),
      tag: el("span", {class: "tag"}),
      reason: el("span", {class: "reason"}),
      time: number(),
      ...Object.fromEntries(Object.keys(TEXTS).map((label) => [label, number()])),
    };
    const cell = (label, child) => el("td", {"data-label": label, class: sideOf(label)}, child);
    const row = el(
      "tr",
      {},
      cells.pick && el("td", {class: "pick"}, cells.pick),
      cell("Job", cells.Job),
      cell("State", cells.state),
      el("td", {class: "what"}, el("div", {class: "named"}, cells.name, cells.tag), cells.command, cells.reason),
      ...["GPU", "Memory", "Priority"].map((label) => cell(label, cells[label])),
      cell("Time", cells.time),
    );
    row.cells_ = cells;
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
    if (row?.cells_.pick) this.toggle(row.cells_.id);
  }
}

/** The columns with a number or a short text. */
const TEXTS = {Job: keyOf, GPU: gpusOf, Memory: memoryOf, Priority: (job) => job.priority};

const makePick = (label, onchange) => el("input", {type: "checkbox", "aria-label": label, onchange});

function updateRow(row, job) {
  const cells = row.cells_;
  setState(cells.state, job.state, stateWord(job));
  say(cells.name, title(job));
  say(cells.command, job.name ? job.command : "");
  say(cells.tag, job.tag);
  say(cells.reason, [job.group?.text, job.reason].filter(Boolean).join("; "));
  set(cells.reason, "data-tone", toneOf(job.state));
  for (const [label, textOf] of Object.entries(TEXTS)) say(cells[label], textOf(job));
  setElapsed(cells.time, job.elapsed_s ?? job.waited_s, TIMED.has(job.state));
  set(cells.time, "title", job.elapsed_s === null ? "waiting time" : "run time");
}

function gpusOf(job) {
  const on = job.gpu_labels.filter((label) => label !== null);
  if (job.place) return job.place;
  if (on.length) return on.join(", ");
  return job.gpus ? `any ${job.gpus > 1 ? job.gpus : ""}`.trim() : UNKNOWN;
}

/** The memory reserved, estimated or requested. */
function memoryOf(job) {
  const given = job.reserved_mb ?? job.estimated_mb ?? job.vram_mb;
  if (!job.gpus) return UNKNOWN;
  return given === null ? "alone" : memory(given);
}
