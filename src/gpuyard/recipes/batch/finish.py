"""What comes after a batch's last run, as a job of the queue: empty runs are pruned, and a summary is written.

It can be done again at any time, and comes to the same end: what was moved before is found in the record of that.
"""

import contextlib
import json
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.core.snapshot_json import iso_time
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.recipes.batch.plan import (
    PRUNED,
    RUNS,
    SUCCEEDED,
    SUMMARY,
    BatchRecord,
    read_record,
    results,
    run_folder,
    standing_of,
)
from gpuyard.recipes.batch.prune_empty_runs import read_record as read_pruned
from gpuyard.recipes.batch.run_results import THERE, RunResult, fates_of
from gpuyard.system.atomic_files import write_whole
from gpuyard.system.clock import SystemClock

# As simulators say it: `frames: 120`, `frames=120`, `"frames": 120`, `120 frames`.
_FRAMES = re.compile(r"\bframes\b[\"']?\s*[:=]\s*(\d+)|\b(\d+) frames\b", re.IGNORECASE)
_TAIL_BYTES = 64 * 1024


class Summary(Struct, frozen=True, kw_only=True):
    """How a batch came out. `frames` is what its runs reported, `None` where none did; `kept` runs have data, in
    `kept_in`; both are `None` where nothing is pruned. `left` are empty runs that could not be moved, and why;
    `unknown` are bounds that were not enforced."""

    name: str
    command: tuple[str, ...]
    root: str
    runs: int
    succeeded: int
    failed: int
    cancelled: int
    pruned: int
    attempts: int
    frames: int | None
    waits_s: dict[str, float]
    unknown: tuple[str, ...]
    started_at: str | None
    ended_at: str | None
    seconds: float | None
    failures: tuple[dict[str, Any], ...]
    left: tuple[dict[str, str], ...]
    kept: int | None = None
    kept_in: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.succeeded == self.runs


def finish(root: Path) -> Summary:
    record = read_record(root)
    if record is None:
        raise EnvironmentFault(f"there is no batch in {root}", hint="it was there when the batch began")
    found = results(record)
    runs = [found[index] for index in sorted(found)]
    for run in runs:
        run["frames"] = _frames(run["log"]) if run.get("frames") is None else run["frames"]
    keeps, fates = fates_of(record.plan, runs, read_pruned(root / PRUNED), _now())
    for run, fate in zip(runs, fates, strict=True):
        run |= {"kept_in": fate.kept_in, "pruned_to": fate.pruned_to}
    write_whole(root / RUNS, "".join(f"{json.dumps(run)}\n" for run in runs).encode())
    summary = _summary(record, runs, keeps, fates)
    write_whole(root / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)))
    return summary


def read_summary(root: Path) -> Summary | None:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode((root / SUMMARY).read_bytes(), type=Summary)
    return None


def _now() -> str:
    return str(iso_time(SystemClock().now()))


def _frames(log: str | None) -> int | None:
    """The last that it said."""
    try:
        with open(log or "", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            told = _FRAMES.findall(file.read().decode(errors="replace"))
    except OSError:
        return None
    return int(next(filter(None, told[-1]))) if told else None


def _summary(record: BatchRecord, runs: list[dict[str, Any]], keeps: str, fates: list[RunResult]) -> Summary:
    plan = record.plan
    left = [
        {"run": run_folder(plan, run["index"]).name, "why": fate.left}
        for run, fate in zip(runs, fates, strict=True)
        if fate.left is not None
    ]
    waits, unknown = _waits(record)
    frames = [run["frames"] for run in runs if run["frames"] is not None]
    started = min((run["submitted_at"] for run in runs), default=None)
    ended = max((run["ended_at"] for run in runs if run["ended_at"]), default=None)
    bad = [run for run in runs if run["state"] != SUCCEEDED]
    return Summary(
        name=plan.name,
        command=plan.command,
        root=plan.root,
        runs=plan.count,
        succeeded=len(runs) - len(bad),
        failed=sum(run["state"] in ("failed", "rejected") for run in bad),
        cancelled=sum(run["state"] == "cancelled" for run in bad),
        pruned=sum(fate.pruned_to is not None for fate in fates),
        kept=None if plan.prunes is None else sum(fate.kept_in is not None for fate in fates),
        kept_in=None if plan.prunes is None else plan.pruned_root if keeps == THERE else plan.root,
        attempts=sum(run["attempts"] for run in runs),
        frames=sum(frames) if frames else None,
        waits_s=waits,
        unknown=unknown,
        started_at=started,
        ended_at=ended,
        seconds=_between(started, ended),
        failures=tuple({name: run[name] for name in ("index", "seed", "id", "state", "reason", "log")} for run in bad),
        left=tuple(left),
    )


def _between(started: str | None, ended: str | None) -> float | None:
    if started is None or ended is None:
        return None
    return round((datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds(), 3)


def _waits(record: BatchRecord) -> tuple[dict[str, float], tuple[str, ...]]:
    """Over all its parts that the queue still knows."""
    waits: dict[str, float] = {}
    unknown: dict[str, None] = {}
    for part in record.parts:
        standing = standing_of(part) if part.first is not None else None
        for gate, seconds in (standing or {}).get("waits_s", {}).items():
            waits[gate] = round(waits.get(gate, 0.0) + seconds, 3)
        unknown |= dict.fromkeys((standing or {}).get("unknown", ()))
    return waits, tuple(unknown)


def main() -> None:
    try:
        summary = finish(Path(sys.argv[1]))
    except GpuyardError as error:
        sys.exit(f"gpuyard: {error}")
    sys.stdout.write(f"{summary.succeeded} of {summary.runs} runs succeeded, {summary.pruned} pruned\n")


if __name__ == "__main__":
    main()
