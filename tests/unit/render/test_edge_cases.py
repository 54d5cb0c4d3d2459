"""Edge cases that could make runs hang, move too much, or report something wrong."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.render.coordinator import Coordinator
from gpuyard.recipes.render.memory.read_asset_files import Loader
from gpuyard.recipes.render.planning.assets_and_units import Budgets, Label, StallCause, Unit, limits_of
from gpuyard.recipes.render.planning.transfer_plan import PlanState, plan
from tests.residency_runs import MB, OUTPUT, PAGE, AssetFiles, WatchedMemory, check_every_label, checksum, play
from tests.unit.render.plan_simulation import scene

KB = 1024


@pytest.fixture
def asset_files(tmp_path: Path) -> AssetFiles:
    return AssetFiles(tmp_path / "assets", scenes=(60,) * 6, actors=((400,) * 8,) * 3)


def labels(prefix: str, count: int) -> tuple[Label, ...]:
    return tuple(Label(name=f"{prefix}{number}", value={}) for number in range(count))


def save(path: Path, count: int) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(count))
    return str(path)


def test_many_concurrent_streams_do_not_evict_scenes(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = asset_files.products(labels=4)
    largest = max(map(asset_files.nbytes, asset_files.scenes))
    played = play(units, tmp_path / "out", vram=8 * largest, ram=MB, workers=4, scene_slots=6)
    check_every_label(units, played, asset_files)
    assert played.status.counts.streams == len(units)
    assert played.status.moved.uploaded <= 2 * sum(map(asset_files.nbytes, asset_files.scenes))


def test_more_scenes_than_slots_are_rendered_in_turn(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [asset_files.unit(number, None) for number in range(6)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, workers=2, scene_slots=2)
    check_every_label(units, played, asset_files)
    assert played.status.rendered == len(units)


@pytest.mark.parametrize("frames", [1, 3])
def test_a_loader_may_return_arrays_for_an_empty_file(tmp_path: Path, frames: int) -> None:
    for number in range(frames):
        save(tmp_path / "actor" / f"{number}.none", 0)
    unit = Unit(actor=str(tmp_path / "actor"), labels=labels("l", 3))
    loader = Loader(lambda path: {"x": np.arange(500.0)})
    played = play([unit], tmp_path / "out", vram=MB, ram=MB, loader=loader)
    assert (played.status.rendered, played.status.skipped) == (3, 0)


def test_threads_of_a_renderer_may_read_streamed_frames(asset_files: AssetFiles, tmp_path: Path) -> None:
    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        with ThreadPoolExecutor(4) as pool:
            read = list(pool.map(lambda number: dict(frames[number]), [*range(len(frames))] * 3))
        (out_dir / OUTPUT).write_text(checksum([scene, *read[: len(frames)]]))
        assert checksum(read[: len(frames)]) == checksum(read[len(frames) : 2 * len(frames)])

    units = [asset_files.unit(0, number, labels=2) for number in range(3)]
    played = play(units, tmp_path / "out", vram=60 * KB, ram=MB, render=render)
    check_every_label(units, played, asset_files)
    assert played.status.counts.streams > 0


def test_frames_larger_than_their_files_are_streamed(tmp_path: Path) -> None:
    for number in range(20):
        save(tmp_path / "actor" / f"{number}.z", 100 + 20 * number)
    loader = Loader(lambda path: {"x": np.ones(100 * Path(path).stat().st_size, np.uint8)})
    unit = Unit(actor=str(tmp_path / "actor"), labels=labels("l", 3))
    played = play([unit], tmp_path / "out", vram=200 * KB, ram=60 * PAGE, loader=loader)
    assert (played.status.rendered, played.status.skipped) == (3, 0)
    assert played.pool.peak <= 60 * PAGE


def test_labels_that_never_fit_are_read_once_more_and_do_not_affect_others(
    asset_files: AssetFiles, tmp_path: Path
) -> None:
    units = [asset_files.unit(number, None, labels=3) for number in range(6)]
    poor = {label.name for label in units[2].labels}

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        if label["name"] in poor:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        (out_dir / OUTPUT).write_text(checksum([scene]))

    played = play(units, tmp_path / "out", vram=MB, ram=MB, render=render, workers=2)
    assert played.skipped.keys() == poor
    assert {skip.kind for skip in played.skipped.values()} == {"out-of-memory"}
    assert played.status.moved.read_from_disk == sum(map(asset_files.nbytes, asset_files.scenes)) + asset_files.nbytes(
        asset_files.scenes[2]
    )
    assert {skip.state["vram_working"] for skip in played.skipped.values()} == {0}


@pytest.mark.parametrize("raised", [asyncio.CancelledError(), KeyboardInterrupt(), MemoryError("no more")])
def test_any_exception_of_a_renderer_ends_its_label_only(
    asset_files: AssetFiles, tmp_path: Path, raised: BaseException
) -> None:
    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        if label["name"] == "label0":
            raise raised
        (out_dir / OUTPUT).write_text(checksum([scene]))

    units = [asset_files.unit(0, None, labels=3)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, render=render)
    assert (played.status.rendered, set(played.skipped)) == (2, {"label0"})


def test_a_label_that_cannot_be_copied_is_reported(asset_files: AssetFiles, tmp_path: Path) -> None:
    unit = Unit(scene=asset_files.scenes[0], labels=(Label(name="bad", value=threading.Lock()), *labels("good", 2)))
    played = play([unit], tmp_path / "out", vram=MB, ram=MB)
    assert (played.status.rendered, played.skipped["bad"].kind) == (2, "renderer")


def test_an_error_raised_in_many_workers_keeps_no_frames_alive(tmp_path: Path) -> None:
    def load(path: str) -> dict[str, Any]:
        raise ValueError("no")

    path = save(tmp_path / "a.scene", 10)
    units = [Unit(scene=path, labels=labels(f"u{number}-", 1)) for number in range(60)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, loader=Loader(load))
    assert len(played.skipped) == 60
    assert {skip.reason for skip in played.skipped.values()} == {f"{path}: its loader failed: ValueError: no"}


def test_a_coordinator_has_one_run_at_a_time(asset_files: AssetFiles, tmp_path: Path) -> None:
    refused: list[str] = []
    with Coordinator(vram=1, ram=1, device="host") as opened:

        def render(*_: Any) -> None:
            with pytest.raises(UserError) as caught:
                opened.run([], render, tmp_path / "other")
            refused.append(caught.value.message)

        opened.run([asset_files.unit(0, None)], render, tmp_path / "out")
        with pytest.raises(UserError, match="already open"), opened:
            pass
    assert refused == ["this coordinator is already running"]


def test_a_renderer_that_changes_the_working_directory_does_not_move_the_outputs(
    asset_files: AssetFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    away = tmp_path / "away"
    away.mkdir()

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        monkeypatch.chdir(away)
        (out_dir / OUTPUT).write_text(checksum([scene]))

    units = [asset_files.unit(0, None, labels=3)]
    with Coordinator(vram=1, ram=1, device="host", workers=1) as opened:
        assert opened.run(units, render, "out").status.rendered == 3
    assert len(list((tmp_path / "out").glob(f"*/{OUTPUT}"))) == 3


def test_waiting_for_a_free_reader_is_shown_as_waiting_for_the_disk() -> None:
    assets = {asset.key: asset for asset in (scene(0, 10), scene(1, 10))}
    limits = limits_of(assets.values(), Budgets(vram=100, ram=100))
    asked = dict.fromkeys(assets, 0)
    state = PlanState(limits=limits, assets=assets, requested=asked, readers=1, next_after=lambda *_: None)
    assert set(plan(state).waits.values()) == {StallCause.DISK}


def test_a_device_that_refuses_every_asset_ends_the_run_with_a_report(asset_files: AssetFiles, tmp_path: Path) -> None:
    memory = WatchedMemory(MB, fails=lambda number, nbytes: RuntimeError("CUDA error: an illegal memory access"))
    units = [asset_files.unit(0, None, labels=3), asset_files.unit(1, None, labels=2)]
    played = play(units, tmp_path / "out", vram=MB, ram=MB, memory=memory)
    assert {skip.kind for skip in played.skipped.values()} == {"asset"}
    assert len(played.skipped) == 5
    assert "an illegal memory access" in played.skipped["label0"].reason
