"""The course of a run: stop and resume, wrong size estimates, what the run learns, and its status."""

import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpuyard.errors import UserError
from gpuyard.residency.loading.asset_loader import Loader
from gpuyard.residency.planning.render_units import Unit
from gpuyard.residency.running.status_file import RenderStatus
from tests.residency_runs import (
    MB,
    AssetFiles,
    WatchedMemory,
    WatchedPool,
    check_every_label,
    check_within_budgets,
    checksum,
    in_time,
    labels,
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


def fail(*_: Any) -> None:
    raise ValueError("a mistake of mine")


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


def test_a_second_run_needs_resume_to_keep_complete_outputs(asset_files: AssetFiles, tmp_path: Path) -> None:
    units, out = [asset_files.unit(0, 0, labels=2)], tmp_path / "out"
    play(units, out, vram=ROOM, ram=ROOM)
    with pytest.raises(UserError, match="already exists"):
        play(units, out, vram=ROOM, ram=ROOM)

    def refuse(*_: Any) -> None:
        pytest.fail("it was rendered again")

    played = play(units, out, vram=ROOM, ram=ROOM, resume=True, render=refuse)
    check_every_label(units, played, asset_files)
    assert (played.status.already, played.status.rendered, played.status.moved.read_from_disk) == (2, 0, 0)


def test_skipped_labels_are_tried_again_by_the_next_run(asset_files: AssetFiles, tmp_path: Path) -> None:
    units, out = [asset_files.unit(0, 0, labels=2)], tmp_path / "out"
    first = play(units, out, vram=ROOM, ram=ROOM, render=fail)
    assert len(first.skipped) == 2
    second = play(units, out, vram=ROOM, ram=ROOM, resume=True)
    check_every_label(units, second, asset_files)
    assert not second.skipped


# Estimates and learning


def loaded(path: str) -> dict[str, Any]:
    """Load a file named `<name>.<bytes in memory>`; its content is ignored."""
    return {"x": np.arange(int(path.rpartition(".")[2]), dtype="u1")}


def asset(path: Path, on_disk: int) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"." * on_disk)
    return str(path)


def test_wrong_size_estimates_are_corrected_during_the_run(tmp_path: Path) -> None:
    larger, smaller = asset(tmp_path / "a.50000", 1_000), asset(tmp_path / "b.1000", 50_000)
    nothing = asset(tmp_path / "c.3000", 0)
    actor = str(tmp_path / "actor")
    for number in range(4):
        asset(tmp_path / "actor" / f"{number}.20000", 2_000)
    units = [
        Unit(scene=scene, actor=actor if number % 2 else None, labels=labels(f"label{number}"))
        for number, scene in enumerate([larger, smaller, nothing, larger, smaller, nothing])
    ]
    played = play(units, tmp_path / "out", vram=110_000, ram=300_000, loader=Loader(loaded), workers=2)
    assert not played.skipped
    check_within_budgets(played, 110_000, 300_000)
    frames = [loaded("20000")] * 4
    assert played.outputs == {
        f"label{number}": checksum([loaded(path), *(frames if number % 2 else [])])
        for number, path in enumerate([larger, smaller, nothing, larger, smaller, nothing])
    }


def test_an_asset_that_turns_out_too_large_is_reported_and_the_rest_is_rendered(tmp_path: Path) -> None:
    units = [
        Unit(scene=asset(tmp_path / "a.50000", 1_000), labels=labels("a1", "a2")),
        Unit(scene=asset(tmp_path / "b.1000", 1_000), labels=labels("b1", "b2")),
    ]
    played = play(units, tmp_path / "out", vram=40_000, ram=300_000, loader=Loader(loaded))
    assert played.outputs.keys() == {"b1", "b2"}
    assert {name: skip.kind for name, skip in played.skipped.items()} == {"a1": "too-large", "a2": "too-large"}
    assert played.skipped["a1"].sizes == {"scene": 50_000}


def test_any_exception_of_a_loader_is_reported_and_the_rest_is_rendered(
    asset_files: AssetFiles, tmp_path: Path
) -> None:
    def load(path: str) -> dict[str, Any]:
        if path == asset_files.scenes[0]:
            raise MemoryError("no more")
        return {"x": np.zeros(100)}

    units = [asset_files.unit(number % 3, None, labels=2) for number in range(6)]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM, loader=Loader(load))
    assert played.skipped.keys() == names_of(unit for unit in units if unit.scene == asset_files.scenes[0])
    assert all("no more" in skip.reason for skip in played.skipped.values())
    assert len(played.outputs) == 8


def test_the_memory_use_of_the_renderer_is_learned_and_kept_free(asset_files: AssetFiles, tmp_path: Path) -> None:
    """Until then assets are evicted on failure; without learning this would happen for nearly every unit."""
    units = asset_files.products(labels=1, seed=2) * 1
    units += [Unit(scene=unit.scene, actor=unit.actor, labels=labels(f"again{n}")) for n, unit in enumerate(units)]
    vram = 75_000
    memory = WatchedMemory(vram)

    def render(*args: Any) -> None:
        own = memory.allocate(28_000)
        try:
            write_checksum(*args)
        finally:
            memory.free(own)

    played = play(
        units, tmp_path / "out", vram=vram, ram=ROOM, memory=memory, render=render, working=0, workers=1, scene_slots=2
    )
    check_every_label(units, played, asset_files)
    assert not played.skipped
    assert memory.peak() <= vram
    assert played.status.counts.out_of_memory <= 4


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
