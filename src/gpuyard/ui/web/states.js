/** Job states: each has an icon, a word and a colour, so that no state depends on colour alone. */

import {el, say, set, svg} from "./dom.js";

const PLAY = "M4.5 3v10l8-5z";
const PAUSE = "M5 3.5v9M11 3.5v9";
const CROSS = "M4 4l8 8M12 4l-8 8";
const CIRCLE = "M8 3.2a4.8 4.8 0 1 0 .01 0z";

/** By state: the path of its icon, whether it is filled, and its tone. In display order. */
const APPEARANCE = {
  running: [PLAY, true, "live"],
  stopping: ["M4 4h8v8H4z", true, "live"],
  resuming: [PLAY, false, "live"],
  pending: ["M3 8h9M8.5 4.5L12 8l-3.5 3.5", false, "live"],
  suspending: [PAUSE, false, "parked"],
  suspended: [PAUSE, false, "parked"],
  queued: [CIRCLE, false, "waiting"],
  delayed: [`${CIRCLE}M8 5.5V8l2 1.4`, false, "waiting"],
  blocked: ["M3 8h4M9 8h4M8 3.5v9", false, "waiting"],
  held: ["M4 4h8v8H4z", false, "held"],
  succeeded: ["M3.2 8.4l3.2 3.2 6.4-7", false, "good"],
  failed: [CROSS, false, "bad"],
  rejected: ["M8 3.5v5.5M8 12.2v.3", false, "bad"],
  cancelled: ["M3.5 8h9", false, "over"],
};

export const STATES = Object.keys(APPEARANCE);
export const FINISHED = new Set(["succeeded", "failed", "cancelled", "rejected"]);
/** States in which the run time or the waiting time of a job advances. */
export const TIMED = new Set(["running", "stopping", "queued", "held", "blocked", "delayed"]);

/** Actions: the word on the button, the word for its result, and the states in which the lifecycle allows it. */
export const ACTS = {
  cancel: {word: "Cancel", done: "cancelled", may: (state) => !FINISHED.has(state) && state !== "stopping"},
  hold: {word: "Hold", done: "held", may: (state) => ["queued", "blocked", "delayed", "pending"].includes(state)},
  release: {word: "Release", done: "released", may: (state) => state === "held"},
  retry: {word: "Retry", done: "queued again", may: (state) => FINISHED.has(state)},
  suspend: {word: "Suspend", done: "being suspended", may: (state) => state === "running"},
  resume: {word: "Resume", done: "will resume when memory is free", may: (state) => state === "suspended"},
  priority: {word: "Priority…", done: "moved", may: (state) => !FINISHED.has(state)},
};

/** All other outcomes are bad. */
const OUTCOME_TONES =
  {succeeded: "good", cancelled: "over", preempted: "parked", "never-started": "over", "out-of-memory": "oom"};

export const toneOf = (state) => APPEARANCE[state]?.[2] ?? "over";

/** The tone of an attempt's outcome or, while it runs, of its state. */
export const attemptTone = (outcome, state) => (outcome ? (OUTCOME_TONES[outcome] ?? "bad") : toneOf(state));

const makeIcon = () => svg("svg", {class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true"}, svg("path"));

function setIcon(node, state) {
  const [path, isFilled] = APPEARANCE[state] ?? APPEARANCE.cancelled;
  set(node.firstChild, "d", path);
  set(node, "data-filled", isFilled);
  return node;
}

export const icon = (state) => setIcon(makeIcon(), state);

/** An icon and a word. */
export const stateChip = () => el("span", {class: "state"}, makeIcon(), el("span"));

export function setState(node, state, word) {
  set(node, "data-tone", toneOf(state));
  setIcon(node.firstChild, state);
  say(node.lastChild, word);
}

export const stateWord = (job) => job.state;
