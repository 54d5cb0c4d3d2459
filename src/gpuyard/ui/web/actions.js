/** What people do to jobs: asked for, confirmed where it is much, and told how it went. */

import {askPriority, confirm, note, noteRefusal} from "./dialogs.js";
import {count, plural} from "./format.js";
import {ACTS} from "./states.js";
import {post} from "./api.js";

/** So many are done without asking, but for cancelling. */
const SOME = 50;
const CANCELLING = ["Those that run are told to stop, and those that wait will not start.", "danger"];
const DONE = {
  cancel: "cancelled",
  hold: "held",
  release: "released",
  retry: "queued again",
  suspend: "being suspended",
  resume: "going on as soon as there is room",
  priority: "moved",
};

/** `which` is `{ids}` or `{where}`; `many` is how many that is. Whether anything was done. */
export async function act(verb, which, many, priority = 0) {
  const more = verb === "priority" ? await askPriority(priority) : null;
  if (verb === "priority" && more === null) return false;
  if (!(await isMeant(verb, many))) return false;
  try {
    tell(verb, await post(`/jobs/${verb}`, more === null ? which : {...which, priority: more}));
    return true;
  } catch (error) {
    noteRefusal(error);
    return false;
  }
}

async function isMeant(verb, many) {
  if (many < 2 || (verb !== "cancel" && many <= SOME)) return true;
  const word = ACTS[verb].word.replace("…", "");
  const [text, kind] = verb === "cancel" ? CANCELLING : ["It is done to all of them, on every page.", "primary"];
  return confirm(`${word} ${plural(many, "job")}?`, text, `${word} ${count(many)}`, kind);
}

function tell(verb, answer) {
  const left = answer.unchanged_count;
  const reasons = [...new Set(answer.unchanged.map((each) => each.reason))].slice(0, 3);
  const why = left ? `${plural(left, "job")} unchanged: ${reasons.join("; ")}` : "";
  if (answer.count)
    note(`${answer.count === 1 ? `Job ${answer.changed}` : plural(answer.count, "job")} ${DONE[verb]}`, why);
  else
    note("Nothing was changed", why, Boolean(left));
}

export async function unpause() {
  try {
    await post("/unpause");
    note("The queue goes on");
  } catch (error) {
    noteRefusal(error);
  }
}
