"""Which runs of a batch have data, and where: classify each as kept or pruned, by what is on disk.

- A run that was cancelled or never started is neither kept nor pruned.
- If gpuyard prunes, it moves runs without a frame to the prune root; all others stay in their folders.
- A program that prunes keeps data either *here*, in the output root, and moves empty runs to the prune root; or
  *there*: it moves runs with data to the prune root, and leaves or removes the others. If the user does not say which,
  it is *there* if the output root has no data, and some run reported frames or has data in the prune root.
- A program may give the folders of runs names of its own, in either root. The folders with data are counted. If there
  are fewer than the runs that they may belong to, only the number of kept runs is known, and not which they are.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from stat import S_ISDIR

from msgspec import Struct

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.batch.plan import PRUNED, SUCCEEDED, BatchPlan, RunRecord, run_folder
from gpuyard.recipes.batch.prune_empty_runs import ANY_FILE, PrunedRun, has_frame, prune

HERE, THERE = "here", "there"
_NAME_OF_A_RUN = re.compile(r"run-\d{6}|\.")  # and of files that gpuyard hides


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
    """Return the results of the runs. Moves empty runs if gpuyard prunes this batch; `known` are the runs that were
    moved before."""
    if plan.prunes == "program":
        return _classify_by_folders(plan, runs)
    return _count(HERE, [_classify(plan, run, known, at) for run in runs])


def _count(keeps: str, results: list[RunResult], kept: int = 0, pruned: int = 0) -> RunResults:
    """Return the results with their counts, added to those of runs of which only the number is known."""
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


def _classify_by_folders(plan: BatchPlan, runs: Sequence[RunRecord]) -> RunResults:
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
    return _count(keeps, [result for result in results.values() if result is not None], kept, pruned)


def _renamed_folders(root: Path, since: float) -> list[Path]:
    """Return the folders in a root that have names of the program, and are not older than the batch."""
    with contextlib.suppress(OSError):
        named = [path for path in root.iterdir() if not _NAME_OF_A_RUN.match(path.name)]
        return [path for path in named if S_ISDIR((status := path.lstat()).st_mode) and status.st_ctime >= since]
    return []


def _detect_where_kept(plan: BatchPlan, runs: Sequence[RunRecord], renamed_with_data: Mapping[str, int]) -> str:
    folders = [run_folder(plan, run.index) for run in runs if _has_started(run)]
    if renamed_with_data[HERE] or any(map(_has_data, folders)):
        return HERE
    is_there = renamed_with_data[THERE] or any(run.frames for run in runs if _has_started(run))
    return THERE if is_there or any(_has_data(_folder_in_prune_root(plan, folder)) for folder in folders) else HERE


def _folder_in_prune_root(plan: BatchPlan, folder: Path) -> Path:
    return Path(plan.pruned_root or "") / folder.name


def _find_run(plan: BatchPlan, run: RunRecord, keeps: str) -> RunResult | None:
    """Return the result of a run by the folders with its name and by what it reported. None: neither has its data."""
    # A run that failed may have ended before its program could prune it.
    if not _has_started(run) or (keeps == THERE and run.state != SUCCEEDED):
        return RunResult()
    folder = run_folder(plan, run.index)
    moved = _folder_in_prune_root(plan, folder)
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
