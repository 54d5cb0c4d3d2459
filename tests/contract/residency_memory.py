"""The contract of a device's memory (`residency.memory.device_memory.DeviceMemory`), as the tiers use it.

To test an implementation, subclass `MemoryContract` with a fixture `memory`: empty, with a budget of `BUDGET` bytes.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from gpuyard.errors import DeviceFull
from gpuyard.recipes.render.memory.device_memory import Buffer, DeviceMemory

MB = 1048576
BUDGET = 256 * MB
PAGE = 1 << 16
# An allocator may round each buffer up, and need some memory for itself.
SLACK = 24 * MB
TYPES = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")


def paged(memory: DeviceMemory, content: bytes, splits: Sequence[int] = ()) -> list[memoryview]:
    """Return the bytes on pages, as views that end at `splits`."""
    ends = [0, *splits, len(content)]
    views = []
    for start, end in pairwise(ends):
        view = memory.page(PAGE)[: end - start]
        view[:] = content[start:end]
        views.append(view)
    return views


def uploaded(memory: DeviceMemory, content: bytes) -> Buffer:
    buffer = memory.allocate(len(content))
    memory.upload(paged(memory, content), buffer)
    return buffer


def downloaded(memory: DeviceMemory, buffer: Buffer, nbytes: int) -> bytes:
    views = paged(memory, bytes(nbytes))
    memory.download(buffer, views)
    return b"".join(views)


def some_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


class MemoryContract:
    def test_a_page_is_writable_and_has_the_requested_size(self, memory: DeviceMemory) -> None:
        page = memory.page(PAGE)
        assert (page.nbytes, page.itemsize, page.readonly) == (PAGE, 1, False)
        page[:3] = b"abc"
        assert bytes(page[:3]) == b"abc"

    @pytest.mark.parametrize("splits", [(), (1,), (7, 7, 4096), (1, 2, 3, 40_001)])
    def test_bytes_come_back_however_they_are_split(self, memory: DeviceMemory, splits: tuple[int, ...]) -> None:
        content = some_bytes(50_003)
        buffer = memory.allocate(len(content))
        memory.upload(paged(memory, content, splits), buffer)
        back = paged(memory, bytes(len(content)), (33, 49_999))
        memory.download(buffer, back)
        assert b"".join(back) == content

    def test_an_upload_of_less_than_the_buffer_fills_its_beginning(self, memory: DeviceMemory) -> None:
        buffer = uploaded(memory, b"0123456789")
        memory.upload(paged(memory, b"abc"), buffer)
        assert downloaded(memory, buffer, 10) == b"abc3456789"

    def test_a_buffer_of_nothing_takes_nothing(self, memory: DeviceMemory) -> None:
        buffer = memory.allocate(0)
        memory.upload([], buffer)
        memory.download(buffer, [])
        assert memory.view(buffer, dtype="f4", shape=(0, 3), offset=0, strides=(3, 1)).tolist() == []
        memory.free(buffer)

    def test_an_array_lies_in_the_buffer_at_its_offset(self, memory: DeviceMemory) -> None:
        numbers = np.arange(12, dtype=np.float32)
        buffer = uploaded(memory, numbers.tobytes() + b"odd")
        array = memory.view(buffer, dtype="f4", shape=(4, 2), offset=16, strides=(2, 1))
        assert tuple(array.shape) == (4, 2)
        assert array.tolist() == numbers[4:].reshape(4, 2).tolist()

    def test_columns_of_rows_are_arrays_with_strides(self, memory: DeviceMemory) -> None:
        rows = np.arange(30, dtype=np.int16).reshape(10, 3)
        buffer = uploaded(memory, rows.tobytes())
        column = memory.view(buffer, dtype="i2", shape=(10,), offset=2, strides=(3,))
        assert column.tolist() == rows[:, 1].tolist()
        two = memory.view(buffer, dtype="i2", shape=(10, 2), offset=2, strides=(3, 1))
        assert two.tolist() == rows[:, 1:].tolist()

    @pytest.mark.parametrize("dtype", TYPES)
    def test_an_array_is_of_the_type_it_was_written_as(self, memory: DeviceMemory, dtype: str) -> None:
        values = np.array([0, 1, 1], dtype)
        array = memory.view(uploaded(memory, values.tobytes()), dtype=dtype, shape=(3,), offset=0, strides=(1,))
        assert array.tolist() == values.tolist()

    def test_a_clone_is_the_callers_own(self, memory: DeviceMemory) -> None:
        buffer = uploaded(memory, b"before")
        with memory.lane() as lane:
            clone = memory.clone(memory.view(buffer, dtype="u1", shape=(6,), offset=0, strides=(1,)))
            lane.finish()
            memory.upload(paged(memory, b"after!"), buffer)
            memory.free(buffer)
            assert bytes(clone.tolist()) == b"before"

    def test_an_allocation_that_does_not_fit_is_refused_and_changes_nothing(self, memory: DeviceMemory) -> None:
        first, second = memory.allocate(100 * MB), memory.allocate(100 * MB)
        used = memory.used()
        with pytest.raises(DeviceFull):
            memory.allocate(100 * MB)
        assert memory.used() == used
        memory.free(first)
        third = memory.allocate(100 * MB)
        assert memory.used() == used
        for buffer in (second, third):
            memory.free(buffer)

    def test_nearly_the_whole_budget_can_be_allocated_repeatedly(self, memory: DeviceMemory) -> None:
        for size in (BUDGET - SLACK, 60 * MB, BUDGET - SLACK, MB):
            memory.free(memory.allocate(size))
        buffer = memory.allocate(BUDGET - SLACK)
        memory.free(buffer)
        again = memory.allocate(BUDGET - SLACK)
        assert again is not buffer, "a freed buffer is free even while it is referenced"
        memory.free(again)

    def test_used_memory_is_what_was_not_freed_and_the_peak_its_maximum_at_one_time(self, memory: DeviceMemory) -> None:
        assert memory.used() == 0
        for _ in range(3):
            memory.free(memory.allocate(10 * MB))
        assert memory.peak() == 10 * MB
        buffers = [memory.allocate(30 * MB), memory.allocate(5 * MB)]
        assert memory.used() == 35 * MB
        for buffer in buffers:
            memory.free(buffer)
        assert (memory.used(), memory.peak()) == (0, 35 * MB)

    def test_emptying_the_cache_keeps_used_buffers(self, memory: DeviceMemory) -> None:
        buffer = uploaded(memory, b"still here")
        memory.free(memory.allocate(50 * MB))
        memory.empty_cache()
        assert downloaded(memory, buffer, 10) == b"still here"

    def test_the_work_of_a_lane_is_done_after_finish(self, memory: DeviceMemory) -> None:
        source, target = uploaded(memory, b"new"), uploaded(memory, b"old")
        with memory.lane() as lane:
            for_bytes = {"dtype": "u1", "shape": (3,), "offset": 0, "strides": (1,)}
            memory.view(target, **for_bytes)[:] = memory.view(source, **for_bytes)  # type: ignore[arg-type]
            lane.finish()
        assert downloaded(memory, target, 3) == b"new"

    def test_an_upload_waits_until_a_lane_no_longer_uses_the_buffer(self, memory: DeviceMemory) -> None:
        """A stream has two buffers: the next frame must not overwrite a frame that is still being drawn."""
        nbytes = 8 * MB
        buffer, drawn = memory.allocate(nbytes), memory.allocate(nbytes)
        pages = [memory.page(nbytes), memory.page(nbytes)]
        pages[0][:], pages[1][:] = b"1" * nbytes, b"2" * nbytes
        memory.upload(pages[:1], buffer)
        with memory.lane() as lane:
            frame = memory.view(buffer, dtype="u1", shape=(nbytes,), offset=0, strides=(1,))
            memory.view(drawn, dtype="u1", shape=(nbytes,), offset=0, strides=(1,))[:] = frame
            mark = lane.mark()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(memory.upload, pages[1:], buffer, after=mark).result()
            lane.finish()
        back = memory.page(nbytes)
        memory.download(drawn, [back])
        assert bytes(back) == b"1" * nbytes
        memory.download(buffer, [back])
        assert bytes(back) == b"2" * nbytes

    def test_several_threads_move_bytes_at_once(self, memory: DeviceMemory) -> None:
        begin = threading.Barrier(4)

        def move(seed: int) -> bool:
            begin.wait(60)
            with memory.lane() as lane:
                for turn in range(20):
                    content = some_bytes(30_000 + seed, seed * 100 + turn)
                    buffer = uploaded(memory, content)
                    came_back = downloaded(memory, buffer, len(content))
                    lane.finish()
                    memory.free(buffer)
                    if came_back != content:
                        return False
            return True

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(move, range(4)))
        assert memory.used() == 0
