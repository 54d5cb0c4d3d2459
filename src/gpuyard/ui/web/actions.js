/** Actions on jobs: confirm if they affect many, request, and show the result. */

import {askPriority, decide, note, noteRefusal} from "./dialogs.js";
import {button, el} from "./dom.js";
import {count, plural, title} from "./format.js";
import {countIn} from "./selection.js";
import {NAME_END, makeShortened, sayShortened} from "./shortened.js";
import {ACTS} from "./states.js";
import {keyOf} from "./sweep.js";
import {post} from "./api.js";

/** Up to this many jobs are changed without a confirmation, except for cancelling. */
const SOME = 50;
const CANCELLING = "Running jobs are stopped, and waiting ones will not start.";
/** The most jobs that a confirmation names. */
const MOST_NAMED = 6;

/** The word on a button; `many` is the number of jobs if the action applies to some of the selected jobs only. */
export function actWord(verb, many = null) {
  const {word} = ACTS[verb];
  if (many === null) return word;
  return word.endsWith("…") ? `${word.slice(0, -1)} ${count(many)}…` : `${word} ${count(many)}`;
}

export const actButton = (verb, onclick) => button(ACTS[verb].word, onclick, verb === "cancel" ? "danger" : null);

/**
 * `which` is `{ids}` or `{where}`; `many` is the number of jobs, and `rows` are some or all of them, which a confirmation
 * names. Returns whether the daemon did it.
 */
export async function act(verb, which, many, {rows = [], priority = 0} = {}) {
  const more = verb === "priority" ? {priority: await askPriority(priority)} : {};
  if (more.priority === null || !(await isConfirmed(verb, many, rows))) return false;
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

async function isConfirmed(verb, many, rows) {
  if (many < 2 || (verb !== "cancel" && many <= SOME)) return true;
  const word = ACTS[verb].word.replace("…", "");
  const [text, kind] = verb === "cancel" ? [CANCELLING, "danger"] : ["", "primary"];
  const body = [listOf(verb, many, rows), el("p", {text})];
  return decide(`${word} ${plural(many, "job")}?`, body, `${word} ${count(many)}`, kind);
}

/** The first of these jobs by id and name, and how many more there are. */
function listOf(verb, many, rows) {
  const named = rows.slice(0, MOST_NAMED);
  const rest = many - named.reduce((all, job) => all + countIn(job, verb), 0);
  const items = named.map((job) => {
    const jobs = job.group ? ` (${plural(countIn(job, verb), "job")})` : "";
    const item = makeShortened("li");
    sayShortened(item, `${keyOf(job)} ${title(job)}${jobs}`, NAME_END + jobs.length);
    return item;
  });
  return el("ul", {}, items, named.length > 0 && rest > 0 && el("li", {text: `and ${count(rest)} more`}));
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
