/** Times that go on: shown by the second from what was told last, without asking again. */

import {el, say} from "./dom.js";
import {duration} from "./format.js";

const ticking = new Set();
const listeners = new Set();

/** A duration that may go on. */
export const elapsed = () => el("span", {class: "number"});

/** `seconds` as they were told just now; one that goes on is counted from there. */
export function setElapsed(node, seconds, goesOn) {
  if (goesOn && seconds !== null) {
    const since = Date.now() - 1000 * seconds;
    // A stream's answers come a little late, each by another bit: a second must not be shown twice for it.
    if (!(Math.abs(node.since - since) < 900)) node.since = since;
    ticking.add(node);
    show(node);
  } else {
    ticking.delete(node);
    say(node, duration(seconds));
  }
}

/** Called each second while the page is looked at. */
export const eachSecond = (listener) => listeners.add(listener);

const show = (node) => say(node, duration((Date.now() - node.since) / 1000));

function tick() {
  if (document.hidden) return;
  for (const node of ticking) {
    if (node.isConnected)
      show(node);
    else
      ticking.delete(node);
  }
  for (const listener of listeners) listener();
}

setInterval(tick, 1000);
