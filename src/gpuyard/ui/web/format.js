/** Sizes, durations, counts and times as text. Unknown is a dash, never a zero. */

export const UNKNOWN = "–";

export const isKnown = Number.isFinite;

const oneDecimal = (value) => value.toFixed(1).replace(/\.0$/, "");

/** `512 MB`, `13.8 GB` or `24 GB`, as `model/units.format_size` writes it. */
export function memory(mb) {
  if (!isKnown(mb)) return UNKNOWN;
  if (mb >= 1024) return `${oneDecimal(mb / 1024)} GB`;
  return `${mb >= 9.95 ? Math.round(mb) : oneDecimal(mb)} MB`;
}

/** A size as --vram takes it: exact, and as short as possible. */
export const asSize = (mb) => (isKnown(mb) ? (mb % 1024 === 0 ? `${mb / 1024}G` : `${Math.round(mb)}M`) : "");

export const percent = (value) => (isKnown(value) ? `${Math.round(value)}%` : UNKNOWN);

export function watts(value, limit) {
  if (!isKnown(value)) return UNKNOWN;
  return isKnown(limit) ? `${Math.round(value)} / ${Math.round(limit)} W` : `${Math.round(value)} W`;
}

/** The energy of a job, its cost and its CO2e: `0.42 kWh (0.13 EUR, 147 g CO2e)`. */
export function energy(used) {
  if (!used) return UNKNOWN;
  const {joules, kwh, cost, currency, co2e_g: grams} = used;
  const amount = joules < 1000 ? `${Math.round(joules)} J` : `${(joules / 1000).toFixed(1)} kJ`;
  const costs = [
    isKnown(cost) && `${cost < 0.01 ? cost.toFixed(4) : cost.toFixed(2)} ${currency}`,
    isKnown(grams) && (grams < 1000 ? `${Number(grams.toPrecision(3))} g CO2e` : `${(grams / 1000).toFixed(1)} kg CO2e`),
  ].filter(Boolean);
  return `${kwh < 0.01 ? amount : `${kwh.toFixed(2)} kWh`}${costs.length ? ` (${costs.join(", ")})` : ""}`;
}

export const degrees = (value) => (isKnown(value) ? `${Math.round(value)} °C` : UNKNOWN);

export const count = (value) => (isKnown(value) ? value.toLocaleString("en") : UNKNOWN);

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

/** The two largest units that are not 0, as `model/units.format_duration` writes them. */
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.floor(seconds));
  for (const [unit, below, size, part] of [["d", "h", 86400, 3600], ["h", "m", 3600, 60], ["m", "s", 60, 1]]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / part);
    return rest ? `${Math.floor(whole / size)}${unit} ${rest}${below}` : `${Math.floor(whole / size)}${unit}`;
  }
  return `${whole}s`;
}

/** A duration as --time-limit takes it. */
export const asTime = (seconds) => (isKnown(seconds) ? `${Math.round(seconds)}s` : "");

// Created once: creating a formatter takes longer than using it a hundred times.
const TIME = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
const TIME_SHORT = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
const WEEKDAY = new Intl.DateTimeFormat("en", {weekday: "short", day: "numeric", month: "short"});
const DAY = new Intl.DateTimeFormat([], {day: "numeric", month: "short"});

const today = () => new Date().toDateString();

/** The time of day, with the date if it is not today. */
export function clock(when) {
  if (when === null || when === undefined) return UNKNOWN;
  const date = new Date(when);
  return date.toDateString() === today() ? TIME.format(date) : `${DAY.format(date)} ${TIME.format(date)}`;
}

/** The time of day in minutes, with the weekday if it is not today. */
export const clockDay = (when) => {
  const date = new Date(when);
  return date.toDateString() === today() ? TIME_SHORT.format(date) : `${WEEKDAY.format(date)} ${TIME_SHORT.format(date)}`;
};

export const clockShort = (when) => TIME_SHORT.format(new Date(when));

/** The name of a job, or its command. */
export const title = (job) =>
  (job.name ? `${job.name} ${varying(job)}` : `${varying(job)} ${job.command ?? ""}`).trim() || `job ${job.id}`;

/** The values that tell a job from the others of its sweep, such as `lr=1e-3`. */
const varying = (job) =>
  (job.varies ?? []).filter((name) => name in job.values).map((name) => `${name}=${job.values[name]}`).join(" ");
