"""What comes after a batch's last run, as a job of the queue: empty runs are pruned, and a summary is written.

It can be done again at any time, and comes to the same end: what was moved before is found in the record of that.
"""

import contextlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.clock import SystemClock
from gpuyard.core.shape import iso_time
from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.recipes.batch import (
    PRUNED,
    RUNS,
    SUCCEEDED,
    SUMMARY,
    Plan,
    Record,
    read_record,
    results,
    run_folder,
    standing_of,
    write_whole,
)
from gpuyard.recipes.pruning import Moved, has_frame, prune
from gpuyard.recipes.pruning import read_record as read_pruned

# As simulators say it: `frames: 120`, `frames=120`, `"frames": 120`, `120 frames`.
_FRAMES = re.compile(r"\bframes\b[\"']?\s*[:=]\s*(\d+)|\b(\d+) frames\b", re.IGNORECASE)
_TAIL_BYTES = 64 * 1024


class Summary(Struct, frozen=True, kw_only=True):
    """How a batch came out. `frames` is what its runs reported, `None` where none did; `left` are empty runs that could
    not be moved, and why; `unknown` are bounds that were not enforced."""

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

    @property
    def is_whole(self) -> bool:
        return self.succeeded == self.runs


def finish(root: Path) -> Summary:
    record = read_record(root)
    if record is None:
        raise EnvironmentFault(f"there is no batch in {root}", hint="it was there when the batch began")
    found = results(record)
    runs = [found[index] for index in sorted(found)]
    left = _prune(record.plan, runs)
    moved = read_pruned(root / PRUNED)
    for run in runs:
        run["frames"] = _frames(run["log"]) if run.get("frames") is None else run["frames"]
        run["pruned_to"] = _pruned_to(record.plan, run_folder(record.plan, run["index"]), run["state"], moved)
    write_whole(root / RUNS, "".join(f"{json.dumps(run)}\n" for run in runs).encode())
    summary = _summary(record, runs, left)
    write_whole(root / SUMMARY, msgspec.json.format(msgspec.json.encode(summary)))
    return summary


def read_summary(root: Path) -> Summary | None:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode((root / SUMMARY).read_bytes(), type=Summary)
    return None


def _prune(plan: Plan, runs: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Those that could not be moved. A folder that was made for a run that never started goes as well."""
    left = []
    for run in runs:
        folder = run_folder(plan, run["index"])
        if run["attempts"] == 0:
            with contextlib.suppress(OSError):  # something is in it, or it is gone
                folder.rmdir()
        elif plan.prunes == "scheduler" and plan.pruned_root is not None and folder.is_dir():
            why_left = _prune_one(plan, folder, run["state"])
            if why_left is not None:
                left.append({"run": folder.name, "why": why_left})
    return left


def _prune_one(plan: Plan, folder: Path, state: str) -> str | None:
    try:
        if has_frame(folder, plan.frames):
            return None
    except EnvironmentFault as error:
        return str(error)
    why = f"{state} without a single frame ({plan.frames})"
    record = Path(plan.root) / PRUNED
    return prune(folder, Path(plan.pruned_root or ""), record, why=why, at=_now()).left


def _now() -> str:
    return str(iso_time(SystemClock().now()))


def _pruned_to(plan: Plan, folder: Path, state: str, moved: Mapping[str, Moved]) -> str | None:
    """Where an empty run went, as far as we know: what the program moves it does not tell."""
    if plan.prunes == "scheduler":
        found = moved.get(folder.name)
        return None if found is None or found.left is not None else found.to
    is_there = folder.is_dir() and (state != SUCCEEDED or any(folder.iterdir()))
    return None if plan.prunes is None or is_there else plan.pruned_root


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


def _summary(record: Record, runs: list[dict[str, Any]], left: list[dict[str, str]]) -> Summary:
    plan = record.plan
    waits, unknown = _waits(record)
    frames = [run["frames"] for run in runs if run["frames"] is not None]
    started = min((run["started_at"] for run in runs if run["started_at"]), default=None)
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
        pruned=sum(run["pruned_to"] is not None for run in runs),
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


def _waits(record: Record) -> tuple[dict[str, float], tuple[str, ...]]:
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
