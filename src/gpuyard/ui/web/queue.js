/** The queue: one page of rows, which the daemon filters and searches; rows are updated in place. */

import {JobSelection} from "./selection.js";
import {elapsed, setElapsed} from "./clock.js";
import {byId, el, keep, say, set} from "./dom.js";
import {UNKNOWN, count, memory, plural, title} from "./format.js";
import {TICKING, WAITING, setState, stateChip, stateWord, toneOf} from "./states.js";
import {queryOf} from "./api.js";

const PAGE = 50;
const TYPING_MS = 250;
const COLUMNS = ["Job", "State", "Name and command", "GPU", "Memory", "Priority", "Time"];

export class Queue {
  /** `go(filter)` shows another page or filter; `isReadOnly` hides everything that changes jobs. */
  constructor({go, isReadOnly}) {
    this.go = go;
    this.isReadOnly = isReadOnly;
    this.filter = {state: "", search: "", after: 0};
    this.selection = new JobSelection({where: () => this.where(), changed: () => this.showChosen()});
    this.whole = el(
      "input",
      {type: "checkbox", "aria-label": "Select all jobs on this page", onchange: () => this.selection.togglePage()}
    );
    const heads = COLUMNS.map(
      (word) => el(
        "th",
        {scope: "col", text: word, class: word === "Priority" || word === "Time" || word === "Memory" ? "right" : ""}
      )
    );
    byId("jobs-head").append(...(isReadOnly ? [] : [el("th", {scope: "col", class: "pick"}, this.whole)]), ...heads);
    this.makePages();
    byId("search").addEventListener("input", () => this.onTyping());
    byId("search").addEventListener("keydown", (event) => this.onSearchKey(event));
  }

  makePages() {
    const button = (word, go) => el("button", {type: "button", text: word, onclick: () => this.turn(go())});
    this.first = button("First", () => 0);
    this.previous = button("Previous", () => Math.max(0, this.filter.after - PAGE));
    this.next = button("Next", () => this.filter.after + PAGE);
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
    return state || search ? {where: {state, search}} : {ids: "all"};
  }

  show(answer) {
    const empty = byId("jobs-empty");
    if (answer.error) {
      say(empty, [answer.error, answer.hint].filter(Boolean).join(": "));
      empty.hidden = false;
      return;
    }
    this.jobs = answer.jobs;
    keep(byId("jobs-body"), answer.jobs, (job) => job.id, (job) => this.makeRow(job), updateRow);
    this.selection.setPage(answer.jobs.map((job) => job.id), answer.total ?? null);
    this.showChosen();
    this.showPlace(answer);
    empty.hidden = answer.jobs.length > 0;
    const isFiltered = this.filter.state || this.filter.search;
    say(
      empty,
      isFiltered        ? "No jobs match." :
        this.isReadOnly ? "No jobs yet." :
                          "No jobs yet: submit one here, or with `gpuyard submit -- python train.py`."
    );
  }

  showPlace(answer) {
    const {after} = this.filter;
    const last = after + answer.jobs.length;
    const total = answer.total ?? null;
    const range = `${count(after + 1)}–${count(last)}${total === null ? "" : ` of ${count(total)}`}`;
    say(this.range, answer.jobs.length ? range : "");
    const matching = this.filter.state || this.filter.search ? ` that match${total === 1 ? "es" : ""}` : "";
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
    const pick = this.isReadOnly ?
      null :
      el(
        "input", {type: "checkbox", "aria-label": `Select job ${job.id}`, onchange: () => this.selection.toggle(job.id)}
      );
    const cells = {
      id: job.id,
      pick,
      state: stateChip(job.state),
      name: el("a", {href: `#/job/${job.id}`}),
      command: el("code"),
      tag: el("span", {class: "tag"}),
      reason: el("span", {class: "reason"}),
      gpu: el("span", {class: "number"}),
      memory: el("span", {class: "number"}),
      priority: el("span", {class: "number"}),
      time: elapsed(),
    };
    const cell = (label, ...children) =>
      el("td", {"data-label": label, class: ["Memory", "Priority", "Time"].includes(label) ? "right" : ""}, children);
    const row = el(
      "tr",
      {},
      pick && el("td", {class: "pick"}, pick),
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
