"""The size of a run is learned from finished ones, and a batch that would fill its disk says so before it starts."""

import json
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from gpuyard.core.scheduling.disk_space import DiskFigure
from gpuyard.recipes.batch import run_sizes
from gpuyard.recipes.batch.plan import RUNS, BatchPlan, BatchRecord, RunRecord
from gpuyard.recipes.batch.run_sizes import RunSize, disk_warning, expected_run_size, learn_run_size
from tests.unit.recipes.batch.test_run_results import run

MB = 1048576


@pytest.fixture(autouse=True)
def _state(own_home: Path) -> None:
    own_home.mkdir(mode=0o700)


def plan(folder: Path, count: int = 10, *command: str) -> BatchPlan:
    return BatchPlan(name="sim", command=command or ("sim", "{seed}"), count=count, root=str(folder))


def finished(folder: Path, *sizes_mb: int) -> list[RunRecord]:
    """Return runs that wrote so much, and record them as `finish` does."""
    runs = [run(index) for index in range(len(sizes_mb))]
    for index, size in enumerate(sizes_mb):
        place = folder / f"run-{index:06d}" / "frames"
        place.mkdir(parents=True)
        (place / "data").write_bytes(b"x" * size * MB)
    (folder / RUNS).write_text("".join(json.dumps(to_builtins(each)) + "\n" for each in runs))
    (folder / RUNS).chmod(0o600)
    return runs


def free(monkeypatch: pytest.MonkeyPatch, free_mb: float | None) -> None:
    figure = DiskFigure(folder="/out", free_mb=free_mb, total_mb=1e6)
    monkeypatch.setattr(run_sizes, "read_disk_in_time", lambda _: figure)


def test_the_size_of_a_run_is_the_mean_of_those_in_the_root(tmp_path: Path) -> None:
    finished(tmp_path / "out", 1, 3)
    asked = plan(tmp_path / "out")
    assert expected_run_size(asked, BatchRecord(plan=asked)) == RunSize(mb=2.0, runs=2)


def test_a_new_root_goes_by_the_last_batch_of_the_same_command_then_of_the_program(tmp_path: Path) -> None:
    first, other = plan(tmp_path / "a"), plan(tmp_path / "b", 10, "sim", "--large", "{seed}")
    assert expected_run_size(plan(tmp_path / "new"), None) is None
    learn_run_size(first, finished(tmp_path / "a", 2))
    assert expected_run_size(plan(tmp_path / "new"), None) == RunSize(mb=2.0, runs=1)
    assert expected_run_size(plan(tmp_path / "new", 1, "sim", "--other"), None) == RunSize(mb=2.0, runs=1)
    learn_run_size(other, finished(tmp_path / "b", 4))
    assert expected_run_size(plan(tmp_path / "new"), None) == RunSize(mb=2.0, runs=1), "the same command"
    assert expected_run_size(plan(tmp_path / "new", 1, "sim", "--other"), None) == RunSize(mb=4.0, runs=1)
    assert expected_run_size(plan(tmp_path / "new", 1, "another"), None) is None


def test_runs_that_failed_or_are_gone_say_nothing(tmp_path: Path) -> None:
    [done] = finished(tmp_path / "out", 2)
    asked = plan(tmp_path / "out")
    learn_run_size(asked, [replace(done, state="failed"), replace(done, index=7)])
    assert expected_run_size(plan(tmp_path / "new"), None) is None


def test_a_batch_that_would_fill_the_disk_says_so_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn_run_size(plan(tmp_path / "a"), finished(tmp_path / "a", 2))
    free(monkeypatch, 1024.0 + 10.0)
    assert disk_warning(plan(tmp_path / "new", 5), None) is None, "5 runs of 2 MB fit beside the 1 GB that stays free"
    text = disk_warning(plan(tmp_path / "new", 400), None)
    assert text is not None
    assert "400 runs of about 2 MB (the mean of 1 run) need 800 MB, and 1 GB are free" in text
    assert "after about 5 runs the next ones wait until 1 GB are free" in text


def test_finished_runs_need_no_more_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(tmp_path / "out", 2, 2, 2)
    free(monkeypatch, 1024.0 + 4.0)
    continued = plan(tmp_path / "out", 5)
    assert disk_warning(continued, BatchRecord(plan=continued)) is None
    assert disk_warning(replace(continued, count=6), BatchRecord(plan=continued)) is not None


def test_the_limit_of_the_batch_is_the_one_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn_run_size(plan(tmp_path / "a"), finished(tmp_path / "a", 2))
    free(monkeypatch, 100.0)
    assert disk_warning(plan(tmp_path / "new", 10), None) is not None
    assert disk_warning(replace(plan(tmp_path / "new", 10), options={"min-free-disk": "10M"}), None) is None


def test_without_a_known_size_or_free_space_there_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 1.0)
    assert disk_warning(plan(tmp_path / "new", 400), None) is None
    learn_run_size(plan(tmp_path / "a"), finished(tmp_path / "a", 2))
    free(monkeypatch, None)
    assert disk_warning(plan(tmp_path / "new", 400), None) is None


def test_a_damaged_record_of_sizes_is_ignored(tmp_path: Path, own_home: Path) -> None:
    (own_home / "batch-sizes.json").write_text("{broken")
    (own_home / "batch-sizes.json").chmod(0o600)
    assert expected_run_size(plan(tmp_path / "new"), None) is None


def test_a_root_that_holds_all_runs_of_a_program_is_not_taken_for_the_size_of_one(tmp_path: Path) -> None:
    (only,) = finished(tmp_path / "out", 2)
    learn_run_size(plan(tmp_path / "out"), [replace(only, kept_in=str(tmp_path / "out"))])
    assert expected_run_size(plan(tmp_path / "new"), None) is None
