/** The selected jobs (some, or all that match the filter), and the toolbar with actions on them. */

import {act} from "./actions.js";
import {byId, el, say} from "./dom.js";
import {count, plural} from "./format.js";
import {ACTS} from "./states.js";

export class JobSelection {
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
    this.everything = el("button", {type: "button", class: "link", onclick: () => this.set({isAll: true})});
    const acts = Object.entries(ACTS).map(
      ([verb, {word}]) => el(
        "button", {type: "button", class: verb === "cancel" ? "danger" : "", text: word, onclick: () => this.act(verb)}
      ),
    );
    const clear = el("button", {type: "button", class: "quiet", text: "Clear", onclick: () => this.clear()});
    byId("bulk")
      .append(el("div", {class: "row"}, this.summary, this.everything), el("div", {class: "row"}, acts, clear));
    byId("bulk").setAttribute("role", "toolbar");
    byId("bulk").setAttribute("aria-label", "Actions on the selected jobs");
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
