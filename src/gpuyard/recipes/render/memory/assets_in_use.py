"""Hold the assets of a render unit in VRAM while a worker uses them: scenes, and actors as sequences of frames.

An actor that does not fit into VRAM is streamed through two buffers, from RAM, or from disk if it does not fit there
either: the next frame is loaded while one is in use. The renderer gets its own copies of arrays, so it may keep them.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from gpuyard.errors import DeviceFull
from gpuyard.recipes.render.memory.asset_copies import Copies, Loan
from gpuyard.recipes.render.memory.asset_tiers import Tiers
from gpuyard.recipes.render.memory.device_memory import Buffer, Mark, PagePool, Pages, TransferLane, as_device_full
from gpuyard.recipes.render.memory.named_arrays import Arrays, Layout
from gpuyard.recipes.render.planning.assets_and_units import Kind

Frames = Sequence[Arrays]
T = TypeVar("T")


class SceneManager:
    """Scenes are shared by all workers; one that is no longer held stays in VRAM until its slot is needed."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @contextlib.contextmanager
    def hold(self, key: str | None, number: int) -> Iterator[Arrays | None]:
        """Yield the scene for the unit with that number; None for a unit without a scene."""
        if key is None:
            yield None
            return
        with _take(self._tiers, key, number) as loan:
            yield _arrays(self._tiers, loan)[0]


class ActorCache:
    """An actor is in VRAM as a whole, shared by all workers, or streamed: then only the frames of a stream are."""

    def __init__(self, tiers: Tiers, pool: PagePool) -> None:
        self._tiers, self._pool = tiers, pool

    @contextlib.contextmanager
    def hold(self, key: str | None, number: int, lane: TransferLane) -> Iterator[Frames]:
        """Yield the frames for the unit with that number; none for a unit without an actor."""
        if key is None:
            yield ()
            return
        with _take(self._tiers, key, number) as loan:
            if not loan.is_streamed:
                yield _arrays(self._tiers, loan)
                return
            stream = retry_with_less(self._tiers, lambda: FrameStream(self._tiers, loan.copies, self._pool, lane))
            with contextlib.closing(stream):
                yield StreamedFrames(stream)


@contextlib.contextmanager
def _take(tiers: Tiers, key: str, number: int) -> Iterator[Loan]:
    loan = retry_with_less(tiers, lambda: tiers.take(key, number))
    try:
        yield loan
    finally:
        tiers.give_back(loan)


def _arrays(tiers: Tiers, loan: Loan) -> tuple[Arrays, ...]:
    copies = loan.copies
    return tuple(Arrays(tiers.memory, copies.buffer, layout, copies.asset.path) for layout in copies.layouts)


def retry_with_less(tiers: Tiers, act: Callable[[], T]) -> T:
    """Call `act`; if the device is full, again without idle actors, then without the least recently used idle scene.
    Nothing is promoted ahead of time meanwhile."""
    full, result = _try(act)
    if full is None:
        return result[0]
    with tiers.short():
        for kind, most in ((Kind.ACTOR, None), (Kind.SCENE, 1)):
            gc.collect()  # a reference cycle may keep the error, and so the device memory of its frames
            tiers.drop_idle(kind, most)
            full, result = _try(act)
            if full is None:
                tiers.reserve_working(is_full=True)
                return result[0]
    raise full


def _try(act: Callable[[], T]) -> tuple[DeviceFull | None, list[T]]:
    try:
        return None, [act()]
    except Exception as error:  # from the user's renderer or PyTorch; only a full device is handled
        full = as_device_full(error)
        if full is None:
            raise
        return full, []


class _Slot:
    """A buffer for one frame. `arrives` is the transfer of that frame."""

    def __init__(self, buffer: Buffer, pages: Pages | None) -> None:
        self.buffer, self.pages = buffer, pages
        self.frame: int | None = None
        self.arrives: Future[Layout] | None = None


class FrameStream:
    """The stream of one worker. Frames may be requested in any order; the following frame is loaded ahead of time."""

    def __init__(self, tiers: Tiers, copies: Copies, pool: PagePool, lane: TransferLane) -> None:
        self._tiers, self._copies, self._pool, self._lane = tiers, copies, pool, lane
        self.frames, self.path = copies.source.frames, copies.asset.path
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []
        self._thread = ThreadPoolExecutor(1, "gpuyard-stream")
        try:
            for _ in range(copies.asset.stream_frames):
                nbytes = copies.asset.frame_nbytes
                buffer = tiers.memory.allocate(nbytes)
                self._slots.append(_Slot(buffer, pool.take(nbytes) if copies.pages is None else None))
        except BaseException:
            self.close()
            raise

    def _arrays(self, frame: int) -> Arrays:
        """Return the arrays of a frame, valid until another frame is requested."""
        slot = self._slot_of(frame) or self._load(frame)
        assert slot.arrives is not None
        try:
            layout = slot.arrives.result()
        except BaseException:
            slot.frame = None
            raise
        following = (frame + 1) % self.frames
        if self._slot_of(following) is None:
            self._load(following, keep=slot)
        return Arrays(self._tiers.memory, slot.buffer, layout, self._copies.asset.path)

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
        if (pages := slot.pages) is not None:

            def allocate(nbytes: int) -> Pages:
                if nbytes > pages.nbytes:
                    raise self._tiers.learn_frame(self._copies.asset.key, nbytes)
                return pages

            layout = self._copies.source.read_frame(frame, allocate)
            views = pages.views(0, layout.nbytes)
        else:
            layout, in_ram = self._copies.layouts[frame], self._copies.pages
            assert in_ram is not None
            start = min(field.offset for field in layout.fields)
            layout, views = layout.shifted(-start), in_ram.views(start, layout.nbytes)
        self._tiers.memory.upload(views, slot.buffer, after=after)
        self._tiers.count_streamed(sum(view.nbytes for view in views), is_from_disk=pages is not None)
        return layout

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

    def __getitem__(self, index: Any) -> Any:
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
