/** The code of a job: the commit, the script, and the snapshot that it runs in. */

export function codeFacts({code}) {
  if (!code) return [];
  const isGone = code.snapshot !== null && !code.snapshot_exists;
  return [
    ["Code", code.text],
    ["Script", code.script],
    ["Snapshot", isGone ? "removed" : code.snapshot],
  ];
}
