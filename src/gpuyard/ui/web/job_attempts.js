/** The attempts of a job, the last one first, and how each ended. */

import {setElapsed} from "./clock.js";
import {el, keep, number, say, sayMessage, set} from "./dom.js";
import {UNKNOWN, clock, energy, memory} from "./format.js";
import {makeSection} from "./section.js";
import {attemptTone} from "./states.js";

const COLUMNS = ["Attempt", "Outcome", "Where", "Started", "Ran", "Reserved", "Peak", "Energy", "Details"];

export function attemptsSection() {
  const rows = el("tbody");
  const head = el("tr", {}, COLUMNS.map((word) => el("th", {scope: "col", text: word})));
  const table = el("table", {class: "attempts"}, el("thead", {}, head), rows);
  const node = makeSection("Attempts", "attempts-title", table);
  const show = (job) => {
    node.hidden = !job.attempts.length;
    keep(rows, [...job.attempts].reverse(), (attempt) => attempt.number, makeAttempt, updateAttempt);
  };
  return {node, show};
}

function makeAttempt() {
  const row = el("tr");
  row.values = COLUMNS.map((word) => row.appendChild(el("td", {"data-label": word})));
  row.values[4].append(number());
  return row;
}

function updateAttempt(row, attempt) {
  const [which, outcome, where, started, ran, reserved, peak, used, details] = row.values;
  say(which, attempt.number);
  say(outcome, attempt.outcome?.replaceAll("-", " ") ?? (attempt.parked ? "suspended" : "running"));
  set(outcome, "data-tone", attemptTone(attempt.outcome, attempt.parked ? "suspended" : "running"));
  say(where, attempt.place ?? (attempt.devices.join(", ") || "no GPU"));
  say(started, clock(attempt.started_at));
  setElapsed(ran.firstChild, attempt.ran_s, attempt.ended_at === null && !attempt.parked);
  say(reserved, attempt.reserved_mb === null ? "alone" : memory(attempt.reserved_mb));
  const peaks = Object.values(attempt.peaks_mb);
  say(peak, peaks.length ? memory(Math.max(...peaks)) : UNKNOWN);
  say(used, energy(attempt.energy));
  sayMessage(details, attemptDetails(attempt));
}

/** How an attempt ended, in words; for a lack of memory, who held it. */
export function attemptDetails(attempt) {
  const lack = attempt.lack;
  if (!lack) return attempt.reason ?? "";
  const others = lack.others.map((other) => `${other.who} held ${memory(other.memory_mb)}`).join(", ");
  const needed = lack.needed_mb && `it needed ${memory(lack.needed_mb)}`;
  return [(attempt.reason ?? lack.says)?.replace(/\.$/, ""), needed, others].filter(Boolean).join("; ");
}
