/** Recent measurements of each device: requested once, then extended by the event stream. */

import {get} from "./api.js";

const SERIES = ["own_mb", "others_mb", "foreign_mb", "used_mb", "utilization_percent", "power_w"];
export const SPANS = ["10m", "1h", "24h"];

/** RAM in use in MB; null if unknown. */
export function usedOf(host) {
  const isKnown = host.memory_total_mb !== null && host.memory_available_mb !== null;
  return isKnown ? host.memory_total_mb - host.memory_available_mb : null;
}

export class History {
  constructor(span) {
    this.span = span;
    this.spanS = 600;
    this.stepS = 2;
    this.devices = new Map();
    this.host = {at: [], cpu_percent: [], memory_used_mb: []};
    this.asked = 0;
  }

  /** Load a time range. Returns false if another one was requested meanwhile. */
  async load(span) {
    const asked = ++this.asked;
    const answer = await get(`/devices/history?span=${span}`);
    if (asked !== this.asked) return false;
    Object.assign(this, {span, spanS: answer.span_s, stepS: answer.step_s || 1, host: answer.host});
    this.devices = new Map(Object.entries(answer.devices));
    return true;
  }

  /** Add an answer of the stream about all devices. */
  add(answer, at) {
    for (const device of answer.devices) {
      const memory = device.memory ?? {};
      this.append(this.seriesOf(device.id), at, {
        own_mb: memory.own_used_mb,
        others_mb: memory.others_used_mb,
        foreign_mb: memory.foreign_mb,
        used_mb: device.memory_used_mb,
        utilization_percent: device.utilization_percent,
        power_w: device.power_draw_w,
      });
    }
    const {host} = answer;
    this.append(this.host, at, {cpu_percent: host.cpu_percent, memory_used_mb: usedOf(host)});
  }

  seriesOf(id) {
    if (!this.devices.has(id))
      this.devices.set(id, Object.fromEntries([["at", []], ...SERIES.map((name) => [name, []])]));
    return this.devices.get(id);
  }

  /** Keep at most one point per step, as the daemon does; the newest value is always the last point. */
  append(series, at, values) {
    const last = series.at.length - 1;
    const replaces = last > 0 && at - series.at[last - 1] < this.stepS;
    const place = replaces ? last : last + 1;
    series.at[place] = at;
    for (const [name, value] of Object.entries(values))
      if (series[name]) series[name][place] = value ?? null;
    while (series.at.length > 2 && series.at[1] < at - this.spanS)
      for (const list of Object.values(series)) list.shift();
  }

  /** The longest time without a point that is not drawn as a gap. */
  get longestGap() {
    return Math.max(4 * this.stepS, 10);
  }
}
