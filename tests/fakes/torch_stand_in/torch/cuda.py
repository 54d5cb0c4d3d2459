"""One card: its streams, and its caching allocator."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

MB = 1048576
TOTAL = 1024 * MB
UUID = "5ca1ab1e-0000-4000-8000-00000000da7a"
_BLOCK, _ROUND, _STEP = 512, 2 * MB, 20 * MB

unpinned_copies = 0
_lock = threading.RLock()
_pinned: list[tuple[int, int]] = []
_set_up: list[int] = []
_streams: "weakref.WeakSet[Stream]" = weakref.WeakSet()
_current = threading.local()


class OutOfMemoryError(RuntimeError):
    pass


class Allocator:
    """Freed memory stays reserved until the cap makes it go, or `empty_cache`."""

    def __init__(self) -> None:
        self.cap = TOTAL
        self.used = self.peak = self.reserved = self.reserved_peak = 0

    def take(self, nbytes: int) -> Callable[[], None]:
        rounded = -(-nbytes // _BLOCK) * _BLOCK
        with _lock:
            if self.used + rounded > self.reserved:
                self._reserve(rounded)
            self.used += rounded
            self.peak = max(self.peak, self.used)
        return lambda: self._give_back(rounded)

    def _reserve(self, nbytes: int) -> None:
        if self.reserved + _up(nbytes, _ROUND) > self.cap:
            self.empty()
        if self.reserved + _up(nbytes, _ROUND) > self.cap:
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / MB:.2f} MiB. GPU 0 has a total capacity of "
                f"{TOTAL / MB:.2f} MiB\nIf reserved but unallocated memory is large try setting …"
            )
        self.reserved += _up(nbytes, _ROUND if nbytes <= MB else _STEP)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _give_back(self, nbytes: int) -> None:
        with _lock:
            self.used -= nbytes

    def empty(self) -> None:
        self.reserved = min(self.reserved, _up(self.used, _STEP))


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


allocator = Allocator()


class Stream:
    def __init__(self, device: Any) -> None:
        self.device = device
        self.waiting: list[Callable[[], Any]] = []
        _streams.add(self)

    def queue(self, work: Callable[[], Any]) -> None:
        with _lock:
            self.waiting.append(work)

    def run(self, count: int) -> None:
        """Do the first `count` pieces of queued work."""
        for _ in range(count):
            self.waiting.pop(0)()

    def synchronize(self) -> None:
        with _lock:
            self.run(len(self.waiting))

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: "Event") -> None:
        self.queue(event.synchronize)


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self._stream: Stream | None = None
        self._is_past = False

    def record(self, stream: Stream) -> None:
        self._stream = stream
        stream.queue(self._pass)

    def _pass(self) -> None:
        self._is_past = True

    def synchronize(self) -> None:
        with _lock:
            while not self._is_past:
                assert self._stream is not None
                self._stream.run(1)


_default = Stream(SimpleNamespace(type="cuda", index=0))


def current_stream() -> Stream:
    stream: Stream = getattr(_current, "stream", _default)
    return stream


def synchronize() -> None:
    for each in list(_streams):
        each.synchronize()


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before = current_stream()
    _current.stream = chosen
    try:
        yield
    finally:
        _current.stream = before


@contextlib.contextmanager
def device(chosen: Any) -> Iterator[None]:
    assert chosen.index == 0, "there is one card"
    yield


def pin(start: int, nbytes: int) -> None:
    _pinned.append((start, start + nbytes))


def unpin(start: int) -> None:
    _pinned[:] = [each for each in _pinned if each[0] != start]


class Cudart:
    """Pins memory of others. `error` is what it returns; then nothing is pinned."""

    def __init__(self) -> None:
        self.error = 0
        self.registered: dict[int, int] = {}
        self.callers: set[str] = set()

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        assert not flags
        self.callers.add(threading.current_thread().name)
        if not self.error:
            self.registered[start] = nbytes
            pin(start, nbytes)
        return self.error

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.registered[start]
        unpin(start)
        return 0


_cudart = Cudart()


def cudart() -> Cudart:
    return _cudart


def is_pinned(start: int, nbytes: int) -> bool:
    return any(first <= start and start + nbytes <= last for first, last in _pinned)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return bool(_set_up)


def init() -> None:
    _set_up.append(0)


def device_count() -> int:
    return 1


def set_device(number: int) -> None:
    assert number == 0, "there is one card"
    _set_up.append(number)


def get_device_properties(number: int) -> Any:
    set_device(number)
    return SimpleNamespace(total_memory=TOTAL, uuid=UUID)


def mem_get_info(number: int) -> tuple[int, int]:
    set_device(number)
    return TOTAL - allocator.reserved, TOTAL


def set_per_process_memory_fraction(fraction: float, number: int) -> None:
    set_device(number)
    assert isinstance(fraction, float), "Invalid type for fraction argument"
    assert 0 <= fraction <= 1, "Invalid fraction value"
    allocator.cap = int(fraction * TOTAL)


def memory_stats_as_nested_dict(number: int) -> dict[str, Any]:
    set_device(number)
    return {"allocated_bytes": {"all": {"current": allocator.used, "peak": allocator.peak}}}


def max_memory_reserved(number: int) -> int:
    set_device(number)
    return allocator.reserved_peak


def reset_peak_memory_stats(number: int) -> None:
    set_device(number)
    allocator.peak, allocator.reserved_peak = allocator.used, allocator.reserved


def empty_cache() -> None:
    with _lock:
        allocator.empty()
