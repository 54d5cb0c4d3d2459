"""Streamed frames have the interface of frames in VRAM, in any order of access."""

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuyard.errors import AssetError, DeviceFull
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.memory.assets_in_use import ActorCache, Frames
from tests.residency_files import points
from tests.residency_runs import (
    DEADLINE_S,
    PAGE,
    AssetFiles,
    WatchedMemory,
    WatchedPool,
    checksum,
    columns_of,
    tiers_over,
)

FRAMES = (40, 270, 10, 200, 90, 260, 150)
VRAM = 12_000  # for two frames, but not all
RAM = 1 << 20
LITTLE_RAM = 3 * PAGE  # for two frames, but not all


@pytest.fixture(scope="module")
def asset_files(tmp_path_factory: pytest.TempPathFactory) -> AssetFiles:
    return AssetFiles(tmp_path_factory.mktemp("assets"), (), (FRAMES, (500,)))


def right(frame: int) -> dict[str, Any]:
    return columns_of(points(FRAMES[frame], frame))


@contextlib.contextmanager
def streaming(
    asset_files: AssetFiles, ram: int = RAM, memory: WatchedMemory | None = None, actor: int = 0
) -> Iterator[tuple[Frames, Tiers, WatchedPool]]:
    with tiers_over([asset_files.unit(None, actor)], vram=VRAM, ram=ram, memory=memory) as (tiers, pool):
        handed = tiers.next_unit()
        assert handed is not None
        number, unit = handed
        with tiers.memory.lane() as lane, ActorCache(tiers, pool).hold(unit.actor, number, lane) as frames:
            yield frames, tiers, pool


@pytest.fixture(params=[RAM, LITTLE_RAM], ids=["from RAM", "from disk"])
def frames(request: pytest.FixtureRequest, asset_files: AssetFiles) -> Iterator[Frames]:
    with streaming(asset_files, request.param) as (frames, *_):
        yield frames


def test_streamed_frames_have_the_interface_of_frames_in_vram(frames: Frames) -> None:
    numbers = tuple(range(len(FRAMES)))
    assert checksum([frames[-1]]) == checksum([right(6)])
    for cut in (slice(1, 3), slice(None, None, -2), slice(-2, None), slice(3, 1), slice(0, 99)):
        assert checksum(frames[cut]) == checksum(right(number) for number in numbers[cut])
    for outside in (7, -8):
        with pytest.raises(IndexError):
            frames[outside]
    frame = frames[1]
    assert sorted(frame) == ["blue", "green", "red", "x", "y", "z"]
    assert (len(frame), "x" in frame, "w" in frame) == (6, True, False)
    table = right(1)
    assert np.array_equal(frame.columns("x", "y", "z"), np.stack([table[name] for name in "xyz"], axis=1))
    with pytest.raises(KeyError):
        frame["w"]
    assert frame.path.endswith("actor0")
    kept = [(number, frames[number]["x"], frames[number].columns("y", "z")) for number in (0, 1, 2, 3, 4, 0)]
    for number, x, yz in kept:
        table = right(number)
        assert np.array_equal(x, table["x"])
        assert np.array_equal(yz, np.stack([table["y"], table["z"]], axis=1))
    first, last = frames[0], frames[4]
    for name in ("x", "red", "z", "blue"):
        assert np.array_equal(first[name], right(0)[name])
        assert np.array_equal(last[name], right(4)[name])


class LateCopies(WatchedMemory):
    """Delay copies from a frame until the next frame has arrived."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self._uploads = threading.Semaphore(0)

    def upload(self, *arguments: Any, **options: Any) -> None:
        super().upload(*arguments, **options)
        self._uploads.release()

    def clone(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        for _ in range(2):
            assert self._uploads.acquire(timeout=DEADLINE_S), "the next frame is not loaded ahead of time"
        return super().clone(array)


@pytest.mark.parametrize("ram", [RAM, LITTLE_RAM], ids=["from RAM", "from disk"])
def test_the_next_frame_does_not_overwrite_the_frame_in_use(asset_files: AssetFiles, ram: int) -> None:
    with streaming(asset_files, ram, LateCopies(VRAM)) as (frames, *_):
        assert np.array_equal(frames[1]["x"], right(1)["x"])


@settings(max_examples=15)
@given(st.lists(st.integers(-7, 6), max_size=12), st.sampled_from([RAM, LITTLE_RAM]))
def test_any_order_gives_the_right_frames(asset_files: AssetFiles, order: Sequence[int], ram: int) -> None:
    with streaming(asset_files, ram) as (frames, *_):
        assert checksum(frames[number] for number in order) == checksum(right(number % 7) for number in order)


def test_a_stream_stays_within_its_reserved_memory(asset_files: AssetFiles) -> None:
    memory = WatchedMemory(VRAM)
    with streaming(asset_files, LITTLE_RAM, memory) as (frames, tiers, pool):
        checksum(frames)
        assert memory.used() == tiers.vram_nbytes() <= VRAM
        assert pool.in_use == tiers.ram_nbytes() <= LITTLE_RAM
    assert memory.peak() <= VRAM


def test_a_sequence_of_one_frame_is_streamed_through_one_buffer(asset_files: AssetFiles) -> None:
    with streaming(asset_files, actor=1) as (frames, *_):
        assert len(frames) == 1
        for _ in range(2):
            assert checksum([frames[0]]) == checksum([columns_of(points(500, 100))])


def test_an_unreadable_frame_is_reported_and_other_frames_can_be_read(tmp_path: Path) -> None:
    asset_files = AssetFiles(tmp_path / "assets", (), (FRAMES,))
    with streaming(asset_files, LITTLE_RAM) as (frames, *_):
        os.truncate(Path(asset_files.actors[0]) / "frame2.ply", 220)
        for number in (0, 1, 3, 4):
            assert checksum([frames[number]]) == checksum([right(number)])
        for _ in range(2):
            with pytest.raises(AssetError, match=r"frame2\.ply"):
                checksum([frames[2]])
        assert checksum([frames[1]]) == checksum([right(1)])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_buffer_allocation_leaves_no_buffer_behind(asset_files: AssetFiles, failing: int) -> None:
    """It is retried with more assets evicted until nothing is left to evict."""
    memory = WatchedMemory(VRAM, lambda number, _: DeviceFull("full") if number >= failing else None)
    with pytest.raises(DeviceFull, match="full"), streaming(asset_files, memory=memory):
        pytest.fail("it was streamed")
    assert memory.live == 0
