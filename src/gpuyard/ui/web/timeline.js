/**
 * The timeline: which job ran on which device and when. Each device is a lane, with a row for each job that runs there
 * at the same time; suspended periods are hatched. It is requested again when the event stream shows that a job started
 * or ended; in between, the bars move left with the time. While it is folded, only the names of running jobs are read.
 */

import {hideTip, noteRefusal, showTip} from "./dialogs.js";
import {byId, keep, makeSpans, remember, remembered, say, set, setAll, svg} from "./dom.js";
import {clock, clockShort, duration, memory, plural} from "./format.js";
import {attemptTone} from "./states.js";
import {FIT, SPANS, isOutgrown, rangeOf, spanFor} from "./timeline_range.js";
import {get} from "./api.js";

const TICKS = [10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200];
const TICK_WIDTH = 64;
const LABELS = 64;
const RIGHT = 2;
const AXIS = 22;
const LEAST_MS = 1500;
const MOST_MS = 5000;
const CHARACTER_WIDTH = 6.6;
const FAR = 200;
const SET_S = 60;
/** How long the daemon caches an answer: a 1200th of its range, at most a minute. */
const cachedMs = (span) => Math.min(60_000, SPANS[span] / 1.2);
/** The clock of the page is behind the daemon's by the delay of its answers. Less than LEAST_MS. */
const BEHIND_S = 1;

export class Timeline {
  /** Calls `onNames()` when `nameOf` may have new answers. */
  constructor(onNames) {
    this.onNames = onNames;
    this.span = makeSpans("timeline", [FIT, ...Object.keys(SPANS)], FIT, (span) => this.choose(span));
    this.fitted = "24h";
    this.range = {seconds: SPANS["1h"], end: null, first: null};
    this.answer = null;
    this.signature = "";
    this.timer = 0;
    this.rest = LEAST_MS;
    this.ahead = Infinity;
    this.changedAt = 0;
    this.readAt = NaN;
    this.loads = 0;
    this.firstShown = 0;  // answers to earlier loads are not shown
    this.drawing = byId("timeline").querySelector("svg");
    this.clip = byId("lanes-clip").firstElementChild;
    const layer = (name) => this.drawing.querySelector(`.${name}`);
    this.layers = {backs: layer("backs"), ticks: layer("ticks"), moving: layer("moving"), labels: layer("labels")};
    this.listen();
    this.setOpen(remembered("timeline-open", "no") === "yes");
  }

  setOpen(isOpen) {
    this.isOpen = isOpen;
    byId("timeline-panel").hidden = byId("timeline-spans").hidden = byId("timeline-legend").hidden = !isOpen;
    byId("timeline-note").hidden = !isOpen;
    set(byId("timeline-fold"), "aria-expanded", String(isOpen));
  }

  toggle() {
    this.setOpen(!this.isOpen);
    remember("timeline-open", this.isOpen ? "yes" : "no");
    if (this.isOpen) this.choose(this.span);
  }

  listen() {
    new ResizeObserver(() => byId("timeline").clientWidth !== this.width && this.draw()).observe(byId("timeline"));
    setInterval(() => this.move(), 1000);
    const {moving} = this.layers;
    const stretchOf = (event) => event.target.closest("[data-job]");
    moving.addEventListener("click", (event) => open(stretchOf(event)));
    for (const name of ["pointerover", "focusin"])
      moving.addEventListener(name, (event) => (stretchOf(event) ? this.tip(stretchOf(event)) : hideTip()));
    for (const name of ["pointerout", "focusout"]) moving.addEventListener(name, hideTip);
    this.drawing.addEventListener("keydown", (event) => this.onKey(event));
    byId("timeline-fold").addEventListener("click", () => this.toggle());
  }

  choose(span) {
    this.span = span;
    this.fitted = "24h";
    this.origin = NaN;
    this.changedAt = this.now();
    this.firstShown = this.loads + 1;
    this.load();
  }

  /** Called for each answer; a new signature means that a job started, ended or was suspended. */
  notice(signature) {
    if (signature === this.signature) return;
    const isFirst = this.signature === "";
    this.signature = signature;
    this.changedAt = this.now();
    if (isFirst) this.load();
    else this.loadLater(this.rest);
  }

  loadLater(rest) {
    this.timer ||= setTimeout(() => this.load(), rest);
  }

  /** Treat the next answer as new. */
  forget() {
    this.signature = "";
  }

  async load() {
    clearTimeout(this.timer);
    this.timer = 0;
    const began = performance.now();
    const load = ++this.loads;
    const {isOpen} = this;
    try {
      const answer = await get(`/timeline?span=${this.requested}`);
      if (load < this.firstShown) return;
      this.firstShown = load;
      this.show(answer, isOpen);
    } catch (error) {
      noteRefusal(error);
    }
    // Request long time ranges less often: they cost the daemon more.
    this.rest = Math.min(MOST_MS, Math.max(LEAST_MS, 10 * (performance.now() - began)));
    // The change may not be in a cached answer yet. The range may be another one since the answer was drawn.
    if (this.readAt < this.changedAt + BEHIND_S) this.loadLater(Math.max(this.rest, cachedMs(this.requested)));
  }

