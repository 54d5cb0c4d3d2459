/** Recent measurements of each device and of the host: requested once, then extended by the event stream. */

import {isKnown} from "./format.js";
import {get} from "./api.js";

/** The series that are drawn, and their values in an answer of the stream about a device, or about the host. */
const DEVICE_SERIES = {
  own_mb: (device) => device.memory?.own_used_mb,
  others_mb: (device) => device.memory?.others_used_mb,
  foreign_mb: (device) => device.memory?.foreign_mb,
  used_mb: (device) => device.memory_used_mb,
  utilization_percent: (device) => device.utilization_percent,
};
const HOST_SERIES = {cpu_percent: (host) => host.cpu_percent, memory_used_mb: usedOf};

/** RAM in use in MB; null if unknown. */
export function usedOf(host) {
  const {memory_total_mb: total, memory_available_mb: available} = host;
  return isKnown(total) && isKnown(available) ? total - available : null;
}

const makeSeries = (values) => Object.fromEntries(["at", ...Object.keys(values)].map((name) => [name, []]));

export class DeviceHistory {
  constructor(span) {
    this.span = span;
    this.spanS = 600;
    this.stepS = 2;
    this.devices = new Map();
    this.host = makeSeries(HOST_SERIES);
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
    for (const device of answer.devices) this.append(this.seriesOf(device.id), at, DEVICE_SERIES, device);
    this.append(this.host, at, HOST_SERIES, answer.host);
  }

  seriesOf(id) {
    if (!this.devices.has(id)) this.devices.set(id, makeSeries(DEVICE_SERIES));
    return this.devices.get(id);
  }

  /** Keep at most one point per step, as the daemon does; the newest value is always the last point. */
  append(series, at, values, source) {
    const last = series.at.length - 1;
    const replaces = last > 0 && at - series.at[last - 1] < this.stepS;
    const place = replaces ? last : last + 1;
    series.at[place] = at;
    for (const [name, valueOf] of Object.entries(values)) series[name][place] = valueOf(source) ?? null;
    while (series.at.length > 2 && series.at[1] < at - this.spanS)
      for (const list of Object.values(series)) list.shift();
  }
}
