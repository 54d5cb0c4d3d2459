/** The header: host, connection, job counts as filters, and notices about the whole queue. */

import {unpause} from "./actions.js";
import {announce} from "./dialogs.js";
import {button, byId, el, keep, number, remember, say, set} from "./dom.js";
import {count} from "./format.js";
import {STATES, icon, toneOf} from "./states.js";

const ANNOUNCE_EVERY_MS = 10000;
/** What people look for first; shown even if there are none. */
const FIRST = ["running", "queued", "failed", "succeeded"];
const ORDER = [...FIRST, ...STATES.filter((state) => !FIRST.includes(state))];

export class Header {
  /** `choose(state)` filters the queue; `isReadOnly` hides everything that changes jobs. */
  constructor({choose, isReadOnly}) {
    this.choose = choose;
    this.isReadOnly = isReadOnly;
    this.chosen = "";
    this.counts = {};
    this.announcedAt = -Infinity;
    byId("theme").addEventListener("click", toggleTheme);
    showTheme();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
  }

  setConnection(state) {
    const node = byId("connection");
    say(node, state);
    set(node, "data-is", state);
  }

  setStatus(status) {
    if (status.error) return;
    this.counts = status.counts;
    this.showCounts();
    this.showNotices(status);
    this.announceCounts();
  }

  setChosen(state) {
    this.chosen = state;
    this.showCounts();
  }

  showCounts() {
    const total = Object.values(this.counts).reduce((sum, each) => sum + each, 0);
    const isShown = (state) => this.counts[state] || FIRST.includes(state) || state === this.chosen;
    const chips =
      ["", ...ORDER.filter(isShown)].map((state) => ({state, count: state ? (this.counts[state] ?? 0) : total}));
    keep(byId("counts"), chips, (chip) => chip.state, (chip) => this.makeChip(chip.state), (node, chip) => {
      say(node.lastChild, count(chip.count));
      set(node, "aria-pressed", String(chip.state === this.chosen));
    });
  }

  makeChip(state) {
    const chip = button(null, () => this.choose(state), "chip");
    set(chip, "data-tone", state ? toneOf(state) : "all");
    chip.append(state && icon(state), el("span", {text: state || "all"}), " ", number());
    return chip;
  }

  showNotices(status) {
    const lines = status.notices.map((text) => ({key: text, text}));
    if (status.paused) {
      const text = status.draining ? "The queue is draining: running jobs finish, and no new ones start." :
                                     "The queue is paused: no new jobs start.";
      lines.unshift({key: "paused", text, isPause: true});
    }
    keep(byId("notices"), lines, (line) => line.key + line.text, (line) => this.makeNotice(line));
  }

  makeNotice(line) {
    const action = line.isPause && !this.isReadOnly && button("Unpause", unpause);
    return el("div", {class: "notice", role: "status"}, el("p", {message: line.text}), action);
  }

  /** Announce the counts to screen readers, at most every 10 s. */
  announceCounts() {
    const {running = 0, queued = 0, failed = 0} = this.counts;
    const text = `${running} running, ${queued} queued, ${failed} failed`;
    if (text === this.announced || performance.now() - this.announcedAt < ANNOUNCE_EVERY_MS) return;
    if (this.announced) announce(text);
    this.announced = text;
    this.announcedAt = performance.now();
  }
}

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  remember("theme", theme);
  showTheme();
}

function showTheme() {
  const node = byId("theme");
  say(node, isDark() ? "☀" : "☾");
  set(node, "aria-label", isDark() ? "Switch to light" : "Switch to dark");
}
