/**
 * The summary of the night: what succeeded and failed since last evening, the causes with their jobs, what it cost,
 * results that cannot be brought back, and a button that retries exactly the failed jobs it shows. It is requested when
 * jobs have ended or run again, or the notices have changed, at most every 5 s. Once hidden, it stays so until another
 * job has failed, or other results cannot be brought back.
 */

import {act} from "./actions.js";
import {button, byId, el, keep, remember, remembered, say, sayMessage, set} from "./dom.js";
import {clockDay, count, energy, isKnown} from "./format.js";
import {get} from "./api.js";

const LOAD_EVERY_MS = 5000;
const HIDDEN = "summary-hidden";
const MOST_CAUSES = 8;

export class SummaryBanner {
  /** `isReadOnly` hides the button. */
  constructor({isReadOnly}) {
    Object.assign(this, {isReadOnly, shown: null, signature: "", loadedAt: -Infinity, timer: 0});
    this.title = el("h2", {id: "summary-title"});
    this.counts = el("p", {class: "number"});
    this.cost = el("p", {class: "hint number"});
    this.causes = el("ul", {class: "causes"});
    this.unbrought = el("ul", {class: "warnings"});
    this.retry = button("", () => this.retryFailed(), "primary");
    const hide = button("Hide", () => this.hide(), "quiet");
    const actions = el("div", {class: "actions"}, this.retry, hide);
    const head = el("div", {class: "head"}, this.title, this.counts, this.cost, actions);
    const attributes = {class: "summary panel", "aria-labelledby": "summary-title", hidden: true};
    this.node = el("section", attributes, head, this.causes, this.unbrought);
    byId("banner").append(this.node);
  }

  /** Load it if the numbers of jobs in each state, or the notices, have changed. */
  notice({counts, notices}) {
    const signature = JSON.stringify([counts, notices]);
    if (signature === this.signature) return;
    this.signature = signature;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.load(), Math.max(0, this.loadedAt + LOAD_EVERY_MS - performance.now()));
  }

  async load() {
    this.loadedAt = performance.now();
    try {
      this.show(await get("/summary"));
    } catch (error) {
      console.info("gpuyard: no summary", error);  // the connection's state is shown in the header
    }
  }

  show(summary) {
    this.shown = summary;
    const isHidden = remembered(HIDDEN, "") === hiddenKey(summary);
    const {unbrought} = summary;
    set(this.node, "hidden", isHidden || summary.succeeded + summary.failed + unbrought.length === 0);
    set(this.node, "data-tone", summary.failed || unbrought.length ? "bad" : "good");
    say(this.title, `Since ${clockDay(summary.since)}`);
    say(this.counts, countsOf(summary));
    say(this.cost, costOf(summary));
    this.retry.hidden = this.isReadOnly || summary.failed === 0;
    say(this.retry, `Retry ${count(summary.failed)} failed`);
    const causes = summary.causes.slice(0, MOST_CAUSES);
    const left = summary.causes.slice(MOST_CAUSES).reduce((sum, cause) => sum + cause.count, 0);
    if (left) causes.push({text: null, count: left, ids: "", first: summary.causes[MOST_CAUSES].first});
    keep(this.causes, causes, (cause) => cause.text, makeCause, updateCause);
    keep(this.unbrought, unbrought, (line) => line, (line) => el("li", {message: line}));
  }

  hide() {
    remember(HIDDEN, hiddenKey(this.shown));
    set(this.node, "hidden", true);
  }

  /** Retry the jobs that are shown as failed, without those that have been retried since. */
  async retryFailed() {
    const shown = idsOf(this.shown.failed_ids);
    await this.load();
    const still = new Set(idsOf(this.shown.failed_ids));
    const ids = shown.filter((id) => still.has(id));
    if (await act("retry", {ids: ids.join(" ")}, ids.length)) this.load();
  }
}

/** Another failure, another problem, or another night, shows a hidden summary again. */
const hiddenKey = ({since, failed_ids: ids, unbrought}) => `${since} ${ids} ${unbrought.join(" ")}`;

/** `3-5 9` as numbers. */
export const idsOf = (text) => text.split(" ").filter(Boolean).flatMap((range) => {
  const [first, last = first] = range.split("-").map(Number);
  return Array.from({length: last - first + 1}, (_, at) => first + at);
});

function countsOf({succeeded, failed, rejected, cancelled, now}) {
  const facts = {succeeded, failed, rejected, cancelled, running: now.running, waiting: now.waiting, held: now.held,
                 suspended: now.suspended};
  const isShown = ([word, number]) => number || word === "succeeded" || word === "failed";
  return Object.entries(facts).filter(isShown).map(([word, number]) => `${count(number)} ${word}`).join(" · ");
}

function costOf({gpu_hours: hours, energy: {kwh, cost, currency, co2e_kg: kilograms}}) {
  const grams = isKnown(kilograms) ? 1000 * kilograms : null;
  const used = isKnown(kwh) && energy({joules: 3.6e6 * kwh, kwh, cost, currency, co2e_g: grams});
  const time = hours >= 0.05 || !hours ? `${hours.toFixed(1)} GPU-hours` : `${(60 * hours).toFixed(1)} GPU-minutes`;
  return [time, used].filter(Boolean).join(" · ");
}

const makeCause = () => el("li", {}, el("strong", {class: "number"}), el("a"), el("span", {class: "hint number"}));

function updateCause(node, cause) {
  const [number, link, jobs] = node.children;
  say(number, `${count(cause.count)} ×`);
  sayMessage(link, cause.text ?? "other causes");
  set(link, "href", cause.text === null ? "#/?state=failed" : `#/job/${cause.first}`);
  set(link, "title", cause.text === null ? null : `Show job ${cause.first}`);
  say(jobs, cause.ids && `${cause.count === 1 ? "job" : "jobs"} ${cause.ids.replaceAll(" ", ", ")}`);
}
