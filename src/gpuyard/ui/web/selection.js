/**
 * The selected jobs: some, with their last known states, or all that match the filter. A selection outlasts an action
 * and every update of the list. The row of a sweep stands for all its runs.
 */

import {ACTS} from "./states.js";
import {keyOf} from "./sweep.js";

/** How many jobs of a row are in which state. */
const countsOf = (job) => job.group?.counts ?? {[job.state]: 1};

const sum = (counts, isCounted = () => true) =>
  Object.entries(counts).reduce((all, [state, jobs]) => all + (isCounted(state) ? jobs : 0), 0);

export class Selection {
  constructor() {
    this.counts = new Map();
    this.isAll = false;
  }

  has(job) {
    return this.isAll || this.counts.has(keyOf(job));
  }

  /** The ids of the selected rows: numbers, and ranges such as "18-57". */
  get keys() {
    return [...this.counts.keys()];
  }

  /** The number of selected jobs. */
  get size() {
    return [...this.counts.values()].reduce((all, counts) => all + sum(counts), 0);
  }

  /** Select these rows of the list, and no others. */
  set(jobs) {
    this.counts = new Map(jobs.map((job) => [keyOf(job), countsOf(job)]));
    this.isAll = false;
  }

  add(jobs) {
    for (const job of jobs) this.counts.set(keyOf(job), countsOf(job));
  }

  remove(jobs) {
    for (const job of jobs) this.counts.delete(keyOf(job));
  }

  clear() {
    this.set([]);
  }

  /** Learn the states of the jobs that the list shows. */
  learn(jobs) {
    for (const job of jobs)
      if (this.counts.has(keyOf(job))) this.counts.set(keyOf(job), countsOf(job));
  }

  /** The number of selected jobs that an action applies to. */
  countFor(verb) {
    return this.keys.reduce((all, key) => all + this.countIn(key, verb), 0);
  }

  /** The ids of the rows with jobs that an action applies to. */
  idsFor(verb) {
    return this.keys.filter((key) => this.countIn(key, verb) > 0);
  }

  countIn(key, verb) {
    return sum(this.counts.get(key), ACTS[verb].may);
  }
}
