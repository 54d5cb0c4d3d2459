"""Outputs are written to disk while workers render: a slow disk delays no label, and no error is lost."""

import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.render import write_outputs as output_writers
from gpuyard.recipes.render.planning.assets_and_units import Label
from gpuyard.recipes.render.write_outputs import Outputs, OutputWriters
from tests.residency_runs import DEADLINE_S, AssetFiles, check_every_label, play, write_checksum

BUDGET = 1 << 20


@pytest.fixture
def asset_files(tmp_path: Path) -> AssetFiles:
    return AssetFiles(tmp_path / "assets", [40], [[30, 30]])


def test_a_worker_renders_the_next_label_while_the_last_one_is_written(
    asset_files: AssetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [asset_files.unit(0, 0, labels=2)]
    first, second = (label.name for label in units[0].labels)
    is_second_rendered = threading.Event()
    plain = Outputs.commit

    def commit(outputs: Outputs, label: Label, folder: Path) -> None:
        assert label.name != first or is_second_rendered.wait(DEADLINE_S)
        plain(outputs, label, folder)

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        write_checksum(scene, frames, label, out_dir)
        if label["name"] == second:
            is_second_rendered.set()

    monkeypatch.setattr(Outputs, "commit", commit)
    played = play(units, tmp_path / "out", vram=BUDGET, ram=BUDGET, workers=1, render=render)

    check_every_label(units, played, asset_files)


def test_an_output_that_cannot_be_written_is_skipped_and_the_others_are_not(
    asset_files: AssetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [asset_files.unit(0, 0, labels=5)]
    unlucky = units[0].labels[1].name
    plain = Outputs.commit

    def commit(outputs: Outputs, label: Label, folder: Path) -> None:
        if label.name == unlucky:
            outputs.discard(folder)
            raise EnvironmentFault("the disk is full")
        plain(outputs, label, folder)

    monkeypatch.setattr(Outputs, "commit", commit)
    played = play(units, tmp_path / "out", vram=BUDGET, ram=BUDGET, workers=2)

    check_every_label(units, played, asset_files)
    assert {name: (skip.kind, skip.reason) for name, skip in played.skipped.items()} == {
        unlucky: ("output", "the disk is full")
    }


def test_a_worker_waits_while_too_many_outputs_are_not_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_writers, "_MOST_WAITING", 2)
    may_write, written = threading.Event(), threading.Semaphore(0)

    def write() -> None:
        assert may_write.wait(DEADLINE_S)
        written.release()

    with OutputWriters() as writers:
        for _ in range(2):
            writers.write(write)
        third = threading.Thread(target=writers.write, args=(write,))
        third.start()
        third.join(0.05)
        assert third.is_alive()
        may_write.set()
        third.join(DEADLINE_S)
        assert not third.is_alive()
    assert all(written.acquire(blocking=False) for _ in range(3))


def test_an_unexpected_error_of_a_write_ends_the_run() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    writers = OutputWriters()
    with pytest.raises(ZeroDivisionError), writers:
        writers.write(fail)
    with pytest.raises(ZeroDivisionError):
        writers.write(fail)
