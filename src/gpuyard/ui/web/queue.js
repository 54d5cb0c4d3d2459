/**
 * The queue: one page of rows, which the daemon filters and searches; rows are updated in place. Jobs can be selected,
 * some or all that match the filter, and a toolbar acts on them.
 */

import {act, actButton} from "./actions.js";
import {setElapsed} from "./clock.js";
import {button, byId, el, keep, number, say, set} from "./dom.js";
import {UNKNOWN, count, memory, plural, title} from "./format.js";
import {ACTS, TICKING, WAITING, setState, stateChip, stateWord, toneOf} from "./states.js";
import {queryOf} from "./api.js";

const PAGE = 50;
const TYPING_MS = 250;
const COLUMNS = ["Job", "State", "Name and command", "GPU", "Memory", "Priority", "Time"];
const sideOf = (column) => (["Memory", "Priority", "Time"].includes(column) ? "right" : null);

export class Queue {
  /** `go(filter)` shows another page or filter; `isReadOnly` hides everything that changes jobs. */
  constructor({go, isReadOnly}) {
    this.go = go;
    this.isReadOnly = isReadOnly;
    this.filter = {state: "", search: "", after: 0};
    this.selection = new JobSelection({where: () => this.where(), changed: () => this.showChosen()});
    this.whole = makePick("Select all jobs on this page", () => this.selection.togglePage());
    const heads = COLUMNS.map((word) => el("th", {scope: "col", text: word, class: sideOf(word)}));
    byId("jobs-head").append(...(isReadOnly ? [] : [el("th", {scope: "col", class: "pick"}, this.whole)]), ...heads);
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
    if (filter.state !== this.filter.state || filter.search !== this.filter.search) this.selection.clear();
    this.filter = filter;
    if (document.activeElement !== byId("search")) byId("search").value = filter.search;
  }

  /** The target to watch for this filter. */
  get target() {
    const {state, search, after} = this.filter;
    // Spaces separate the targets of a stream, so a space inside a target is %20.
    return `/jobs?${queryOf({all: 1, state, search, limit: PAGE, after: after || ""}).replaceAll("+", "%20")}`;
  }

  /** The filter as the `where` of a request. */
  where() {
    const {state, search} = this.filter;
    return this.isFiltered ? {where: {state, search}} : {ids: "all"};
  }

  show(answer) {
    const empty = byId("jobs-empty");
    empty.hidden = !answer.error && answer.jobs.length > 0;
    if (answer.error) return say(empty, [answer.error, answer.hint].filter(Boolean).join(": "));
    keep(byId("jobs-body"), answer.jobs, (job) => job.id, (job) => this.makeRow(job), updateRow);
    this.selection.setPage(answer.jobs.map((job) => job.id), answer.total ?? null);
    this.showChosen();
    this.showPlace(answer);
    const how = this.isReadOnly ? "" : ": submit one here, or with `gpuyard submit -- python train.py`";
    say(empty, this.isFiltered ? "No jobs match." : `No jobs yet${how}.`);
  }

  get isFiltered() {
    return Boolean(this.filter.state || this.filter.search);
  }

  showPlace(answer) {
    const {after} = this.filter;
    const last = after + answer.jobs.length;
    const total = answer.total ?? null;
    const range = `${count(after + 1)}–${count(last)}${total === null ? "" : ` of ${count(total)}`}`;
    say(this.range, answer.jobs.length ? range : "");
    const matching = this.isFiltered ? ` that match${total === 1 ? "es" : ""}` : "";
    say(byId("queue-total"), total === null ? "" : plural(total, "job") + matching);
    this.first.disabled = this.previous.disabled = after === 0;
    this.next.disabled = answer.next === null;
    byId("pages").hidden = after === 0 && answer.next === null;
  }

  showChosen() {
    this.whole.checked = this.selection.isWholePage;
    this.whole.indeterminate = !this.whole.checked && this.selection.page.some((id) => this.selection.has(id));
    for (const row of byId("jobs-body").children) {
      const isChosen = this.selection.has(row.cells_.id);
      set(row, "data-chosen", isChosen);
      if (row.cells_.pick) row.cells_.pick.checked = isChosen;
    }
  }

