"""Finish a batch after its last run: prune empty runs and write a summary. This module runs as a job of the queue.

It can be repeated at any time with the same result: `pruned.jsonl` records the runs that were moved before.
"""

import contextlib
import json
import re
import sys
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.snapshot_json import iso_time
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.recipes.batch import plan as batch
from gpuyard.recipes.batch.plan import PRUNED, SUCCEEDED, BatchRecord, RunRecord, run_folder
from gpuyard.recipes.batch.prune_empty_runs import read_record as read_pruned
from gpuyard.recipes.batch.run_results import THERE, RunResults, classify_runs
from gpuyard.system.atomic_files import write_whole
from gpuyard.system.clock import SystemClock
from gpuyard.system.private_files import read_own

# Formats in which simulators report it: `frames: 120`, `frames=120`, `"frames": 120`, `120 frames`.
_FRAMES = re.compile(r"\bframes\b[\"']?\s*[:=]\s*(\d+)|\b(\d+) frames\b", re.IGNORECASE)
_TAIL_BYTES = 64 * 1024


class UnsuccessfulRun(Struct, frozen=True, kw_only=True):
    index: int
    seed: int
    id: int
    state: str
    reason: str | None
    log: str | None


class UnmovedRun(Struct, frozen=True, kw_only=True):
    """An empty run that could not be moved to the prune root, and the reason."""

    run: str
    why: str


class Summary(Struct, frozen=True, kw_only=True):
    """The results of a batch. `frames` is the sum that its runs reported, None if no run did. `kept` counts runs with
    data, in `kept_in`; both are None if the batch is not pruned. `unknown` are limits that were not enforced, and
    `silent` says which probe of GPUs did not answer."""

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
    failures: tuple[UnsuccessfulRun, ...]
    left: tuple[UnmovedRun, ...]
    kept: int | None = None
    kept_in: str | None = None
    silent: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.succeeded == self.runs


def finish(root: Path) -> Summary:
    record = batch.read_record(root)
    if record is None:
        raise EnvironmentFault(f"there is no batch in {root}", hint="its batch.json was moved or removed: restore it")
    runs = [
        replace(run, frames=_find_frames(run.log)) if run.frames is None else run
        for _, run in sorted(batch.read_results(record).items())
    ]
    now = str(iso_time(SystemClock().now()))
    results = classify_runs(record.plan, runs, read_pruned(root / PRUNED), now)
    runs = [
        replace(run, kept_in=result.kept_in, pruned_to=result.pruned_to)
        for run, result in zip(runs, results.of_runs, strict=True)
    ]
    lines = [json.dumps(msgspec.to_builtins(run)) for run in runs]
    write_whole(root / batch.RUNS, "".join(f"{line}\n" for line in lines).encode())
    summary = _summarize(record, runs, results)
    write_whole(root / batch.SUMMARY, msgspec.json.format(msgspec.json.encode(summary)))
    return summary


def read_summary(root: Path) -> Summary | None:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(read_own(f"{root}/{batch.SUMMARY}"), type=Summary)
    return None


def _find_frames(log: str | None) -> int | None:
    """Return the last number of frames in a log, or None."""
    try:
        with open(log or "", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            found = _FRAMES.findall(file.read().decode(errors="replace"))
    except OSError:
        return None
    return int(next(filter(None, found[-1]))) if found else None


def _summarize(record: BatchRecord, runs: list[RunRecord], results: RunResults) -> Summary:
    plan = record.plan
    waits, unknown, silent = _read_waits(record)
    frames = [run.frames for run in runs if run.frames is not None]
    started = min((run.submitted_at for run in runs), default=None)
    ended = max((run.ended_at for run in runs if run.ended_at), default=None)
    seconds = None
    if started is not None and ended is not None:
        seconds = round((datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds(), 3)
    bad = [run for run in runs if run.state != SUCCEEDED]
    return Summary(
        name=plan.name,
        command=plan.command,
        root=plan.root,
        runs=plan.count,
        succeeded=len(runs) - len(bad),
        failed=sum(run.state in ("failed", "rejected") for run in bad),
        cancelled=sum(run.state == "cancelled" for run in bad),
        pruned=results.pruned,
        kept=None if plan.prunes is None else results.kept,
        kept_in=None if plan.prunes is None else plan.pruned_root if results.keeps == THERE else plan.root,
        attempts=sum(run.attempts for run in runs),
        frames=sum(frames) if frames else None,
        waits_s=waits,
        unknown=unknown,
        silent=silent,
        started_at=started,
        ended_at=ended,
        seconds=seconds,
        failures=tuple(msgspec.convert(run, UnsuccessfulRun, from_attributes=True) for run in bad),
        left=tuple(
            UnmovedRun(run=run_folder(plan, run.index).name, why=result.left)
            for run, result in zip(runs, results.of_runs, strict=True)
            if result.left is not None
        ),
    )


def _read_waits(record: BatchRecord) -> tuple[dict[str, float], tuple[str, ...], str | None]:
    """Return the seconds that each gate delayed runs, the limits not enforced, and which probe did not answer, from all
    parts in the queue."""
    waits: dict[str, float] = {}
    unknown: dict[str, None] = {}
    silent = None
    for part in record.parts:
        status = (batch.read_part_status(part) if part.first is not None else None) or {}
        for gate, seconds in status.get("waits_s", {}).items():
            waits[gate] = round(waits.get(gate, 0.0) + seconds, 3)
        unknown |= dict.fromkeys(status.get("unknown", ()))
        silent = status.get("silent") or silent
    return waits, tuple(unknown), silent


def main() -> None:
    try:
        summary = finish(Path(sys.argv[1]))
    except GpuyardError as error:
        sys.exit(f"gpuyard: {error}")
    sys.stdout.write(f"{summary.succeeded} of {summary.runs} runs succeeded, {summary.pruned} pruned\n")


if __name__ == "__main__":
    main()
