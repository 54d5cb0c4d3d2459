/** How a job ended: the error line, and below it the attempt that it comes from. */

import {el, sayMessage, set} from "./dom.js";
import {clock, duration} from "./format.js";
import {attemptDetails} from "./job_attempts.js";
import {FINISHED, toneOf} from "./states.js";

export function resultSection() {
  const [line, details] = [el("p", {class: "errorline"}), el("p", {class: "hint"})];
  const node = el("section", {class: "panel result", "aria-label": "Result", hidden: true}, line, details);
  const show = (job) => {
    node.hidden = !FINISHED.has(job.state) || job.state === "succeeded";
    set(node, "data-tone", toneOf(job.state));
    sayMessage(line, job.reason || job.state);
    sayMessage(details, detailsOf(job));
  };
  return {node, show};
}

/** When and where the last attempt ended, and what it says beyond the error line. */
function detailsOf(job) {
  const attempt = job.attempts.at(-1);
  if (!attempt) return job.ended_at ? `at ${clock(job.ended_at)}, before it started` : "";
  const labels = attempt.devices.map((device) => job.device_labels[device] ?? device);
  const where = attempt.place ?? (labels.length ? `on GPU ${labels.join(", ")}` : "without a GPU");
  const status = attempt.status === null ? "" : `exit status ${attempt.status}`;
  const more = attemptDetails(attempt);
  const parts = [
    `attempt ${attempt.number} ${where}`,
    `ended at ${clock(attempt.ended_at)} after ${duration(attempt.ran_s)}`,
    job.reason === status ? "" : status,
    more === job.reason || more === status ? "" : more,
  ];
  return parts.filter(Boolean).join(" · ");
}
