"""Which runs of a batch count as kept and which as pruned."""

from pathlib import Path

import pytest

from gpuyard.recipes.batch.finish import RunResult, classify_runs
from gpuyard.recipes.batch.plan import BatchPlan, RunRecord

AT = "2026-01-02T03:04:05Z"


def plan(folder: Path, prunes: str | None = "program", keeps: str | None = None) -> BatchPlan:
    for name in ("out", "pruned"):
        (folder / name).mkdir(exist_ok=True)
    return BatchPlan(
        name="sim",
        command=("sim",),
        count=3,
        root=str(folder / "out"),
        pruned_root=str(folder / "pruned"),
        prunes=prunes,
        prune_keeps=keeps,
    )


def run(index: int, state: str = "succeeded", *, attempts: int = 1, frames: int | None = None) -> RunRecord:
    return RunRecord(
        id=index + 1, index=index, seed=index, state=state, attempts=attempts, submitted_at=AT, frames=frames
    )


def make(folder: Path, *files: str) -> str:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("data")
    return str(folder)


@pytest.mark.parametrize("prunes", ["program", "scheduler"])
def test_a_run_that_was_cancelled_or_never_started_is_neither_kept_nor_pruned(tmp_path: Path, prunes: str) -> None:
    begun = make(tmp_path / "out/run-000001")
    runs = [run(0, "cancelled", attempts=0), run(1, "cancelled"), run(2, "rejected", attempts=0)]
    assert classify_runs(plan(tmp_path, prunes), runs, {}, AT) == ("here", [RunResult()] * 3)
    assert Path(begun).is_dir()


def test_a_simulator_that_keeps_data_in_the_output_root_moves_the_rest(tmp_path: Path) -> None:
    kept = make(tmp_path / "out/run-000000", "frame")
    moved = make(tmp_path / "pruned/run-000001", "log")
    left = RunResult(left="it is empty, and the program left it there")
    make(tmp_path / "out/run-000002")
    results = classify_runs(plan(tmp_path), [run(0), run(1), run(2)], {}, AT)
    assert results == ("here", [RunResult(kept_in=kept), RunResult(pruned_to=moved), left])


def test_data_only_in_the_prune_root_are_kept_there(tmp_path: Path) -> None:
    kept, rest = make(tmp_path / "pruned/run-000000", "frame"), make(tmp_path / "out/run-000001")
    results = classify_runs(plan(tmp_path), [run(0), run(1), run(2, "failed")], {}, AT)
    assert results == ("there", [RunResult(kept_in=kept), RunResult(pruned_to=rest), RunResult()])


def test_reported_frames_outside_of_run_folders_count_as_kept_in_the_prune_root(tmp_path: Path) -> None:
    """The simulator renames the folders it keeps and removes the others."""
    make(tmp_path / "pruned/2026-01-02-seed-0", "frame")
    results = classify_runs(plan(tmp_path), [run(0, frames=5), run(1, frames=0)], {}, AT)
    root = str(tmp_path / "pruned")
    assert results == ("there", [RunResult(kept_in=root), RunResult(pruned_to=root)])


def test_the_users_setting_goes_before_the_detected_place(tmp_path: Path) -> None:
    there, here = make(tmp_path / "pruned/run-000000", "frame"), make(tmp_path / "out/run-000001", "frame")
    runs = [run(0, frames=5), run(1, frames=5)]
    assert classify_runs(plan(tmp_path, keeps="here"), runs, {}, AT)[1] == [
        RunResult(pruned_to=there),
        RunResult(kept_in=here),
    ]
    assert classify_runs(plan(tmp_path, keeps="there"), runs, {}, AT)[1] == [
        RunResult(kept_in=there),
        RunResult(pruned_to=here),
    ]


def test_without_pruning_runs_are_not_classified(tmp_path: Path) -> None:
    make(tmp_path / "out/run-000000", "frame")
    assert classify_runs(plan(tmp_path, None), [run(0)], {}, AT) == ("here", [RunResult()])
