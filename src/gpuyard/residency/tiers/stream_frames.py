"""Stream an actor that does not fit into VRAM through two buffers: the next frame is loaded while one is in use.

Frames come from the copy in RAM, or from disk through two buffers in RAM if the actor does not fit there either. The
renderer gets its own copies of arrays, made on the device, so it may keep them.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, overload

from gpuyard.residency.loading.named_arrays import Arrays
from gpuyard.residency.memory.device_memory import Buffer, Mark, TransferLane
from gpuyard.residency.memory.page_pool import PagePool, Pages
from gpuyard.residency.planning.array_layout import Layout
from gpuyard.residency.tiers.asset_copies import Copies
from gpuyard.residency.tiers.asset_tiers import Tiers


class _Slot:
    """A buffer for one frame. `arrives` is the transfer of that frame."""

    def __init__(self, buffer: Buffer, pages: Pages | None) -> None:
        self.buffer, self.pages = buffer, pages
        self.frame: int | None = None
        self.arrives: Future[Layout] | None = None


class FrameStream:
    """The stream of one worker. Frames may be requested in any order; the following frame is loaded ahead of time."""

    def __init__(self, tiers: Tiers, copies: Copies, pool: PagePool, lane: TransferLane) -> None:
        """Raises DeviceFull if the device has too little memory for the buffers."""
        self._tiers, self._copies, self._pool, self._lane = tiers, copies, pool, lane
        self.frames, self.path = copies.source.frames, copies.asset.path
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._thread = ThreadPoolExecutor(1, "gpuyard-stream")
        try:
            for _ in range(copies.asset.stream_frames):
                self._slots.append(self._new_slot())
        except BaseException:
            self.close()
            raise

    def _new_slot(self) -> _Slot:
        nbytes = self._copies.asset.frame_nbytes
        buffer = self._tiers.memory.allocate(nbytes)
        return _Slot(buffer, self._pool.take(nbytes) if self._copies.pages is None else None)

    def _arrays(self, frame: int) -> Arrays:
        """Return the arrays of a frame, valid until another frame is requested."""
        slot = self._slot_of(frame) or self._load(frame)
        layout = self._wait_for(slot)
        following = (frame + 1) % self.frames
        if self._slot_of(following) is None:
            self._load(following, keep=slot)
        return Arrays(self._tiers.memory, slot.buffer, layout, self._copies.asset.path)

    def _wait_for(self, slot: _Slot) -> Layout:
        assert slot.arrives is not None
        try:
            return slot.arrives.result()
        except BaseException:
            slot.frame = None
            raise

    def copy(self, frame: int, pick: Callable[[Arrays], Any]) -> Any:
        """Return a copy of the array that `pick` returns. Calls of several threads are serialized."""
        with self._lock:
            return self._tiers.memory.clone(pick(self._arrays(frame)))

    def names(self, frame: int) -> list[str]:
        with self._lock:
            return list(self._arrays(frame))

    def _slot_of(self, frame: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.frame == frame), None)

    def _load(self, frame: int, keep: _Slot | None = None) -> _Slot:
        slot = next(slot for slot in self._slots if slot is not keep)
        slot.frame = frame
        slot.arrives = self._thread.submit(self._fill, slot, frame, self._lane.mark())
        return slot

    def _fill(self, slot: _Slot, frame: int, after: Mark) -> Layout:
        """Load a frame, after the work that the worker has queued so far, which may still read the old frame."""
        layout, views = self._from_ram(frame) if slot.pages is None else self._from_disk(frame, slot.pages)
        self._tiers.memory.upload(views, slot.buffer, after=after)
        self._tiers.count_streamed(sum(view.nbytes for view in views), is_from_disk=slot.pages is not None)
        return layout

    def _from_ram(self, frame: int) -> tuple[Layout, list[memoryview]]:
        layout, pages = self._copies.layouts[frame], self._copies.pages
        assert pages is not None
        start = min(field.offset for field in layout.fields)
        return layout.shifted(-start), pages.views(start, layout.nbytes)

    def _from_disk(self, frame: int, pages: Pages) -> tuple[Layout, list[memoryview]]:
        def allocate(nbytes: int) -> Pages:
            if nbytes > pages.nbytes:
                raise self._tiers.learn_frame(self._copies.asset.key, nbytes)
            return pages

        layout = self._copies.source.read_frame(frame, allocate)
        return layout, pages.views(0, layout.nbytes)

    def close(self) -> None:
        """Free the buffers. The caller ensures that no work on the device uses its frames."""
        self._thread.shutdown()
        for slot in self._slots:
            self._tiers.memory.free(slot.buffer)
            if slot.pages is not None:
                self._pool.give_back(slot.pages)


class StreamedFrames(Sequence[Any]):
    """The frames of a stream, with the interface of frames in VRAM."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.frames

    @overload
    def __getitem__(self, index: int) -> "StreamedArrays": ...

    @overload
    def __getitem__(self, index: slice) -> "list[StreamedArrays]": ...

    def __getitem__(self, index: int | slice) -> "StreamedArrays | list[StreamedArrays]":
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [StreamedArrays(self._stream, number) for number in numbers]
        return StreamedArrays(self._stream, numbers)


class StreamedArrays(Mapping[str, Any]):
    """A frame, loaded when an array is accessed, and again if other frames were loaded in between."""

    def __init__(self, stream: FrameStream, frame: int) -> None:
        self._stream, self._frame = stream, frame

    def __getitem__(self, name: str) -> Any:
        return self._stream.copy(self._frame, lambda arrays: arrays[name])

    def columns(self, *names: str) -> Any:
        return self._stream.copy(self._frame, lambda arrays: arrays.columns(*names))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream.names(self._frame))

    def __len__(self) -> int:
        return len(self._stream.names(self._frame))

    @property
    def path(self) -> str:
        return self._stream.path