  /** An answer for a folded timeline has only the last minutes: it is never drawn. */
  show(answer, isOpen) {
    this.readAt = answer.until;
    this.names = new Map(answer.stretches.map((each) => [each.job, each.name]));
    this.setTime(answer.until);
    this.onNames();
    if (!isOpen) return;
    this.answer = answer;
    this.draw();
  }

  /** The range to request: a fitted one, once it is known, needs no more than the shortest that covers it. */
  get requested() {
    if (!this.isOpen) return "10m";
    return this.span === FIT ? this.fitted : this.span;
  }

  /** The time at the right edge. */
  get edge() {
    return this.range.end ?? this.now();
  }

  /** Learn the daemon's clock from the time of an answer. Answers are late by less than a minute: if the difference is
   *  larger, the daemon's clock was set. */
  setTime(then) {
    const ahead = performance.now() / 1000 - then;
    this.ahead = Math.abs(ahead - this.ahead) < SET_S ? Math.min(this.ahead, ahead) : ahead;
  }

  /** The name of a job that runs or ran recently. */
  nameOf(job) {
    return this.names?.get(job) ?? "";
  }

  now() {
    return performance.now() / 1000 - this.ahead;
  }

  draw() {
    const width = byId("timeline").clientWidth;
    if (!this.answer || width < 50) return;
    this.width = width;
    this.range = rangeOf(this.span, this.answer, this.now());
    if (this.span === FIT) this.fitted = spanFor(this.range, this.now());
    this.perSecond = (width - LABELS - RIGHT) / this.range.seconds;
    // Keep the origin until it is FAR pixels off, so that ended bars need not be drawn again.
    if (this.range.end || !(Math.abs(this.edge - this.origin) * this.perSecond < FAR)) this.origin = this.edge;
    this.layOut();
    this.layout = [width, this.range.seconds, this.origin, ...this.lanes.map((lane) => [lane.top, lane.rowHeight])].join();
    const height = this.height + AXIS;
    setAll(this.drawing, {width, height});
    setAll(this.clip, {x: LABELS, width: width - LABELS - RIGHT, height});
    this.drawLanes();
    this.drawStretches();
    this.move();
    const left = this.answer.left_out;
    say(byId("timeline-note"), left ? `${plural(left, "older bar")} left out` : "");
  }

  /** Set the position of each lane and its rows; the more rows, the lower each. */
  layOut() {
    let top = 0;
    this.lanes = this.answer.lanes.map((lane) => {
      const rows = Math.max(1, lane.rows);
      const rowHeight = rows === 1 ? 20 : Math.max(7, Math.min(18, 120 / rows));
      const place = {...lane, top, rowHeight, height: rows * rowHeight + 6};
      top += place.height;
      return place;
    });
    this.height = top;
  }

  drawLanes() {
    const key = (lane) => lane.device ?? lane.label;
    keep(this.layers.backs, this.lanes, key, () => svg("rect", {x: LABELS, class: "lane", rx: 3}), (node, lane) => {
      setAll(node, {y: lane.top + 1.5, height: lane.height - 3, width: this.width - LABELS - RIGHT});
    });
    keep(this.layers.labels, this.lanes, key, () => svg("text", {x: 0, class: "lanelabel"}), (node, lane) => {
      set(node, "y", lane.top + lane.height / 2 + 4);
      say(node, lane.label);
    });
  }

  drawStretches() {
    const {moving} = this.layers;
    const shown = this.answer.stretches.filter((each) => this.lanes[each.lane]);
    const key = (each) => `${each.job}.${each.attempt}.${each.lane}.${each.from}`;
    keep(moving, shown, key, makeStretch, (node, each) => this.place(node, each));
    if (!moving.querySelector("[tabindex=\"0\"]"))
      set(moving.lastElementChild ?? moving, "tabindex", moving.lastElementChild ? 0 : null);
  }

  x(when) {
    return this.width - RIGHT - (this.origin - when) * this.perSecond;
  }

  place(node, stretch) {
    const lane = this.lanes[stretch.lane];
    // Text is the slowest to draw, and most labels are unchanged.
    const isOther = !node.stretch || node.stretch.until !== stretch.until || node.stretch.state !== stretch.state;
    if (!isOther && node.layout === this.layout && stretch.until !== null) return;
    node.stretch = stretch;
    node.layout = this.layout;
    set(node, "data-tone", attemptTone(stretch.outcome, stretch.state));
    if (isOther) set(node, "aria-label", describe(stretch, this.now()).join(", "));
    const height = lane.rowHeight - 2;
    const y = lane.top + 4 + Math.min(stretch.row, lane.rows - 1) * lane.rowHeight;
    const [box, suspended] = node.children;
    setAll(box, {y, height});
    node.middle = y + height / 2 + 3.5;
    const makePeriod = () => svg("rect", {class: "suspended"});
    if (stretch.suspended.length)
      keep(suspended, stretch.suspended, ([from]) => from, makePeriod, (each) => setAll(each, {y, height}));
    this.stretchTo(node, this.now());
  }

