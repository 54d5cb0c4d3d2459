/**
 * The selected jobs: some, with their last known state, or all that match the filter. A selection outlasts an action and
 * every update of the list.
 */

import {ACTS} from "./states.js";

export class Selection {
  constructor() {
    this.states = new Map();
    this.isAll = false;
  }

  has(id) {
    return this.isAll || this.states.has(id);
  }

  get ids() {
    return [...this.states.keys()];
  }

  /** Select these jobs of the list, and no others. */
  set(jobs) {
    this.states = new Map(jobs.map(({id, state}) => [id, state]));
    this.isAll = false;
  }

  add(jobs) {
    for (const {id, state} of jobs) this.states.set(id, state);
  }

  remove(jobs) {
    for (const {id} of jobs) this.states.delete(id);
  }

  clear() {
    this.set([]);
  }

  /** Learn the states of the jobs that the list shows. */
  learn(jobs) {
    for (const {id, state} of jobs)
      if (this.states.has(id)) this.states.set(id, state);
  }

  /** The selected jobs that an action applies to. */
  idsFor(verb) {
    return this.ids.filter((id) => ACTS[verb].may(this.states.get(id)));
  }
}
