"""The course of a run: stop and resume, wrong size estimates, what the run learns, and its status."""

import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuyard.recipes.render.status_file import RenderStatus
from tests.residency_runs import (
    MB,
    AssetFiles,
    WatchedMemory,
    WatchedPool,
    check_every_label,
    in_time,
    names_of,
    opened,
    outputs_in,
    play,
    skipped_in,
    write_checksum,
)

ROOM = 1 << 20
SCENES, ACTORS = (40, 60, 80), ((200, 100), (270,) * 4)


@pytest.fixture(scope="module")
def asset_files(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    return AssetFiles(tmp_path_factory.mktemp("assets"), SCENES, ACTORS)


# Stop and resume


def test_a_stopped_run_leaves_complete_outputs_and_reports_nothing_as_skipped(
    asset_files: AssetFiles, tmp_path: Path
) -> None:
    units, out = asset_files.products(labels=4), tmp_path / "out"
    rendered = 0
    pools: list[WatchedPool] = []

    with opened(WatchedMemory(ROOM), pools, vram=1, ram=1, working=0, workers=2) as coordinator:

        def render(*args: Any) -> None:
            nonlocal rendered
            rendered += 1
            if rendered == 5:
                coordinator.stop()
            write_checksum(*args)

        report = in_time(lambda: coordinator.run(units, render, out), coordinator.stop)
    names = names_of(units)
    assert report.status.state == "interrupted"
    assert (report.skipped, skipped_in(out)) == ((), {})
    assert 5 <= len(outputs_in(out)) == report.status.rendered < 5 + 2
    assert {path.name for path in out.iterdir()} - {".lock", "skipped.jsonl"} <= names

    again = play(units, out, vram=ROOM, ram=ROOM, resume=True)
    check_every_label(units, again, asset_files)
    assert (again.status.state, again.status.already) == ("finished", report.status.rendered)
    assert again.status.rendered == len(names) - report.status.rendered


@pytest.mark.no_cover  # the interrupt may come amid coverage's own code, which would leave its lock held
def test_an_interrupt_stops_the_run_after_the_current_labels(asset_files: AssetFiles, tmp_path: Path) -> None:
    units, out = asset_files.products(labels=10), tmp_path / "out"
    calls = Counter[str]()
    main = threading.main_thread().ident
    assert main is not None
    takes_a_while = threading.Event()

    def render(*args: Any) -> None:
        calls["all"] += 1
        if calls["all"] == 4:
            signal.pthread_kill(main, signal.SIGINT)
        takes_a_while.wait(0.02)
        write_checksum(*args)

    with opened(WatchedMemory(ROOM), [], vram=1, ram=1, working=0, workers=2) as coordinator:
        with pytest.raises(KeyboardInterrupt):
            coordinator.run(units, render, out)
        status = coordinator.status()
    assert status is not None
    assert status.rendered == len(outputs_in(out)) < 30


# Status


def test_status_is_consistent_at_every_moment(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = asset_files.products(labels=2)
    statuses: dict[str, RenderStatus] = {}
    vram = 60_000

    with opened(WatchedMemory(vram), [], vram=vram / MB, ram=1, working=0, workers=3, scene_slots=2) as coordinator:
        assert coordinator.status() is None

        def render(*args: Any) -> None:
            write_checksum(*args)
            status = coordinator.status()
            assert status is not None
            statuses[args[2]["name"]] = status

        report = in_time(lambda: coordinator.run(units, render, tmp_path / "out"), coordinator.stop)
        assert coordinator.status() is not None
    assert len(statuses) == 12
    for name, status in statuses.items():
        assert status.state == "running"
        assert status.rendered + status.skipped + status.already < status.labels == 12
        assert 0 < status.vram.assets <= report.status.vram.peak_assets <= status.vram.budget == vram
        assert status.ram.assets <= report.status.ram.peak_assets <= status.ram.budget == MB
        assert 1 <= len(status.scenes) <= status.scene_slots == 2
        assert set(status.scenes) <= set(asset_files.scenes)
        assert set(status.actors) <= set(asset_files.actors)
        (worker,) = (worker for worker in status.workers if worker.label == name)
        assert (worker.doing, worker.waits_for) == ("rendering", None)
        assert worker.scene in status.scenes
    last = report.status
    assert (last.state, last.rendered, last.left_s) == ("finished", 12, 0.0)
    assert [worker.doing for worker in last.workers] == ["finished"] * 3
    assert sum(worker.labels_done for worker in last.workers) == 12
    assert (last.vram.assets, last.ram.assets, last.scenes, last.actors) == (0, 0, (), ())
    counts = last.counts
    assert counts.vram_hits + counts.ram_hits + counts.misses >= 12
    assert last.moved.read_from_disk >= sum(map(asset_files.nbytes, [*asset_files.scenes, *asset_files.actors]))
    assert last.moved.uploaded + last.moved.streamed >= last.moved.read_from_disk
    assert msgspec.json.decode(msgspec.json.encode(last), type=RenderStatus) == last