  makeRow(job) {
    const cells = {
      id: job.id,
      pick: this.isReadOnly ? null : makePick(`Select job ${job.id}`, () => this.selection.toggle(job.id)),
      state: stateChip(job.state),
      name: el("a", {href: `#/job/${job.id}`}),
      command: el("code"),
      tag: el("span", {class: "tag"}),
      reason: el("span", {class: "reason"}),
      gpu: number(),
      memory: number(),
      priority: number(),
      time: number(),
    };
    const cell = (label, child) => el("td", {"data-label": label, class: sideOf(label)}, child);
    const row = el(
      "tr",
      {},
      cells.pick && el("td", {class: "pick"}, cells.pick),
      cell("Job", el("span", {class: "number", text: job.id})),
      cell("State", cells.state),
      el("td", {class: "what"}, el("div", {class: "named"}, cells.name, cells.tag), cells.command, cells.reason),
      cell("GPU", cells.gpu),
      cell("Memory", cells.memory),
      cell("Priority", cells.priority),
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
    if (row?.cells_.pick) this.selection.toggle(row.cells_.id);
  }
}

const makePick = (label, onchange) => el("input", {type: "checkbox", "aria-label": label, onchange});

function updateRow(row, job) {
  const cells = row.cells_;
  setState(cells.state, job.state, stateWord(job));
  say(cells.name, title(job));
  say(cells.command, job.name ? job.command : "");
  say(cells.tag, job.tag ?? "");
  cells.tag.hidden = !job.tag;
  say(cells.reason, job.reason ?? "");
  cells.reason.hidden = !job.reason;
  set(cells.reason, "data-tone", toneOf(job.state));
  say(cells.gpu, gpusOf(job));
  say(cells.memory, memoryOf(job));
  say(cells.priority, job.priority);
  setElapsed(cells.time, job.elapsed_s ?? job.waited_s, TICKING.has(job.state) || WAITING.has(job.state));
  set(cells.time, "title", job.elapsed_s === null ? "waiting time" : "run time");
}

function gpusOf(job) {
  const on = job.gpu_indexes.filter((index) => index !== null);
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

class JobSelection {
  /** `where()` returns the filter of a request; `changed()` is called when the selection changes. */
  constructor({where, changed}) {
    this.where = where;
    this.changed = changed;
    this.ids = new Set();
    this.isAll = false;
    this.total = null;
    this.page = [];
    this.build();
  }

  build() {
    this.summary = el("strong", {class: "number"});
    this.everything = button("", () => this.set({isAll: true}), "link");
    const acts = Object.keys(ACTS).map((verb) => actButton(verb, () => this.act(verb)));
    const clear = button("Clear", () => this.clear(), "quiet");
    byId("bulk").append(
      el("div", {class: "row"}, this.summary, this.everything), el("div", {class: "row"}, acts, clear)
    );
  }

  get count() {
    return this.isAll ? (this.total ?? 0) : this.ids.size;
  }

  has(id) {
    return this.isAll || this.ids.has(id);
  }

  get isWholePage() {
    return this.page.length > 0 && this.page.every((id) => this.has(id));
  }

  /** The rows that the queue shows. */
  setPage(ids, total) {
    this.page = ids;
    this.total = total;
    this.show();
  }

  toggle(id) {
    if (this.isAll) this.set({ids: this.page});
    this.ids.has(id) ? this.ids.delete(id) : this.ids.add(id);
    this.set({});
  }

  togglePage() {
    const isWhole = this.isWholePage;
    if (this.isAll) return this.clear();
    for (const id of this.page) isWhole ? this.ids.delete(id) : this.ids.add(id);
    this.set({});
  }

  clear() {
    this.set({ids: []});
  }

  set({ids, isAll = false}) {
    if (ids) this.ids = new Set(ids);
    this.isAll = isAll;
    this.show();
    this.changed();
  }

  show() {
    byId("bulk").hidden = this.count === 0;
    const selected = this.isAll ? `All ${plural(this.total, "job")}` : plural(this.count, "job");
    say(this.summary, `${selected} selected`);
    this.everything.hidden = this.isAll || !this.isWholePage || this.total === null || this.total <= this.ids.size;
    say(this.everything, `Select all ${count(this.total)} that match`);
  }

  async act(verb) {
    const which = this.isAll ? this.where() : {ids: [...this.ids].join(" ")};
    if (await act(verb, which, this.count)) this.clear();
  }
}
