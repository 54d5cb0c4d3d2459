/** Running durations, counted in the browser from the last answer, by a clock that is never set. */

import {say} from "./dom.js";
import {duration} from "./format.js";

const ticking = new Set();

/** Set the duration of an element; a running one is counted on from there. */
export function setElapsed(node, seconds, goesOn) {
  if (goesOn && seconds !== null) {
    const since = performance.now() - 1000 * seconds;
    // Answers arrive with varying delay: keep the display from jumping back by a second.
    if (!(Math.abs(node.since - since) < 900)) node.since = since;
    ticking.add(node);
    show(node);
  } else {
    ticking.delete(node);
    say(node, duration(seconds));
  }
}

const show = (node) => say(node, duration((performance.now() - node.since) / 1000));

function tick() {
  if (document.hidden) return;
  for (const node of ticking) {
    if (node.isConnected)
      show(node);
    else
      ticking.delete(node);
  }
}

setInterval(tick, 1000);
