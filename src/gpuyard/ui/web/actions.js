/** Actions on jobs: confirm if they affect many, request, and show the result. */

import {askPriority, confirm, note, noteRefusal} from "./dialogs.js";
import {button} from "./dom.js";
import {count, plural} from "./format.js";
import {ACTS} from "./states.js";
import {post} from "./api.js";

/** Up to this many jobs are changed without a confirmation, except for cancelling. */
const SOME = 50;
const CANCELLING = ["Running jobs are stopped, and waiting ones will not start.", "danger"];

/** The word on a button; `many` is the number of jobs if the action applies to some of the selected jobs only. */
export function actWord(verb, many = null) {
  const {word} = ACTS[verb];
  if (many === null) return word;
  return word.endsWith("…") ? `${word.slice(0, -1)} ${count(many)}…` : `${word} ${count(many)}`;
}

export const actButton = (verb, onclick) => button(ACTS[verb].word, onclick, verb === "cancel" ? "danger" : null);

/** `which` is `{ids}` or `{where}`; `many` is the number of jobs. Returns whether a job was changed. */
export async function act(verb, which, many, priority = 0) {
  const more = verb === "priority" ? {priority: await askPriority(priority)} : {};
  if (more.priority === null || !(await isConfirmed(verb, many))) return false;
  return request(`/jobs/${verb}`, {...which, ...more}, (answer) => showResult(verb, answer));
}

export const unpause = () => request("/unpause", {}, () => note("Jobs start again"));

/** Returns whether the daemon accepted the request; shows the reason if not. */
async function request(path, body, show) {
  try {
    show(await post(path, body));
    return true;
  } catch (error) {
    noteRefusal(error);
    return false;
  }
}

async function isConfirmed(verb, many) {
  if (many < 2 || (verb !== "cancel" && many <= SOME)) return true;
  const word = ACTS[verb].word.replace("…", "");
  const [text, kind] = verb === "cancel" ? CANCELLING : ["It applies to all matching jobs, on every page.", "primary"];
  return confirm(`${word} ${plural(many, "job")}?`, text, `${word} ${count(many)}`, kind);
}

function showResult(verb, answer) {
  const left = answer.unchanged_count;
  const reasons = [...new Set(answer.unchanged.map((each) => each.reason))].slice(0, 3);
  const revived = answer.revived_count ? `${plural(answer.revived_count, "skipped job")} waiting again` : "";
  const why = [revived, left ? `${plural(left, "job")} unchanged: ${reasons.join("; ")}` : ""].filter(Boolean).join("; ");
  if (answer.count)
    note(`${answer.count === 1 ? `Job ${answer.changed}` : plural(answer.count, "job")} ${ACTS[verb].done}`, why);
  else
    note("No job changed", why, Boolean(left));
}
