/**
 * The log of a job, followed live. Escape sequences are dropped. A line that was overwritten, as by a progress bar, is
 * shown as on a terminal. Only the last lines are kept. Standard error that has a file of its own has another colour.
 * Addresses of web pages are links.
 */

import {button, el, printable, say, sayMessage} from "./dom.js";
import {Stream} from "./api.js";

const MOST_LINES = 5000;
const LONGEST_LINE = 20000;
const MOST_CHARACTERS = 2000000;
const TAIL_BYTES = 262144;
// What moves the cursor or erases, and other escape sequences: colours (CSI), titles (OSC), a single letter.
const PARTS = /(\r|\x08|\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]P^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-OQ-Z\\]))/;
const MOVES = /[\r\x08]|\x1b\[[012]?K/;
const CONTROLS = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/g;

// An address ends before a space, quote or bracket, and before punctuation; round brackets belong to it in pairs.
const ADDRESS = /(\bhttps?:\/\/(?:\([^\s()<>"'`]*\)|[^\s()<>"'`])*(?:\([^\s()<>"'`]*\)|[^\s()<>"'`.,;:!?\]}]))/i;

/** A line as a terminal would show it: the rule of model/terminal_line.py, without colours. */
export function asShown(line) {
  const {cells} = draw(line);
  return (MOVES.test(line) ? cells.replace(/ +$/, "") : cells).replace(CONTROLS, "");
}

/** The characters of a line on a terminal, and the place of the cursor. */
function draw(line) {
  let cells = "", at = 0;
  for (const part of line.split(PARTS)) {
    if (part === "\r") at = 0;
    else if (part === "\x08") at = Math.max(0, at - 1);
    else if (part === "\x1b[2K") cells = "";
    else if (part === "\x1b[1K") cells = cells.length > at + 1 ? " ".repeat(at + 1) + cells.slice(at + 1) : "";
    else if (part === "\x1b[K" || part === "\x1b[0K") cells = cells.slice(0, at);
    else if (!part.startsWith("\x1b")) {
      cells = cells.slice(0, at).padEnd(at) + part + cells.slice(at + part.length);
      at += part.length;
    }
  }
  return {cells, at};
}

export class Log {
  /** Follow the log from its last attempt on; with `attempt`, show that of this attempt alone. */
  constructor(jobId, attempt = null) {
    this.attempt = attempt;
    this.follows = true;
    this.lines = el("pre", {class: "log", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Log"});
    this.note = el("span", {class: "hint"});
    this.down = button("Follow ↓", () => this.toEnd(), "down");
    this.down.hidden = true;
    this.node = el("div", {class: "logbox"}, this.lines, this.down);
    this.lines.addEventListener("scroll", () => this.onScroll());
    this.clear();
    const chosen = attempt === null ? "" : `&attempt=${attempt}`;
    this.stream = new Stream(`/jobs/${jobId}/log/live?tail=${TAIL_BYTES}&stream=both${chosen}`, {
      onEvent: (event) => this.show(event),
      // The stream starts again with the tail of the log.
      onOpen: () => this.clear(),
      onBreak: () => say(this.note, "reconnecting"),
    });
  }

  clear() {
    this.lines.replaceChildren();
    this.unfinished = {stdout: {text: "", node: null}, stderr: {text: "", node: null}};
    this.characters = 0;
    say(this.note, "");
  }

  close() {
    this.stream.close();
  }

  show(event) {
    if (event.error) sayMessage(this.note, event.error);
    if (event.cut) this.separate("— output left out —");
    if (event.text) this.write(event.text, event.is_stderr ? "stderr" : "stdout");
    const isNext = Boolean(event.attempt) && this.attempt !== null && event.attempt !== this.attempt;
    if (event.attempt && !isNext && this.lines.childElementCount) this.separate(`— attempt ${event.attempt} —`);
    if (event.over || isNext) {
      this.isOver = true;
      this.stream.close();
      say(this.note, this.lines.childElementCount ? "ended" : "no output");
    } else
      say(this.note, "live");
  }

  /** Complete all lines, and add this one. */
  separate(line) {
    if (this.unfinished.stderr.text) this.write("\n", "stderr");
    this.write(`\n${line}\n`, "stdout");
  }

  /** Unfinished lines of both streams stay below all others. */
  write(text, stream = "stdout") {
    const raw = (this.unfinished[stream].text + text).split("\n");
    const lines = document.createDocumentFragment();
    this.unfinished[stream].text = cut(raw.pop());
    for (const line of raw.slice(-MOST_LINES)) lines.append(this.makeLine(cut(line), stream));
    for (const [name, last] of Object.entries(this.unfinished)) {
      this.drop(last.node);
      last.node = last.text ? this.makeLine(last.text, name) : null;
      if (last.node) lines.append(last.node);
    }
    this.lines.append(lines);
    while (this.lines.childElementCount > MOST_LINES || this.characters > MOST_CHARACTERS)
      this.drop(this.lines.firstChild);
    if (this.follows) this.lines.scrollTop = this.lines.scrollHeight;
  }

  makeLine(line, stream) {
    const parts = (asShown(line) || "\u200b").split(ADDRESS);
    const node = el("div", {class: stream}, parts.map((part, place) => (place % 2 ? makeLink(part) : printable(part))));
    this.characters += node.textContent.length;
    return node;
  }

  drop(node) {
    if (!node) return;
    this.characters -= node.textContent.length;
    node.remove();
  }

  onScroll() {
    const {scrollTop, scrollHeight, clientHeight} = this.lines;
    this.follows = scrollHeight - scrollTop - clientHeight < 24;
    this.down.hidden = this.follows;
  }

  toEnd() {
    this.lines.scrollTop = this.lines.scrollHeight;
    this.lines.focus();
  }
}

/** A link, which does not tell the other site where it was clicked. An address that no browser can open stays text. */
const makeLink = (text) =>
  (URL.canParse(text)
    ? el("a", {href: new URL(text).href, rel: "noopener noreferrer nofollow", target: "_blank", text})
    : printable(text));

/** Drop overwritten parts of a line that is long and may have no end yet. */
function cut(line) {
  if (line.length <= LONGEST_LINE) return line;
  const {cells, at} = draw(line);
  const short = at < cells.length ? `${cells}\r${cells.slice(0, at)}` : cells.padEnd(at);
  return short.slice(Math.max(0, short.length - LONGEST_LINE));
}
