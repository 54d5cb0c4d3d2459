"""Classify the runs of a batch as kept, with the folder of their data, or as pruned.

- A run that was cancelled or never started is neither kept nor pruned.
- If gpuyard prunes, it moves runs without a frame to the prune root; all others stay in their folders.
- A program that prunes keeps data either *here*, in the run's folder, and moves empty runs to the prune root; or
  *there*: it moves runs with data to the prune root, and leaves or removes the others. If the user does not say which,
  it is *there* if no run has data in its own folder and some run reported frames or has data in the prune root.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.batch.plan import PRUNED, SUCCEEDED, BatchPlan, RunRecord, run_folder
from gpuyard.recipes.batch.prune_empty_runs import PrunedRun, has_frame, prune

HERE, THERE = "here", "there"


class RunResult(Struct, frozen=True, kw_only=True):
    """Where a run's data are kept, or where it was pruned to. `left` is the reason that an empty run was not moved."""

    kept_in: str | None = None
    pruned_to: str | None = None
    left: str | None = None


def classify_runs(
    plan: BatchPlan, runs: Sequence[RunRecord], known: Mapping[str, PrunedRun], at: str
) -> tuple[str, list[RunResult]]:
    """Return where data are kept (HERE or THERE) and the result of each run.

    Moves empty runs if gpuyard prunes this batch; `known` are the runs that were moved before.
    """
    keeps = HERE
    if plan.prunes == "program":
        keeps = plan.prune_keeps or _detect_where_kept(plan, runs)
    return keeps, [_classify(plan, run, keeps, known, at) for run in runs]


def _detect_where_kept(plan: BatchPlan, runs: Sequence[RunRecord]) -> str:
    keeps = HERE
    for run in filter(_has_started, runs):
        folder = run_folder(plan, run.index)
        if _has_data(folder):
            return HERE
        if run.frames or _has_data(_folder_in_prune_root(plan, folder)):
            keeps = THERE
    return keeps


def _has_started(run: RunRecord) -> bool:
    return run.state != "cancelled" and run.attempts > 0


def _has_data(folder: Path) -> bool:
    try:
        return folder.is_dir() and has_frame(folder, "*")
    except EnvironmentFault:
        return False


def _folder_in_prune_root(plan: BatchPlan, folder: Path) -> Path:
    return Path(plan.pruned_root or "") / folder.name


def _classify(plan: BatchPlan, run: RunRecord, keeps: str, known: Mapping[str, PrunedRun], at: str) -> RunResult:
    folder = run_folder(plan, run.index)
    if plan.prunes is None or not _has_started(run):
        return RunResult()
    if keeps == THERE:
        return _classify_kept_there(plan, run, folder)
    try:
        if folder.is_dir() and has_frame(folder, plan.frames):
            return RunResult(kept_in=str(folder) if run.state == SUCCEEDED else None)
    except EnvironmentFault as error:
        return RunResult(left=str(error))
    return _classify_empty(plan, run, folder) if plan.prunes == "program" else _prune(plan, run, folder, known, at)


def _classify_kept_there(plan: BatchPlan, run: RunRecord, folder: Path) -> RunResult:
    if run.state != SUCCEEDED:  # the program may have ended before it could prune
        return RunResult()
    moved = _folder_in_prune_root(plan, folder)
    # A program may choose another name for a run that it moves: then only the root is known.
    place = moved if os.path.lexists(moved) else folder if os.path.lexists(folder) else moved.parent
    is_pruned = place == folder or run.frames == 0
    return RunResult(pruned_to=str(place)) if is_pruned else RunResult(kept_in=str(place))


def _classify_empty(plan: BatchPlan, run: RunRecord, folder: Path) -> RunResult:
    """Classify an empty run of a program that prunes."""
    if not os.path.lexists(folder):
        moved = _folder_in_prune_root(plan, folder)
        return RunResult(pruned_to=str(moved) if os.path.lexists(moved) else plan.pruned_root)
    # A run that failed may have ended before it could prune.
    return RunResult(left="it is empty, and the program left it there" if run.state == SUCCEEDED else None)


def _prune(plan: BatchPlan, run: RunRecord, folder: Path, known: Mapping[str, PrunedRun], at: str) -> RunResult:
    before = known.get(folder.name)
    if not folder.is_dir():
        return RunResult(pruned_to=None if before is None or os.path.lexists(folder) else before.to)
    why = f"{run.state} without a single frame ({plan.frames})"
    root, record = Path(plan.pruned_root or ""), Path(plan.root) / PRUNED
    moved = prune(folder, root, record, why=why, at=at, is_new=before is None)
    return RunResult(pruned_to=moved.to) if moved.left is None else RunResult(left=moved.left)
