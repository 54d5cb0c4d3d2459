/**
 * The selected jobs: some, as they were listed last, or all that match the filter. A selection ends with an action, and
 * outlasts updates of the list that still have its jobs. The row of a sweep stands for all its runs.
 */

import {ACTS} from "./states.js";
import {keyOf} from "./sweep.js";

/** How many jobs of a row are in which state. */
const countsOf = (job) => job.group?.counts ?? {[job.state]: 1};

const sum = (counts, isCounted = () => true) =>
  Object.entries(counts).reduce((all, [state, jobs]) => all + (isCounted(state) ? jobs : 0), 0);

/** The number of jobs of a row that an action applies to. */
export const countIn = (job, verb) => sum(countsOf(job), ACTS[verb].may);

export class Selection {
  constructor() {
    this.rows = new Map();
    this.isAll = false;
  }

  has(job) {
    return this.isAll || this.rows.has(keyOf(job));
  }

  /** The number of selected jobs. */
  get size() {
    return [...this.rows.values()].reduce((all, job) => all + sum(countsOf(job)), 0);
  }

  /** Select these rows of the list, and no others. */
  set(jobs) {
    this.rows = new Map(jobs.map((job) => [keyOf(job), job]));
    this.isAll = false;
  }

  add(jobs) {
    for (const job of jobs) this.rows.set(keyOf(job), job);
  }

  remove(jobs) {
    for (const job of jobs) this.rows.delete(keyOf(job));
  }

  clear() {
    this.set([]);
  }

  /** Learn the states of the jobs that the list shows. If it shows all that match, the others are not selected any more. */
  learn(jobs, isWhole) {
    const listed = new Map(jobs.map((job) => [keyOf(job), job]));
    for (const key of [...this.rows.keys()]) {
      if (listed.has(key)) this.rows.set(key, listed.get(key));
      else if (isWhole) this.rows.delete(key);
    }
  }

  /** The selected rows with jobs that an action applies to. */
  rowsFor(verb) {
    return [...this.rows.values()].filter((job) => countIn(job, verb) > 0);
  }

  /** The number of selected jobs that an action applies to. */
  countFor(verb) {
    return this.rowsFor(verb).reduce((all, job) => all + countIn(job, verb), 0);
  }
}
