/** Actions on jobs: confirm if they affect many, request, and show the result. */

import {askPriority, confirm, note, noteRefusal} from "./dialogs.js";
import {count, plural} from "./format.js";
import {ACTS} from "./states.js";
import {post} from "./api.js";

/** Up to this many jobs are changed without a confirmation, except for cancelling. */
const SOME = 50;
const CANCELLING = ["Running jobs are stopped, and waiting ones will not start.", "danger"];
const DONE = {
  cancel: "cancelled",
  hold: "held",
  release: "released",
  retry: "queued again",
  suspend: "being suspended",
  resume: "will resume when memory is free",
  priority: "moved",
};

/** `which` is `{ids}` or `{where}`; `many` is the number of jobs. Returns whether a job was changed. */
export async function act(verb, which, many, priority = 0) {
  const more = verb === "priority" ? await askPriority(priority) : null;
  if (verb === "priority" && more === null) return false;
  if (!(await isConfirmed(verb, many))) return false;
  try {
    showResult(verb, await post(`/jobs/${verb}`, more === null ? which : {...which, priority: more}));
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
  const why = left ? `${plural(left, "job")} unchanged: ${reasons.join("; ")}` : "";
  if (answer.count)
    note(`${answer.count === 1 ? `Job ${answer.changed}` : plural(answer.count, "job")} ${DONE[verb]}`, why);
  else
    note("No job changed", why, Boolean(left));
}

export async function unpause() {
  try {
    await post("/unpause");
    note("Jobs start again");
  } catch (error) {
    noteRefusal(error);
  }
}