  /** Set the start and width of a bar; those of an ended bar never change. */
  stretchTo(node, now) {
    const {stretch} = node;
    const [box, suspended] = node.children;
    const from = this.x(stretch.from);
    const width = Math.max(2, this.x(stretch.until ?? now) - from);
    setAll(box, {x: from.toFixed(1), width: width.toFixed(1)});
    [...suspended.children].forEach((each, place) => {
      const [begin, end] = stretch.suspended[place];
      const long = Math.max(1, this.x(end ?? now) - this.x(begin));
      setAll(each, {x: this.x(begin).toFixed(1), width: long.toFixed(1)});
    });
    this.label(node, from, width);
  }

  /** Show its label if the bar is wide enough; text is the slowest to draw. */
  label(node, from, width) {
    const seen = Math.max(from, LABELS + (this.moved ?? 0));
    const letters = Math.floor((from + width - seen - 8) / CHARACTER_WIDTH);
    const isShown = letters > 2 && this.lanes[node.stretch.lane].rowHeight > 11;
    let text = node.querySelector("text");
    if (!isShown) return text?.remove();
    text ??= node.appendChild(svg("text"));
    setAll(text, {x: (seen + 5).toFixed(1), y: node.middle});
    say(text, (node.stretch.name || String(node.stretch.job)).slice(0, letters));
  }

  /** Advance the time: move all bars left, and extend running ones. */
  move() {
    if (!this.answer || document.hidden || !this.width || !this.isOpen || byId("view-overview").hidden) return;
    const now = this.edge;
    if (isOutgrown(this.range, now)) return this.draw();
    this.moved = (now - this.origin) * this.perSecond;
    set(this.layers.moving, "transform", `translate(${(-this.moved).toFixed(1)} 0)`);
    for (const node of this.layers.moving.children)
      if (node.stretch.until === null) this.stretchTo(node, now);
    this.drawTicks(now);
  }

  drawTicks(now) {
    const every = TICKS.find((each) => each * this.perSecond >= TICK_WIDTH) ?? TICKS.at(-1);
    const times = [];
    for (let at = Math.ceil((now - this.range.seconds) / every) * every; at <= now; at += every) times.push(at);
    const format = every < 60 ? clock : clockShort;
    keep(this.layers.ticks, times, (at) => `${format.name} ${at}`, (at) => makeTick(format(at * 1000)), (node, at) => {
      const x = (this.x(at) - this.moved).toFixed(1);
      const [line, text] = node.children;
      setAll(line, {x1: x, x2: x, y2: this.height});
      setAll(text, {x, y: this.height + 15, "text-anchor": "middle"});
      text.style.visibility = this.width - x < 18 ? "hidden" : "";
    });
  }

  tip(node) {
    if (node.stretch) showTip(node.firstChild, describe(node.stretch, this.now()));
  }

  /** One Tab stop; arrow keys move from job to job. */
  onKey(event) {
    const node = event.target.closest("[data-job]");
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!node || (!step && event.key !== "Enter")) return;
    event.preventDefault();
    event.stopPropagation();
    if (!step) return open(node);
    const all = [...node.parentNode.children];
    const next = all[all.indexOf(node) + step];
    if (!next) return;
    set(node, "tabindex", -1);
    set(next, "tabindex", 0);
    next.focus();
  }
}

/** A time on the axis. */
const makeTick = (text) => svg("g", {}, svg("line", {y1: 0}), svg("text", {text}));

/** One run of a job in the timeline. */
function makeStretch(stretch) {
  const attributes = {class: "stretch", role: "link", tabindex: -1, "data-job": stretch.job};
  return svg("g", attributes, svg("rect", {rx: 3, class: "body"}), svg("g"));
}

function open(node) {
  if (node) window.location.hash = `#/job/${node.dataset.job}`;
}

/** The lines of the tooltip of a bar. */
function describe(stretch, now) {
  const until = stretch.until ?? now;
  const how = stretch.outcome?.replaceAll("-", " ") ?? stretch.state;
  const end = stretch.until === null ? "now" : clock(stretch.until * 1000);
  const attempt = stretch.attempt > 1 ? `, attempt ${stretch.attempt}` : "";
  const parked = stretch.suspended.reduce((sum, [from, to]) => sum + (to ?? now) - from, 0);
  return [
    `${stretch.name ? `${stretch.name} · ` : ""}job ${stretch.job}${attempt}`,
    `${how}${stretch.reserved_mb ? `, ${memory(stretch.reserved_mb)} reserved` : ""}`,
    `${clock(stretch.from * 1000)} – ${end}, ${duration(until - stretch.from)}`,
    ...(parked >= 1 ? [`suspended for ${duration(parked)}`] : []),
    ...(stretch.name ? [] : [stretch.command]),
  ].filter(Boolean);
}
