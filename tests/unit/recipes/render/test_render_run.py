"""Whole runs: the result of each label, its output, and its failures."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.render.coordinator import Coordinator
from gpuyard.recipes.render.memory.read_asset_files import Loader, Source
from gpuyard.recipes.render.planning.assets_and_units import Label, Unit
from gpuyard.recipes.render.status_file import RenderStatus
from gpuyard.ui.cli.recipes.render import VERB
from tests.residency_runs import (
    MB,
    OUTPUT,
    PAGE,
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


@pytest.fixture
def own_asset_files(tmp_path: Path) -> AssetFiles:
    """Assets that a test may damage."""
    return AssetFiles(tmp_path / "assets", SCENES, ACTORS)


# Rendered labels


def test_every_label_is_rendered_once_with_its_own_value(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = asset_files.products(labels=2)
    rendered: Counter[str] = Counter()

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        rendered[label["name"]] += 1
        assert list(out_dir.iterdir()) == []
        write_checksum(scene, frames, label, out_dir)

    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM, render=render)
    check_every_label(units, played, asset_files)
    check_within_budgets(played, ROOM, ROOM)
    assert rendered == Counter({label.name: 1 for unit in units for label in unit.labels})
    assert (played.skipped, played.status.state) == ({}, "finished")


def test_work_may_need_a_scene_an_actor_both_or_nothing(tmp_path: Path, asset_files: AssetFiles) -> None:
    played = play([], tmp_path / "out", vram=ROOM, ram=ROOM)
    assert (played.status.labels, played.status.state) == (0, "finished")
    units = [
        asset_files.unit(0, None),
        asset_files.unit(None, 0),
        asset_files.unit(None, None),
        asset_files.unit(1, 1, labels=0),
    ]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    check_every_label(units, played, asset_files)
    assert not played.skipped


def test_one_file_may_be_a_scene_and_an_actor(asset_files: AssetFiles, tmp_path: Path) -> None:
    path = asset_files.scenes[0]
    units = [Unit(scene=path, actor=path, labels=labels("both")), Unit(scene=path, labels=labels("scene"))]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    check_every_label(units, played, asset_files)
    assert not played.skipped
    assert played.status.moved.read_from_disk == 2 * asset_files.nbytes(path)


def test_streamed_and_resident_actors_give_the_same_output(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [asset_files.unit(None, 1, labels=2)]
    resident = play(units, tmp_path / "resident", vram=ROOM, ram=ROOM)
    from_ram = play(units, tmp_path / "ram", vram=10_000, ram=ROOM)
    from_disk = play(units, tmp_path / "disk", vram=10_000, ram=3 * PAGE)
    assert resident.outputs == from_ram.outputs == from_disk.outputs
    assert len(resident.outputs) == 2
    assert [each.status.counts.streams > 0 for each in (resident, from_ram, from_disk)] == [False, True, True]
    assert from_ram.status.moved.read_from_disk < from_disk.status.moved.read_from_disk


def test_two_labels_are_rendered_at_once_by_default(asset_files: AssetFiles, tmp_path: Path) -> None:
    """More threads launch fewer kernels: they wait for the interpreter and for the driver."""
    played = play(asset_files.products(seed=5), tmp_path / "out", vram=ROOM, ram=ROOM)
    assert len(played.status.workers) == 2
    assert {option.name: option.default for option in VERB.options}["workers"] == "2"


def test_changes_of_a_renderer_to_a_label_do_not_affect_the_next_try(asset_files: AssetFiles, tmp_path: Path) -> None:
    labels_seen = []

    def render(*args: Any) -> None:
        labels_seen.append(dict(args[2]))
        args[2]["name"] = "changed"
        if len(labels_seen) == 1:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    play([asset_files.unit(0, None)], tmp_path / "out", vram=ROOM, ram=ROOM, render=render)
    assert len(labels_seen) == 2
    assert labels_seen[0] == labels_seen[1]


# Skipped labels


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no such file"),
        (lambda path: path.write_bytes(b""), "scene1.ply"),
        (lambda path: os.truncate(path, 900), "scene1.ply"),
        (lambda path: path.write_bytes(b"not a ply file"), "scene1.ply"),
    ],
    ids=["missing", "empty", "truncated", "no ply"],
)
def test_labels_of_a_broken_asset_are_reported_and_the_rest_is_rendered(
    own_asset_files: AssetFiles, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    units = own_asset_files.products()
    damage(Path(own_asset_files.scenes[1]))
    played = play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    check_every_label(units, played, own_asset_files)
    assert played.skipped.keys() == names_of(unit for unit in units if unit.scene == own_asset_files.scenes[1])
    for skip in played.skipped.values():
        assert skip.kind == "asset"
        assert message in skip.reason
        assert skip.scene == own_asset_files.scenes[1]


class Breaking(Loader):
    """Delete a frame as soon as its sequence was measured."""

    def actor(self, path: str) -> Source:
        source = super().actor(path)
        (Path(path) / "frame2.ply").unlink(missing_ok=True)
        return source


@pytest.mark.parametrize("ram", [ROOM, 3 * PAGE], ids=["resident", "from disk"])
def test_an_asset_that_breaks_after_measuring_is_reported_and_the_rest_is_rendered(
    own_asset_files: AssetFiles, tmp_path: Path, ram: int
) -> None:
    units = [own_asset_files.unit(0, None), own_asset_files.unit(None, 1, labels=2), own_asset_files.unit(0, None)]
    played = play(units, tmp_path / "out", vram=ROOM, ram=ram, loader=Breaking())
    check_every_label(units, played, own_asset_files)
    assert played.skipped.keys() == names_of([units[1]])
    assert {skip.kind for skip in played.skipped.values()} == {"asset"}
    assert all("frame2.ply" in skip.reason for skip in played.skipped.values())


def test_a_unit_that_does_not_fit_beside_others_is_rendered_alone(asset_files: AssetFiles, tmp_path: Path) -> None:
    """Two frames of the large actor and the largest scene are more than the device has; each by itself is not."""
    units = [asset_files.unit(2, None), asset_files.unit(None, 1), asset_files.unit(0, 0)]
    vram = asset_files.nbytes(asset_files.scenes[2]) + 64
    played = play(units, tmp_path / "out", vram=vram, ram=ROOM)
    check_every_label(units, played, asset_files)
    check_within_budgets(played, vram, ROOM)
    assert not played.skipped


# Refused runs


def test_two_labels_with_one_name_are_refused_at_once(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [
        Unit(scene=asset_files.scenes[0], labels=labels("a", "b")),
        Unit(scene=asset_files.scenes[1], labels=labels("b")),
    ]
    with pytest.raises(UserError, match="two labels are named 'b'"):
        play(units, tmp_path / "out", vram=ROOM, ram=ROOM)
    assert not (tmp_path / "out").exists()


def test_a_coordinator_that_is_not_open_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not open"):
        Coordinator(vram=1, ram=1).run([], write_checksum, tmp_path)


def test_a_coordinator_can_run_several_times(asset_files: AssetFiles, tmp_path: Path) -> None:
    with opened(WatchedMemory(ROOM), [], vram=1, ram=1) as coordinator:
        for number in range(2):
            units = [asset_files.unit(number, 0)]
            report = in_time(
                lambda units=units, number=number: coordinator.run(units, write_checksum, tmp_path / str(number)),  # type: ignore[misc]
                coordinator.stop,
            )
            assert (report.status.rendered, report.skipped) == (1, ())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vram": 0}, "vram is 0"),
        ({"vram": -1}, "vram is -1"),
        ({"vram": float("nan")}, "vram is nan"),
        ({"ram": "0"}, "ram is 0"),
        ({"actor_budget": 0}, "actor_budget is 0"),
        ({"scene_slots": 0}, "scene_slots is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"order": "best"}, "order is 'best'"),
        ({"vram": "44 gigs"}, "44 gigs"),
    ],
)
def test_invalid_settings_are_refused_with_their_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Coordinator(**{"vram": "1G", "ram": "1G", **settings})
    assert message in caught.value.message


# Stop and resume


def test_a_stopped_run_leaves_complete_outputs_and_skips_nothing(asset_files: AssetFiles, tmp_path: Path) -> None:
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


# Edge cases


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    """Six scenes and three actors of the same sizes."""
    return AssetFiles(tmp_path_factory.mktemp("alike"), scenes=(60,) * 6, actors=((400,) * 8,) * 3)


def save(path: Path, count: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(count))
    return str(path)


def test_many_concurrent_streams_do_not_evict_scenes(alike: AssetFiles, tmp_path: Path) -> None:
    units = alike.products(labels=4)
    largest = max(map(alike.nbytes, alike.scenes))
    played = play(units, tmp_path / "out", vram=8 * largest, ram=MB, workers=4, scene_slots=6)
    check_every_label(units, played, alike)
    assert played.status.counts.streams == len(units)
    assert played.status.moved.uploaded <= 2 * sum(map(alike.nbytes, alike.scenes))


def test_more_scenes_than_slots_are_rendered_in_turn(alike: AssetFiles, tmp_path: Path) -> None:
    units = [alike.unit(number, None) for number in range(6)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, workers=2, scene_slots=2)
    check_every_label(units, played, alike)
    assert played.status.rendered == len(units)


@pytest.mark.parametrize("frames", [1, 3])
def test_a_loader_may_return_arrays_for_an_empty_file(tmp_path: Path, frames: int) -> None:
    for number in range(frames):
        save(tmp_path / "actor" / f"{number}.none", 0)
    unit = Unit(actor=str(tmp_path / "actor"), labels=labels("a", "b", "c"))
    loader = Loader(lambda path: {"x": np.arange(500.0)})
    played = play([unit], tmp_path / "out", vram=MB, ram=MB, loader=loader)
    assert (played.status.rendered, played.status.skipped) == (3, 0)


def test_threads_of_a_renderer_may_read_streamed_frames(alike: AssetFiles, tmp_path: Path) -> None:
    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        with ThreadPoolExecutor(4) as pool:
            read = list(pool.map(lambda number: dict(frames[number]), [*range(len(frames))] * 3))
        (out_dir / OUTPUT).write_text(checksum([scene, *read[: len(frames)]]))
        assert checksum(read[: len(frames)]) == checksum(read[len(frames) : 2 * len(frames)])

    units = [alike.unit(0, number, labels=2) for number in range(3)]
    played = play(units, tmp_path / "out", vram=60 * 1024, ram=MB, render=render)
    check_every_label(units, played, alike)
    assert played.status.counts.streams > 0


def test_frames_larger_than_their_files_are_streamed(tmp_path: Path) -> None:
    for number in range(20):
        save(tmp_path / "actor" / f"{number}.z", 100 + 20 * number)
    loader = Loader(lambda path: {"x": np.ones(100 * Path(path).stat().st_size, np.uint8)})
    unit = Unit(actor=str(tmp_path / "actor"), labels=labels("a", "b", "c"))
    played = play([unit], tmp_path / "out", vram=200 * 1024, ram=60 * PAGE, loader=loader)
    assert (played.status.rendered, played.status.skipped) == (3, 0)
    assert played.pool.peak <= 60 * PAGE


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), KeyboardInterrupt(), MemoryError("no more")])
def test_any_exception_of_a_renderer_ends_its_label(alike: AssetFiles, tmp_path: Path, raised: BaseException) -> None:
    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        if label["name"] == unlucky:
            raise raised
        (out_dir / OUTPUT).write_text(checksum([scene]))

    units = [alike.unit(0, None, labels=3)]
    unlucky = units[0].labels[0].name
    played = play(units, tmp_path / "out", vram=MB, ram=MB, render=render)
    assert (played.status.rendered, set(played.skipped)) == (2, {unlucky})


def test_a_label_that_cannot_be_copied_is_reported(alike: AssetFiles, tmp_path: Path) -> None:
    unit = Unit(scene=alike.scenes[0], labels=(Label(name="bad", value=threading.Lock()), *labels("good", "better")))
    played = play([unit], tmp_path / "out", vram=MB, ram=MB)
    assert (played.status.rendered, played.skipped["bad"].kind) == (2, "renderer")


def test_an_error_raised_in_many_workers_keeps_no_frames_alive(tmp_path: Path) -> None:
    def load(path: str) -> dict[str, Any]:
        raise ValueError("no")

    path = save(tmp_path / "a.scene", 10)
    units = [Unit(scene=path, labels=labels(f"u{number}")) for number in range(60)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, loader=Loader(load))
    assert len(played.skipped) == 60
    assert {skip.reason for skip in played.skipped.values()} == {f"{path}: its loader failed: ValueError: no"}


def test_a_coordinator_has_one_run_at_a_time(alike: AssetFiles, tmp_path: Path) -> None:
    refused: list[str] = []
    with Coordinator(vram=1, ram=1, device="host") as opened:

        def render(*_: Any) -> None:
            with pytest.raises(UserError) as caught:
                opened.run([], render, tmp_path / "other")
            refused.append(caught.value.message)

        opened.run([alike.unit(0, None)], render, tmp_path / "out")
        with pytest.raises(UserError, match="already open"), opened:
            pass
    assert refused == ["this coordinator is already running"]


def test_a_renderer_that_changes_the_working_directory_does_not_move_the_outputs(
    alike: AssetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    away = tmp_path / "away"
    away.mkdir()

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        monkeypatch.chdir(away)
        (out_dir / OUTPUT).write_text(checksum([scene]))

    units = [alike.unit(0, None, labels=3)]
    with Coordinator(vram=1, ram=1, device="host", workers=1) as opened:
        assert opened.run(units, render, "out").status.rendered == 3
    assert len(list((tmp_path / "out").glob(f"*/{OUTPUT}"))) == 3


def test_a_device_that_refuses_every_asset_ends_the_run_with_a_report(alike: AssetFiles, tmp_path: Path) -> None:
    memory = WatchedMemory(MB, fails=lambda number, nbytes: RuntimeError("CUDA error: an illegal memory access"))
    units = [alike.unit(0, None, labels=3), alike.unit(1, None, labels=2)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, memory=memory)
    assert {skip.kind for skip in played.skipped.values()} == {"asset"}
    assert len(played.skipped) == 5
    assert "an illegal memory access" in played.skipped[units[0].labels[0].name].reason
