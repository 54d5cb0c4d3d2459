"""Finish a batch after its last run, as a job of the queue: classify each run as kept or pruned by what is on disk,
prune empty runs, and write a summary. Repeating it gives the same result: `pruned.jsonl` records the runs moved before.

A program that prunes keeps data *here*, in the output root, and moves empty runs; or *there*: it moves runs with data
to the prune root. Not told which, it is *there* if the output root has no data, and some run reported frames or has
data in the prune root. If fewer folders with names of the program's own have data than the runs that they may belong
to, only the number of kept runs is known."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from stat import S_ISDIR

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, GpuyardError
from gpuyard.model.machine_snapshot import iso_time
from gpuyard.recipes.batch import plan as batch
from gpuyard.recipes.batch.plan import PRUNED, SUCCEEDED, BatchPlan, BatchRecord, RunRecord, run_folder
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE, PrunedRun, has_frame, prune
from gpuyard.recipes.batch.prune_empty_runs import read_record as read_pruned
from gpuyard.system.clock import SystemClock
from gpuyard.system.private_files import read_own
from gpuyard.system.write_files import write_whole

HERE, THERE = "here", "there"


class RunResult(Struct, frozen=True, kw_only=True):
    """Where a run's data are kept, or where it was pruned to. `left` is the reason that an empty run was not moved."""

    kept_in: str | None = None
    pruned_to: str | None = None
    left: str | None = None


class RunResults(Struct, frozen=True, kw_only=True):
    """`keeps` is HERE or THERE. `kept` and `pruned` count runs, also those of which only the number is known."""

    keeps: str
    of_runs: list[RunResult]
    kept: int
    pruned: int


def classify_runs(plan: BatchPlan, runs: Sequence[RunRecord], known: Mapping[str, PrunedRun], at: str) -> RunResults:
    """Return the results of the runs. Moves empty runs if gpuyard prunes this batch; `known` were moved before."""
    if plan.prunes == "program":
        keeps, results, kept, pruned = _classify_by_folders(plan, runs)
    else:
        keeps, results, kept, pruned = HERE, [_classify(plan, run, known, at) for run in runs], 0, 0
    kept += sum(result.kept_in is not None for result in results)
    pruned += sum(result.pruned_to is not None for result in results)
    return RunResults(keeps=keeps, of_runs=results, kept=kept, pruned=pruned)


def _has_started(run: RunRecord) -> bool:
    return run.state != "cancelled" and run.attempts > 0


def _has_data(folder: Path) -> bool:
    try:
        return folder.is_dir() and has_frame(folder, ANY_FILE)
    except EnvironmentFault:
        return False


# A program that prunes


def _classify_by_folders(plan: BatchPlan, runs: Sequence[RunRecord]) -> tuple[str, list[RunResult], int, int]:
    """Return where data are kept, the results, and the runs kept and pruned of which only the number is known."""
    since = min((datetime.fromisoformat(run.submitted_at).timestamp() for run in runs), default=0.0)
    here, there = (_renamed_folders(Path(root or ""), since) for root in (plan.root, plan.pruned_root))
    with_data = {HERE: sum(map(_has_data, here)), THERE: sum(map(_has_data, there))}
    keeps = plan.prune_keeps or _detect_where_kept(plan, runs, with_data)
    root = plan.pruned_root if keeps == THERE else plan.root
    results = {run.index: _find_run(plan, run, keeps) for run in runs}
    unfound = [run for run in runs if results[run.index] is None]
    left = with_data[keeps] - sum(result == RunResult(kept_in=root) for result in results.values())
    kept = pruned = 0
    candidates = [run for run in unfound if run.state == SUCCEEDED and run.frames != 0]
    if left >= len(candidates):
        results |= {run.index: RunResult(kept_in=root) for run in candidates}
    elif left > 0:
        results |= {run.index: RunResult() for run in candidates}
        kept, pruned = left, len(candidates) - left
    empty = [run for run in unfound if results[run.index] is None]
    is_moved = len(there) >= len(empty)
    results |= {run.index: _classify_empty(plan, run, keeps, is_moved=is_moved) for run in empty}
    return keeps, [result for result in results.values() if result is not None], kept, pruned


def _renamed_folders(root: Path, since: float) -> list[Path]:
    """Return the folders in a root that have names of the program, and are not older than the batch."""
    with contextlib.suppress(OSError):
        named = [path for path in root.iterdir() if not re.match(r"run-\d{6}|\.", path.name)]
        return [path for path in named if S_ISDIR((status := path.lstat()).st_mode) and status.st_ctime >= since]
    return []


def _detect_where_kept(plan: BatchPlan, runs: Sequence[RunRecord], renamed_with_data: Mapping[str, int]) -> str:
    folders = [run_folder(plan, run.index) for run in runs if _has_started(run)]
    if renamed_with_data[HERE] or any(map(_has_data, folders)):
        return HERE
    is_there = renamed_with_data[THERE] or any(run.frames for run in runs if _has_started(run))
    moved = (Path(plan.pruned_root or "") / folder.name for folder in folders)
    return THERE if is_there or any(map(_has_data, moved)) else HERE


