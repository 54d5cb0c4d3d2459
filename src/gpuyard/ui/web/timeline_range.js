/**
 * The time range of the timeline. "fit" shows all runs of the last 24 hours: from the first start until now, or until the
 * last end if nothing runs.
 */

export const SPANS = {"10m": 600, "1h": 3600, "6h": 21600, "24h": 86400};
export const FIT = "fit";

const LEAST_FIT_S = 60;
/** The part of a fitted range that stays empty before the first run and, if nothing runs, after the last. */
const MARGIN = 0.02;

/** The seconds that are shown, their end (null is now), and the first start in a fitted range that still grows. */
export function rangeOf(span, {stretches, from}, now) {
  if (span !== FIT) return {seconds: SPANS[span], end: null, first: null};
  if (!stretches.length) return {seconds: SPANS["1h"], end: null, first: null};
  const isLive = stretches.some((each) => each.until === null);
  const first = Math.max(from, Math.min(...stretches.map((each) => each.from)));
  const last = isLive ? now : Math.max(...stretches.map((each) => each.until));
  const seconds = Math.max(LEAST_FIT_S, (last - first) * (1 + 2 * MARGIN));
  return {seconds, end: isLive ? null : last + seconds * MARGIN, first: isLive ? first : null};
}

/** Whether the first bar of a fitted range is about to leave it. */
export const isOutgrown = ({first, seconds}, now) =>
  first !== null && now - first > seconds && seconds < SPANS["24h"];

/** The shortest range to request that contains all of this one. */
export function spanFor({seconds, end}, now) {
  const ago = now - (end ?? now) + seconds;
  return Object.keys(SPANS).find((span) => SPANS[span] > 1.1 * ago) ?? "24h";
}
