/** The page: permissions, the current view, its subscriptions, and the keys. */

import {Devices} from "./devices.js";
import {noteRefusal, showKeys} from "./dialogs.js";
import {byId, say, set} from "./dom.js";
import {Header} from "./header.js";
import {JobPage} from "./job.js";
import {goTo} from "./modal.js";
import {Queue} from "./queue.js";
import {SubmitForm} from "./submit.js";
import {SummaryBanner} from "./summary.js";
import {SweepPage} from "./sweep_page.js";
import {Timeline} from "./timeline.js";
import {Live, get, queryOf} from "./api.js";

class App {
  constructor(session) {
    this.session = session;
    const isReadOnly = session.read_only;
    this.header = new Header({choose: (state) => this.goToQueue({...this.queue.filter, state, after: 0}), isReadOnly});
    const rewatch = () => this.place === "overview" && this.watchOverview();
    this.queue = new Queue({go: (filter) => this.goToQueue(filter), rewatch, isReadOnly});
    this.live = new Live((word) => this.onConnection(word));
    this.timeline = new Timeline(() => this.devices.showStrips());
    this.summary = new SummaryBanner({isReadOnly});
    this.devices = new Devices((job) => this.timeline.nameOf(job));
    placeQueue();
    this.submitForm = isReadOnly ? null : new SubmitForm();
    this.job = null;
    this.signature = {};  // counts and leases: the timeline is reloaded when they change
    say(byId("host"), session.host);
    for (const node of document.querySelectorAll("[data-action]")) node.hidden = isReadOnly;
    byId("keys").addEventListener("click", showKeys);
    document.addEventListener("keydown", (event) => this.onKey(event));
    window.addEventListener("hashchange", () => this.route());
    this.route();
  }

  // Views

  route() {
    const [path, query = ""] = window.location.hash.replace(/^#/, "").split("?");
    const [, kind, id] = path.match(/^\/(job|sweep)\/(\d+)$/) ?? [];
    this.job?.close?.();
    this.job = null;
    if (kind)
      this.showJob(kind === "job" ? JobPage : SweepPage, Number(id), new URLSearchParams(query));
    else if (path === "/submit" && this.submitForm)
      this.showSubmit();
    else
      this.showOverview(new URLSearchParams(query));
  }

  showOnly(place) {
    if (this.place === "overview" && place !== "overview") this.overviewScroll = window.scrollY;
    for (const name of ["overview", "job", "submit"]) byId(`view-${name}`).hidden = name !== place;
    for (const link of document.querySelectorAll("[data-place]"))
      set(link, "aria-current", link.dataset.place === place ? "page" : null);
    if (this.place && this.place !== place)
      window.scrollTo(0, this.place === "overview" ? 0 : (this.overviewScroll ?? 0));
    this.place = place;
  }

  showOverview(query) {
    const isBack = this.place !== "overview";
    this.showOnly("overview");
    document.title = `gpuyard · ${this.session.host}`;
    this.queue.setFilter(
      {
        state: query.get("state") ?? "",
        search: query.get("search") ?? "",
        order: query.get("order") ?? "",
        after: Number(query.get("after")) || 0,
      }
    );
    this.header.setChosen(this.queue.filter.state);
    if (isBack) {
      this.devices.load();
      this.timeline.forget();
    }
    this.watchOverview();
  }

  watchOverview() {
    this.watch([["/devices", (answer) => this.onDevices(answer)], ...this.queue.targets()]);
  }

  /** Show the page of a job or of a sweep. */
  showJob(Page, id, query) {
    this.showOnly("job");
    this.header.setChosen(null);
    const rewatch = () => this.watch(this.job.targets());
    this.job = new Page(id, {query, isReadOnly: this.session.read_only, rewatch});
    this.watch(this.job.targets());
    byId("main").focus({preventScroll: true});
  }

  showSubmit() {
    this.showOnly("submit");
    this.header.setChosen(null);
    this.watch([]);
    this.submitForm.show();
  }

  goToQueue(filter) {
    const query = queryOf({...filter, after: filter.after || ""});
    return goTo(query ? `#/?${query}` : "#/");
  }

  // Answers of the daemon

  watch(targets) {
    this.live.watch(new Map([["/status", (answer) => this.onStatus(answer)], ...targets]));
  }

  onStatus(answer) {
    this.header.setStatus(answer);
    this.signature.counts = answer.counts;
    if (answer.counts) this.summary.notice(answer);
    this.noticeChange();
  }

  onDevices(answer) {
    this.devices.show(answer);
    if (answer.taken_at) this.timeline.setTime(Date.parse(answer.taken_at) / 1000);
    this.signature.leases =
      answer.devices?.map((device) => device.leases.map((lease) => [lease.id, lease.is_exclusive, lease.reserved_mb]));
    this.noticeChange();
  }

  noticeChange() {
    const {counts, leases} = this.signature;
    if (this.place === "overview" && counts && leases) this.timeline.notice(JSON.stringify(this.signature));
  }

  /** Request once what was missed while the stream was closed. */
  onConnection(word) {
    const isBack = word === "live" && this.wasLost;
    this.wasLost = word !== "live";
    this.header.setConnection(word);
    if (isBack && this.place === "overview") {
      this.devices.load();
      this.timeline.forget();
    }
    if (word !== "live") this.checkSession();
  }

  /** A refused stream gives no reason; a request does. */
  async checkSession() {
    try {
      await get("/session");
    } catch (error) {
      if (error.status === 401 && !this.isRefusalShown) {
        this.isRefusalShown = true;
        noteRefusal(error);
      }
    }
  }

  // Keys

  onKey(event) {
    const isTyping = event.target.closest?.("input:not([type=checkbox]), textarea, select, dialog");
    if (event.key === "Escape") return this.onEscape(event);
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const does = this.keys()[event.key];
    if (does && does() !== false) event.preventDefault();
  }

  keys() {
    const isOverview = this.place === "overview";
    const isInQueue = () => isOverview && (document.activeElement?.closest("#jobs-body") ?? false);
    return {
      "?": () => showKeys(),
      n: () => this.submitForm && goTo("#/submit"),
      "/": () => this.search(),
      j: () => isOverview && this.queue.step(1),
      k: () => isOverview && this.queue.step(-1),
      ArrowDown: () => (isInQueue() ? this.queue.step(1) : false),
      ArrowUp: () => (isInQueue() ? this.queue.step(-1) : false),
      x: () => isOverview && this.queue.pick(),
      g: () => isOverview && this.devices.toggleAll(),
      t: () => isOverview && this.timeline.toggle(),
    };
  }

  async search() {
    if (this.place !== "overview") await this.goToQueue(this.queue.filter);
    requestAnimationFrame(() => byId("search").focus());
  }

  onEscape(event) {
    if (document.querySelector("dialog[open]")) return;
    if (event.target.id === "search" && event.target.value) return;
    if (event.target.closest?.("input, textarea"))
      event.target.blur();
    else if (this.place !== "overview")
      this.goToQueue(this.queue.filter);
  }
}

/** On a phone, the queue comes first: in the document too, for keyboards and screen readers. */
function placeQueue() {
  const narrow = matchMedia("(max-width: 720px)");
  const place = () => byId(narrow.matches ? "devices" : "timeline-section")[narrow.matches ? "before" : "after"](byId("queue"));
  narrow.addEventListener("change", place);
  place();
}

get("/session").then((session) => new App(session), noteRefusal);
