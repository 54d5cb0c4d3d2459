"""The size of a run is that of finished ones, and a batch that would fill its disk says so before it starts."""

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from gpuyard.policy.disk_and_system_limits import DiskFigure
from gpuyard.recipes.batch import plan as plan_module
from gpuyard.recipes.batch.plan import RECORD, RUNS, BatchPlan, BatchRecord, disk_warning, expected_run_size
from tests.unit.recipes.batch.test_run_results import run

MB = 1048576


def plan(folder: Path, count: int = 10, *command: str) -> BatchPlan:
    return BatchPlan(name="sim", command=command or ("sim", "{seed}"), count=count, root=str(folder))


def finish(folder: Path, *sizes_mb: int, **changes: str | int) -> None:
    """Write a batch whose runs have written so much."""
    runs = [replace(run(index), **changes) for index in range(len(sizes_mb))]
    for index, size in enumerate(sizes_mb):
        place = folder / f"run-{index:06d}" / "frames"
        place.mkdir(parents=True)
        (place / "data").write_bytes(b"x" * size * MB)
    (folder / RECORD).write_bytes(msgspec.json.encode(BatchRecord(plan=plan(folder))))
    (folder / RUNS).write_text("".join(json.dumps(msgspec.to_builtins(each)) + "\n" for each in runs))
    for name in (RECORD, RUNS):
        (folder / name).chmod(0o600)


def free(monkeypatch: pytest.MonkeyPatch, free_mb: float | None) -> None:
    figure = DiskFigure(folder="/out", free_mb=free_mb, total_mb=1e6)
    monkeypatch.setattr(plan_module, "read_disk_in_time", lambda _: figure)


def test_the_size_of_a_run_is_the_mean_of_those_in_the_root_or_of_the_batch_beside(tmp_path: Path) -> None:
    assert expected_run_size(plan(tmp_path / "out")) is None
    finish(tmp_path / "out", 1, 3)
    assert expected_run_size(plan(tmp_path / "out")) == (2.0, 2)
    assert expected_run_size(plan(tmp_path / "out-2")) == (2.0, 2)
    assert expected_run_size(plan(tmp_path / "out-2", 10, "another")) is None
    finish(tmp_path / "out-2", 4)
    assert expected_run_size(plan(tmp_path / "out-2")) == (4.0, 1)


@pytest.mark.parametrize("changes", [{"state": "failed"}, {"index": 7}, {"kept_in": "{root}"}])
def test_runs_that_failed_or_are_gone_or_share_a_folder_say_nothing(tmp_path: Path, changes: dict[str, str]) -> None:
    root = tmp_path / "out"
    finish(root, 2, **{name: str(root) if value == "{root}" else value for name, value in changes.items()})
    assert expected_run_size(plan(root)) is None


def test_a_batch_that_would_fill_the_disk_says_so_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(tmp_path / "out", 2)
    free(monkeypatch, 1024.0 + 10.0)
    assert disk_warning(plan(tmp_path / "out-2", 5)) is None, "5 runs of 2 MB fit beside the 1 GB that stays free"
    text = disk_warning(plan(tmp_path / "out-2", 400))
    assert text is not None
    assert "400 runs of about 2 MB (the mean of 1 run) need 800 MB, and 1 GB are free" in text
    assert "after about 5 runs the next ones wait until 1 GB are free" in text


def test_finished_runs_need_no_more_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(tmp_path / "out", 2, 2, 2)
    free(monkeypatch, 1024.0 + 4.0)
    assert disk_warning(plan(tmp_path / "out", 5)) is None
    assert disk_warning(plan(tmp_path / "out", 6)) is not None


def test_the_limit_of_the_batch_is_the_one_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(tmp_path / "out", 2)
    free(monkeypatch, 100.0)
    assert disk_warning(plan(tmp_path / "out", 10)) is not None
    assert disk_warning(replace(plan(tmp_path / "out", 10), options={"min-free-disk": "10M"})) is None


def test_without_a_known_size_or_space_there_is_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1.0)
    assert disk_warning(plan(tmp_path / "new", 400)) is None
    finish(tmp_path / "new", 2)
    free(monkeypatch, None)
    assert disk_warning(plan(tmp_path / "new", 400)) is None
