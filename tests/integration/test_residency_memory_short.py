"""Out-of-memory errors at each allocation in turn, in renderers, and permanently: all that fits is rendered."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import DeviceFull
from gpuyard.recipes.render.planning.assets_and_units import Unit
from tests.residency_runs import AssetFiles, Played, WatchedMemory, check_every_label, play, write_checksum
from tests.scale import some

SCENES = (60, 80, 100, 120)  # splats of 248 bytes
ACTORS = ((200, 250), (150,) * 4, (900,) * 6)  # the last one is always streamed
VRAM = 100 * 1024
RAM = 200 * 1024
PYTORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.06 GiB is "
    "free. Process 4711 has 22.58 GiB memory in use."
)


class OutOfMemoryError(RuntimeError):
    """Has the name of PyTorch's error."""


ERRORS: dict[str, Callable[[], Exception]] = {
    "a full device": lambda: DeviceFull("the device is full"),
    "as PyTorch says it": lambda: RuntimeError(PYTORCH_SAYS),
    "as PyTorch names it": lambda: OutOfMemoryError("no text that anybody knows"),
}
each_error = pytest.mark.parametrize("error", some(ERRORS.values(), 0), ids=ERRORS)


@pytest.fixture(scope="module")
def asset_files(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    return AssetFiles(tmp_path_factory.mktemp("assets"), SCENES, ACTORS)


def run(units: list[Unit], out: Path, **settings: Any) -> Played:
    return play(units, out, **{"vram": VRAM, "ram": RAM, "scene_slots": 2, "workers": 2, **settings})


def failing_at(numbers: range, error: Callable[[], Exception]) -> Callable[[int, int], Exception | None]:
    """Return a hook that raises `error` at the allocations with these numbers, in order of allocation."""
    return lambda number, _: error() if number in numbers else None


def some_of_each(asset_files: AssetFiles) -> list[Unit]:
    return [
        *(asset_files.unit(scene, scene % 3) for scene in range(len(SCENES))),
        asset_files.unit(0, None),
        asset_files.unit(None, 2),
        asset_files.unit(1, 0, labels=2),
    ]


@each_error
def test_a_single_failed_allocation_skips_no_label(
    asset_files: AssetFiles, tmp_path: Path, error: Callable[[], Exception]
) -> None:
    units = some_of_each(asset_files)
    streamed = 0
    for failing in count(1):
        memory = WatchedMemory(VRAM, failing_at(range(failing, failing + 1), error))
        played = run(units, tmp_path / str(failing), memory=memory)
        check_every_label(units, played, asset_files)
        assert not played.skipped, failing
        streamed += played.status.counts.streams
        if memory.allocations < failing:
            break
    assert failing > 8
    assert streamed


@each_error
def test_a_renderer_that_runs_out_of_memory_once_skips_no_label(
    asset_files: AssetFiles, tmp_path: Path, error: Callable[[], Exception]
) -> None:
    units = some_of_each(asset_files)
    for failing in range(1, 9):
        calls = count(1)

        def render(*args: Any, failing: int = failing, calls: Any = calls) -> None:
            write_checksum(*args)
            if next(calls) == failing:
                raise error()

        played = run(units, tmp_path / str(failing), render=render)
        check_every_label(units, played, asset_files)
        assert not played.skipped


def test_only_assets_that_can_never_be_allocated_are_skipped(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [*some_of_each(asset_files), asset_files.unit(3, None, labels=3)]
    too_large = asset_files.nbytes(asset_files.scenes[3]) - 100
    memory = WatchedMemory(VRAM, lambda _, nbytes: DeviceFull("no such block") if nbytes > too_large else None)
    played = run(units, tmp_path / "out", memory=memory)
    check_every_label(units, played, asset_files)
    needing = {label.name for unit in units for label in unit.labels if unit.scene == asset_files.scenes[3]}
    assert len(needing) == 4
    assert played.skipped.keys() == needing
    for skip in played.skipped.values():
        assert (skip.kind, skip.reason) == ("out-of-memory", "no such block")
        assert skip.scene == asset_files.scenes[3]
        assert skip.sizes["scene"] == asset_files.nbytes(asset_files.scenes[3])
        assert skip.state["vram_budget"] == VRAM


def test_a_renderer_that_needs_the_whole_device_gets_it_at_the_end(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [asset_files.unit(scene, actor, labels=2) for scene in range(4) for actor in range(2)]
    memory = WatchedMemory(4 * VRAM)

    def render(*args: Any) -> None:
        if memory.live > 2:
            raise RuntimeError(PYTORCH_SAYS)
        write_checksum(*args)

    played = run(units, tmp_path / "out", vram=4 * VRAM, memory=memory, render=render, workers=3, scene_slots=4)
    check_every_label(units, played, asset_files)
    assert not played.skipped


def test_only_labels_that_run_out_of_memory_alone_are_skipped(asset_files: AssetFiles, tmp_path: Path) -> None:
    units = [asset_files.unit(scene, None, labels=2) for scene in range(4)]
    hungry = {label.name for label in units[2].labels}

    def render(scene: Any, frames: Any, label: Any, out_dir: Path) -> None:
        write_checksum(scene, frames, label, out_dir)
        if label["name"] in hungry:
            raise RuntimeError(PYTORCH_SAYS)

    played = run(units, tmp_path / "out", vram=10 * VRAM, ram=10 * RAM, render=render, workers=3, scene_slots=4)
    check_every_label(units, played, asset_files)
    assert played.skipped.keys() == hungry
    for skip in played.skipped.values():
        assert skip.kind == "out-of-memory"
        assert skip.reason.startswith("CUDA out of memory")
        assert {"vram_budget", "vram_assets", "ram_budget"} <= skip.state.keys()
        assert skip.state["vram_working"] == 0
    scenes = [*asset_files.scenes, asset_files.scenes[2]]  # which is read once more
    assert played.status.moved.read_from_disk == sum(map(asset_files.nbytes, scenes))
    assert not list((tmp_path / "out").glob(".partial/*"))


def test_a_renderer_out_of_memory_frees_the_device_before_its_retry(asset_files: AssetFiles, tmp_path: Path) -> None:
    """Device memory held by frames of the renderer's traceback must be free when the renderer is called again."""
    units = [asset_files.unit(0, 0)]
    alive: list[int] = []

    class Texture:
        count = 0

        def __init__(self) -> None:
            Texture.count += 1

        def __del__(self) -> None:
            Texture.count -= 1

    def render(*args: Any) -> None:
        alive.append(Texture.count)
        texture = Texture()
        if len(alive) < 3:
            raise RuntimeError(f"{PYTORCH_SAYS} {type(texture).__name__}")
        write_checksum(*args)

    played = run(units, tmp_path / "out", render=render)
    check_every_label(units, played, asset_files)
    assert alive == [0, 0, 0]
