/** Why a job waits, as lines: each different reason once, with all GPUs that it holds for; then what changes it. */

export function whyLines({reasons, device_labels: labels}) {
  const places = new Map();
  for (const {device_id: device, text} of reasons) {
    if (!places.has(text)) places.set(text, []);
    if (device) places.get(text).push(labels[device] ?? device);
  }
  const lines = [...places].map(([text, at]) => (at.length ? `GPU ${at.join(", ")}: ${text}` : text));
  const remedies = reasons.filter(({remedy}) => remedy).map(({remedy}) => `To change that: ${remedy}`);
  return [...lines, ...new Set(remedies)];
}
