/** Sweeps and arrays in the queue: a row with their progress that opens into the table of their runs. */

import {button, el, keep, number, say, sayMessage, set} from "./dom.js";
import {UNKNOWN, count, duration} from "./format.js";
import {figureText, makeProgress, setProgress} from "./progress.js";
import {makeShortened} from "./shortened.js";
import {FINISHED, setState, stateChip, stateWord, toneOf} from "./states.js";
import {queryOf} from "./api.js";

const PAGE = 20;
// A stream carries 16 targets.
const MOST_OPEN = 8;
const TEXTS = {
  text: (cell) => cell,
  seconds: duration,
  figure: figureText,
};

/** What tells a row of the queue from others: a job's id, or all ids of a sweep. Requests take both. */
export const keyOf = (job) => job.group?.ids ?? job.id;

export const sizeOf = (job) => job.group?.count ?? 1;

/** The name of a sweep, which opens and closes it. */
export function makeSweepName(job, toggle) {
  const onclick = (event) => {
    event.preventDefault();
    toggle(job.id);
  };
  const name = makeShortened("a", {href: `#/sweep/${job.id}`, role: "button", "aria-expanded": "false", onclick});
  name.classList.add("fold");
  return name;
}

const linkTo = (id) => el("a", {class: "sweeplink", href: `#/sweep/${id}`, text: "Open as a page"});

/** The row of a sweep with the part of its runs that have finished as its progress. */
export function sweepProgress(job) {
  const {count: total, counts} = job.group;
  const done = Object.entries(counts).reduce((all, [state, jobs]) => all + (FINISHED.has(state) ? jobs : 0), 0);
  return {...job, id: keyOf(job), progress: {done, total, unit: "%", percent: (100 * done) / total, left_s: null}};
}

/** The sweeps that are open. `width` is the number of columns of the queue; `rewatch` is called when other targets are to
 * be watched. */
export class OpenSweeps {
  constructor(width, rewatch) {
    this.width = width;
    this.rewatch = rewatch;
    this.runs = new Map();
  }

  toggle(id) {
    if (!this.runs.delete(id)) this.runs.set(id, new SweepRuns(id, () => this.rewatch(), linkTo(id)));
    while (this.runs.size > MOST_OPEN) this.runs.delete(this.runs.keys().next().value);
    this.rewatch();
  }

  isOpen(id) {
    return this.runs.has(id);
  }

  /** The rows of the queue, each open sweep with a row for its runs behind it. */
  withRuns(jobs) {
    return jobs.flatMap((job) => (job.group && this.isOpen(job.id) ? [job, {runsOf: job.id}] : [job]));
  }

  /** A row that holds the table of runs. */
  makeRow(id) {
    return el("tr", {class: "runs"}, el("td", {colspan: this.width}, this.runs.get(id).node));
  }

  targets() {
    return [...this.runs.values()].map((runs) => [runs.target, (answer) => runs.show(answer)]);
  }
}

/** The table of the runs of one sweep, a page at a time. Calls `rewatch()` when its target changes. */
export class SweepRuns {
  /** `link` is above the table. */
  constructor(id, rewatch, link = null) {
    Object.assign(this, {id, rewatch, sort: "", after: 0});
    this.head = el("tr");
    this.body = el("tbody");
    this.complaint = el("p", {class: "empty", hidden: true});
    this.range = el("span", {class: "number hint"});
    this.previous = button("Previous", () => this.turn(this.after - PAGE));
    this.next = button("Next", () => this.turn(this.after + PAGE));
    this.pages = el("div", {class: "pages"}, this.range, this.previous, this.next);
    const table = el("table", {"aria-label": `Runs of ${id}`}, el("thead", {}, this.head), this.body);
    this.node = el("div", {class: "sweep"}, link, this.complaint, el("div", {class: "scroll"}, table), this.pages);
  }

  get target() {
    return `/sweeps/${this.id}?${queryOf({sort: this.sort, limit: PAGE, after: this.after || ""})}`;
  }

  turn(after) {
    this.after = Math.max(0, after);
    this.rewatch();
  }

  /** Sort by a column; again: from the last to the first; a third time: by job. */
  sortBy(name) {
    this.sort = this.sort === name ? `-${name}` : this.sort === `-${name}` ? "" : name;
    this.turn(0);
  }

  show(answer) {
    this.complaint.hidden = !answer.error;
    if (answer.error) return sayMessage(this.complaint, [answer.error, answer.hint].filter(Boolean).join(": "));
    this.columns = answer.columns;
    const heads = ["Job", ...answer.columns, "GPU", "Why"];
    keep(this.head, heads, nameOf, (each) => this.makeHead(each), (node, each) => this.updateHead(node, each));
    // A new figure is a new column: rows are then made again.
    const names = answer.columns.map(nameOf).join(" ");
    keep(this.body, answer.jobs, (job) => `${job.id} ${names}`, (job) => this.makeRun(job), updateRun);
    const last = this.after + answer.jobs.length;
    say(this.range, `${count(this.after + 1)}–${count(last)} of ${count(answer.total)}`);
    this.previous.disabled = this.after === 0;
    this.next.disabled = answer.next === null;
    this.pages.hidden = this.after === 0 && answer.next === null;
  }

  makeHead(column) {
    const cell = el("th", {scope: "col"});
    if (column.name)
      cell.append(button("", () => this.sortBy(column.name), "sort"));
    else
      say(cell, column);
    return cell;
  }

  updateHead(cell, column) {
    if (!column.name) return;
    set(cell, "aria-sort", {[column.name]: "ascending", [`-${column.name}`]: "descending"}[this.sort] ?? null);
    // Titles in capitals are those of the command line; names of values stay as they were given.
    const title = /^[A-Z]+$/.test(column.title) ? column.title[0] + column.title.slice(1).toLowerCase() : column.title;
    say(cell.firstChild, title);
  }

  makeRun(job) {
    const cells = this.columns.map((column) => (column.name === "state" ? stateChip() : number()));
    const [gpu, why, progress] = [number(), el("span", {class: "reason"}), makeProgress()];
    const link = el("a", {href: `#/job/${job.id}`, text: job.id});
    const row = el("tr", {}, [link, ...cells, gpu, [why, progress]].map((cell) => el("td", {}, cell)));
    Object.assign(row, {cells_: cells, columns_: this.columns, gpu_: gpu, why_: why, progress_: progress});
    return row;
  }
}

const nameOf = (column) => column.name ?? column;

function updateRun(row, job) {
  row.cells_.forEach((node, place) => {
    const {name, kind} = row.columns_[place];
    const cell = job.cells[place];
    if (name === "state")
      setState(node, job.state, stateWord(job));
    else
      say(node, cell === null ? UNKNOWN : (TEXTS[kind] ?? TEXTS.text)(cell));
  });
  say(row.gpu_, job.gpu_labels.filter(Boolean).join(", "));
  sayMessage(row.why_, job.reason);
  set(row.why_, "data-tone", toneOf(job.state));
  setProgress(row.progress_, job, 0);
}
