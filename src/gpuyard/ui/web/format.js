/** Figures and times as people read them. A dash is unknown, and never a zero. */

export const UNKNOWN = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function memory(mb) {
  if (!known(mb)) return UNKNOWN;
  if (mb < 1000) return `${Math.round(mb)} MB`;
  const gb = mb / 1024;
  return `${gb < 99.95 ? gb.toFixed(1) : Math.round(gb)} GB`;
}

/** As an option takes it: exact, and as short as it can be. */
export const asSize = (mb) => (known(mb) ? (mb % 1024 === 0 ? `${mb / 1024}G` : `${Math.round(mb)}M`) : "");

export const percent = (value) => (known(value) ? `${Math.round(value)}%` : UNKNOWN);

export function watts(value, limit) {
  if (!known(value)) return UNKNOWN;
  return known(limit) ? `${Math.round(value)} / ${Math.round(limit)} W` : `${Math.round(value)} W`;
}

export const degrees = (value) => (known(value) ? `${Math.round(value)} °C` : UNKNOWN);

export const count = (value) => (known(value) ? value.toLocaleString("en") : UNKNOWN);

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  const whole = Math.max(0, Math.floor(seconds));
  const [d, h, m, s] =
    [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  if (d) return `${d}d ${two(h)}h`;
  if (h) return `${h}h ${two(m)}m`;
  if (m) return `${m}m ${two(s)}s`;
  return `${s}s`;
}

/** As an option takes it. */
export const asTime = (seconds) => (known(seconds) ? `${Math.round(seconds)}s` : "");

// Made once: to make one takes longer than to use it a hundred times.
const TIME = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23"});
const TIME_SHORT = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});
const DAY = new Intl.DateTimeFormat([], {day: "numeric", month: "short"});

const today = () => new Date().toDateString();

/** The time of day, with the day where it is another one. */
export function clock(when) {
  if (when === null || when === undefined) return UNKNOWN;
  const date = new Date(when);
  return date.toDateString() === today() ? TIME.format(date) : `${DAY.format(date)} ${TIME.format(date)}`;
}

export const clockShort = (when) => TIME_SHORT.format(new Date(when));

/** A job as it is called: by its name, or by the program it runs. */
export const title = (job) => job.name || job.command || `job ${job.id}`;