def _find_run(plan: BatchPlan, run: RunRecord, keeps: str) -> RunResult | None:
    """Return the result of a run by the folders with its name and by what it reported. None: neither has its data."""
    # A run that failed may have ended before its program could prune it.
    if not _has_started(run) or (keeps == THERE and run.state != SUCCEEDED):
        return RunResult()
    folder = run_folder(plan, run.index)
    moved = Path(plan.pruned_root or "") / folder.name
    try:
        has_data = folder.is_dir() and has_frame(folder, ANY_FILE)
    except EnvironmentFault as error:
        return RunResult(left=str(error))
    if has_data and keeps == HERE:
        return RunResult(kept_in=str(folder) if run.state == SUCCEEDED else None)
    if os.path.lexists(moved) and (keeps == THERE or not os.path.lexists(folder)):
        is_kept = keeps == THERE and run.frames != 0
        return RunResult(kept_in=str(moved)) if is_kept else RunResult(pruned_to=str(moved))
    if has_data:
        return RunResult(pruned_to=str(folder))
    return RunResult(kept_in=plan.pruned_root) if keeps == THERE and run.frames else None


def _classify_empty(plan: BatchPlan, run: RunRecord, keeps: str, *, is_moved: bool) -> RunResult:
    folder = run_folder(plan, run.index)
    if keeps == THERE and os.path.lexists(folder):
        return RunResult(pruned_to=str(folder))
    if is_moved or not os.path.lexists(folder):
        return RunResult(pruned_to=plan.pruned_root)
    # A run that failed may have ended before its program could prune it.
    return RunResult(left="it is empty, and the program left it there" if run.state == SUCCEEDED else None)


# A batch that gpuyard prunes, or that is not pruned


def _classify(plan: BatchPlan, run: RunRecord, known: Mapping[str, PrunedRun], at: str) -> RunResult:
    folder = run_folder(plan, run.index)
    if plan.prunes is None or not _has_started(run):
        return RunResult()
    try:
        if folder.is_dir() and has_frame(folder, plan.frames):
            return RunResult(kept_in=str(folder) if run.state == SUCCEEDED else None)
    except EnvironmentFault as error:
        return RunResult(left=str(error))
    before = known.get(folder.name)
    if not folder.is_dir():
        return RunResult(pruned_to=None if before is None or os.path.lexists(folder) else before.to)
    why = f"{run.state} without a single frame ({plan.frames})"
    root, record = Path(plan.pruned_root or ""), Path(plan.root) / PRUNED
    moved = prune(folder, root, record, why=why, at=at, is_new=before is None)
    return RunResult(pruned_to=moved.to) if moved.left is None else RunResult(left=moved.left)


class UnsuccessfulRun(Struct, frozen=True, kw_only=True):
    index: int
    seed: int
    id: int
    state: str
    reason: str | None
    log: str | None


class UnmovedRun(Struct, frozen=True, kw_only=True):
    run: str
    why: str


class Summary(Struct, frozen=True, kw_only=True):
    """`frames` is the sum that runs reported. `kept` runs have data, in `kept_in`; both are None if the batch is not
    pruned. `unknown` are limits that were not enforced, and `silent` says which probe of GPUs did not answer."""

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
    results = classify_runs(record.plan, runs, read_pruned(root / PRUNED), str(iso_time(SystemClock().now())))
    pairs = zip(runs, results.of_runs, strict=True)
    runs = [replace(run, kept_in=result.kept_in, pruned_to=result.pruned_to) for run, result in pairs]
    lines = [json.dumps(msgspec.to_builtins(run)) + "\n" for run in runs]
    write_whole(root / batch.RUNS, "".join(lines).encode())
    summary = _summarize(record, runs, results)
    write_whole(root / batch.SUMMARY, msgspec.json.format(msgspec.json.encode(summary)))
    return summary


def read_summary(root: Path) -> Summary | None:
    with contextlib.suppress(FileNotFoundError):
        return msgspec.json.decode(read_own(f"{root}/{batch.SUMMARY}"), type=Summary)
    return None


def _find_frames(log: str | None) -> int | None:
    try:
        with open(log or "", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            tail = file.read().decode(errors="replace")
    except OSError:
        return None
    # Formats in which simulators report it: `frames: 120`, `frames=120`, `"frames": 120`, `120 frames`.
    found = re.findall(r"\bframes\b[\"']?\s*[:=]\s*(\d+)|\b(\d+) frames\b", tail, re.IGNORECASE)
    return int(next(filter(None, found[-1]))) if found else None


def _summarize(record: BatchRecord, runs: list[RunRecord], results: RunResults) -> Summary:
    plan = record.plan
    waits: dict[str, float] = {}
    unknown: dict[str, None] = {}
    silent = None
    for part in record.parts:
        status = (batch.read_part_status(part) if part.first is not None else None) or {}
        for gate, waited_s in status.get("waits_s", {}).items():
            waits[gate] = round(waits.get(gate, 0.0) + waited_s, 3)
        unknown |= dict.fromkeys(status.get("unknown", ()))
        silent = status.get("silent") or silent
    frames = [run.frames for run in runs if run.frames is not None]
    started = min((run.submitted_at for run in runs), default=None)
    ended = max((run.ended_at for run in runs if run.ended_at), default=None)
    seconds = None
    if started is not None and ended is not None:
        seconds = round((datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds(), 3)
    bad = [run for run in runs if run.state != SUCCEEDED]
    pairs = zip(runs, results.of_runs, strict=True)
    left = [(run_folder(plan, run.index).name, result.left) for run, result in pairs]
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
        unknown=tuple(unknown),
        silent=silent,
        started_at=started,
        ended_at=ended,
        seconds=seconds,
        failures=tuple(msgspec.convert(run, UnsuccessfulRun, from_attributes=True) for run in bad),
        left=tuple(UnmovedRun(run=name, why=why) for name, why in left if why is not None),
    )


def main() -> None:
    try:
        summary = finish(Path(sys.argv[1]))
    except GpuyardError as error:
        sys.exit(f"gpuyard: {error}")
    sys.stdout.write(f"{summary.succeeded} of {summary.runs} runs succeeded, {summary.pruned} pruned\n")


if __name__ == "__main__":
    main()
