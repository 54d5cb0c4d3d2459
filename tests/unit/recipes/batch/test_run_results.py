"""Which runs of a batch count as kept and which as pruned."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.recipes.batch.finish import RunResult, RunResults, classify_runs
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


def nothing_in(runs: int) -> RunResults:
    return RunResults(keeps="here", of_runs=[RunResult()] * runs, kept=0, pruned=0)


@pytest.mark.parametrize("prunes", ["program", "scheduler"])
def test_a_run_that_was_cancelled_or_never_started_is_neither_kept_nor_pruned(tmp_path: Path, prunes: str) -> None:
    begun = make(tmp_path / "out/run-000001")
    runs = [run(0, "cancelled", attempts=0), run(1, "cancelled"), run(2, "rejected", attempts=0)]
    assert classify_runs(plan(tmp_path, prunes), runs, {}, AT) == nothing_in(3)
    assert Path(begun).is_dir()


def test_a_simulator_that_keeps_data_in_the_output_root_moves_the_rest(tmp_path: Path) -> None:
    kept = make(tmp_path / "out/run-000000", "frame")
    moved = make(tmp_path / "pruned/run-000001", "log")
    left = RunResult(left="it is empty, and the program left it there")
    make(tmp_path / "out/run-000002")
    results = classify_runs(plan(tmp_path), [run(0), run(1), run(2)], {}, AT)
    assert (results.keeps, results.of_runs) == ("here", [RunResult(kept_in=kept), RunResult(pruned_to=moved), left])


def test_data_only_in_the_prune_root_are_kept_there(tmp_path: Path) -> None:
    kept, rest = make(tmp_path / "pruned/run-000000", "frame"), make(tmp_path / "out/run-000001")
    results = classify_runs(plan(tmp_path), [run(0), run(1), run(2, "failed")], {}, AT)
    expected = [RunResult(kept_in=kept), RunResult(pruned_to=rest), RunResult()]
    assert results == RunResults(keeps="there", of_runs=expected, kept=1, pruned=1)


def test_reported_frames_outside_of_run_folders_count_as_kept_in_the_prune_root(tmp_path: Path) -> None:
    """The simulator renames the folders it keeps and removes the others."""
    make(tmp_path / "pruned/2026-01-02-seed-0", "frame")
    results = classify_runs(plan(tmp_path), [run(0, frames=5), run(1, frames=0)], {}, AT)
    root = str(tmp_path / "pruned")
    assert (results.keeps, results.of_runs) == ("there", [RunResult(kept_in=root), RunResult(pruned_to=root)])


def test_the_users_setting_goes_before_the_detected_place(tmp_path: Path) -> None:
    there, here = make(tmp_path / "pruned/run-000000", "frame"), make(tmp_path / "out/run-000001", "frame")
    runs = [run(0, frames=5), run(1, frames=5)]
    assert classify_runs(plan(tmp_path, keeps="here"), runs, {}, AT).of_runs == [
        RunResult(pruned_to=there),
        RunResult(kept_in=here),
    ]
    assert classify_runs(plan(tmp_path, keeps="there"), runs, {}, AT).of_runs == [
        RunResult(kept_in=there),
        RunResult(pruned_to=here),
    ]


# Folders that have names of the program's own


@pytest.mark.parametrize("root", ["out", "pruned"])
def test_runs_that_were_kept_under_names_of_the_program_are_counted(tmp_path: Path, root: str) -> None:
    make(tmp_path / root / "scene-a", "frame")
    make(tmp_path / root / "scene-b", "frame")
    results = classify_runs(plan(tmp_path), [run(0), run(1)], {}, AT)
    kept = RunResult(kept_in=str(tmp_path / root))
    assert results == RunResults(keeps="here" if root == "out" else "there", of_runs=[kept] * 2, kept=2, pruned=0)


def test_of_fewer_folders_than_runs_only_the_number_of_kept_runs_is_known(tmp_path: Path) -> None:
    make(tmp_path / "out/scene-a", "frame")
    make(tmp_path / "pruned/scene-b")
    results = classify_runs(plan(tmp_path), [run(0), run(1), run(2, frames=0)], {}, AT)
    moved = RunResult(pruned_to=str(tmp_path / "pruned"))
    assert results == RunResults(keeps="here", of_runs=[RunResult(), RunResult(), moved], kept=1, pruned=2)


def test_an_empty_run_that_was_moved_under_a_name_of_the_program_is_pruned(tmp_path: Path) -> None:
    """The program makes a folder of its own in that of the run, and moves it away if it is empty."""
    make(tmp_path / "out/run-000000/scene-a", "frame")
    make(tmp_path / "out/run-000001")
    make(tmp_path / "pruned/scene-b")
    results = classify_runs(plan(tmp_path), [run(0), run(1)], {}, AT)
    assert (results.kept, results.pruned, results.of_runs[1].left) == (1, 1, None)


def test_folders_from_before_the_batch_are_not_its_runs(tmp_path: Path) -> None:
    make(tmp_path / "pruned/scene-a", "frame")
    later = replace(run(0), submitted_at="2999-01-01T00:00:00Z")
    assert classify_runs(plan(tmp_path), [later], {}, AT).kept == 0


def test_without_pruning_runs_are_not_classified(tmp_path: Path) -> None:
    make(tmp_path / "out/run-000000", "frame")
    assert classify_runs(plan(tmp_path, None), [run(0)], {}, AT) == nothing_in(1)
