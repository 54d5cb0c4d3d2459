"""What became of the runs of a batch that prunes: whose data are kept, and where, and which runs were pruned.

- A run that was cancelled or never started is neither kept nor pruned.
- gpuyard, where it prunes, moves runs without a frame to the prune root; all else stays in its folder.
- A simulator that prunes keeps data *here*, in the run's folder, and moves empty runs to the prune root; or *there*: it
  moves what it keeps to the prune root, and leaves or removes the rest. Where the user does not say which, it is
  *there* if no run has data in its own folder, and some have reported frames or have data in the prune root.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.batch.plan import PRUNED, SUCCEEDED, BatchPlan, run_folder
from gpuyard.recipes.batch.prune_empty_runs import PrunedRuns, has_frame, prune

HERE, THERE = "here", "there"
_CANCELLED = "cancelled"


class RunResult(Struct, frozen=True, kw_only=True):
    """`left` says why an empty run is still where it should not be."""

    kept_in: str | None = None
    pruned_to: str | None = None
    left: str | None = None


def fates_of(
    plan: BatchPlan, runs: Sequence[dict[str, Any]], known: Mapping[str, PrunedRuns], at: str
) -> tuple[str, list[RunResult]]:
    """Where data are kept, here or there, and the fate of each run. Moves what is gpuyard's to prune; `known` is what
    it has moved before."""
    keeps = HERE
    if plan.prunes == "program":
        keeps = plan.prune_keeps or _find_out(plan, runs)
    return keeps, [_fate(plan, run, keeps, known, at) for run in runs]


def _find_out(plan: BatchPlan, runs: Sequence[dict[str, Any]]) -> str:
    is_elsewhere = False
    for run in filter(_has_run, runs):
        folder = run_folder(plan, run["index"])
        if _has_data(folder):
            return HERE
        is_elsewhere = is_elsewhere or bool(run["frames"]) or _has_data(_place_there(plan, folder))
    return THERE if is_elsewhere else HERE


def _has_run(run: Mapping[str, Any]) -> bool:
    return bool(run["state"] != _CANCELLED and run["attempts"])


def _has_data(folder: Path) -> bool:
    try:
        return folder.is_dir() and has_frame(folder, "*")
    except EnvironmentFault:
        return False


def _place_there(plan: BatchPlan, folder: Path) -> Path:
    return Path(plan.pruned_root or "") / folder.name


def _fate(plan: BatchPlan, run: Mapping[str, Any], keeps: str, known: Mapping[str, PrunedRuns], at: str) -> RunResult:
    folder = run_folder(plan, run["index"])
    if plan.prunes is None or not _has_run(run):
        return RunResult()
    if keeps == THERE:
        return _fate_there(plan, run, folder)
    try:
        if folder.is_dir() and has_frame(folder, plan.frames):
            return RunResult(kept_in=str(folder) if run["state"] == SUCCEEDED else None)
    except EnvironmentFault as error:
        return RunResult(left=str(error))
    return _fate_here(plan, run, folder) if plan.prunes == "program" else _pruned(plan, run, folder, known, at)


def _fate_there(plan: BatchPlan, run: Mapping[str, Any], folder: Path) -> RunResult:
    there = _place_there(plan, folder)
    # A simulator may give what it moves a name of its own.
    place = there if os.path.lexists(there) else folder if os.path.lexists(folder) else Path(plan.pruned_root or "")
    if run["state"] != SUCCEEDED:  # it may have had no time to look
        return RunResult()
    is_pruned = place == folder or run["frames"] == 0
    return RunResult(pruned_to=str(place)) if is_pruned else RunResult(kept_in=str(place))


def _fate_here(plan: BatchPlan, run: Mapping[str, Any], folder: Path) -> RunResult:
    if not os.path.lexists(folder):
        there = _place_there(plan, folder)
        return RunResult(pruned_to=str(there) if os.path.lexists(there) else plan.pruned_root)
    is_its_own = run["state"] == SUCCEEDED  # what failed may have had no time to look
    return RunResult(left="it is empty, and the program left it there" if is_its_own else None)


def _pruned(
    plan: BatchPlan, run: Mapping[str, Any], folder: Path, known: Mapping[str, PrunedRuns], at: str
) -> RunResult:
    before = known.get(folder.name)
    if not folder.is_dir():
        return RunResult(pruned_to=None if before is None or os.path.lexists(folder) else before.to)
    why = f"{run['state']} without a single frame ({plan.frames})"
    root, record = Path(plan.pruned_root or ""), Path(plan.root) / PRUNED
    moved = prune(folder, root, record, why=why, at=at, is_new=before is None)
    return RunResult(pruned_to=moved.to) if moved.left is None else RunResult(left=moved.left)
