"""Keeps logs within their caps while programs write to them. Uses the standard library alone, as the keeper does.

When a log is over its cap, the blocks of its middle are given back to the file system, and the file keeps its length (a
hole). So the first quarter of the cap and the newest output stay, each byte keeps its offset, and writers notice
nothing. A file system that cannot make holes gets the kept text written to a shorter file; output that is written in
the same moment may be lost there. The next look follows when a program that writes 2 GB/s could have reached the cap;
while a log is not written to, the time between two looks doubles, up to 1 s."""

import contextlib
import ctypes
import functools
import heapq
import os
import time
from typing import Any

_SPEED = 2 << 30
_SOONEST_S, _LATEST_S = 0.001, 1.0
_SHORTENED = b"\n[gpuyard: the middle of the output was cut out here: the log was over its cap]\n"


def find_hole(descriptor: int) -> tuple[int, int]:
    """Return where the middle was cut out of an open log; its length twice if it is whole."""
    length = os.fstat(descriptor).st_size
    try:
        start = os.lseek(descriptor, 0, os.SEEK_HOLE)
    except OSError:  # an empty file, or a system without holes
        return length, length
    if start >= length:
        return length, length
    with contextlib.suppress(OSError):  # nothing follows
        return start, os.lseek(descriptor, start, os.SEEK_DATA)
    return start, length


def cut_if_over(path: str, cap: int) -> int:
    """Cut the middle out of the log if it is over its cap. Return how many more bytes it may hold. Raises OSError."""
    length = os.stat(path, follow_symlinks=False).st_size
    if length <= cap:
        return cap - length
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return cap - _cut(descriptor, cap)
    finally:
        os.close(descriptor)


def _cut(descriptor: int, cap: int) -> int:
    status = os.fstat(descriptor)
    length, block = status.st_size, max(status.st_blksize, 4096)
    start, end = find_hole(descriptor)
    held = length - (end - start)
    if held <= cap:
        return held
    if start == end:
        start = end = max(1, -(-cap // 4 // block)) * block
    cut_to = (length - cap // 2) // block * block
    if cut_to <= end:
        return held
    if _punch(descriptor, end, cut_to - end):
        return start + length - cut_to
    return _shorten(descriptor, start, cap // 2)


def _punch(descriptor: int, start: int, length: int) -> bool:
    call = _fallocate()
    return call is not None and call(descriptor, 0x03, start, length) == 0  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


@functools.cache
def _fallocate() -> Any:
    library = ctypes.CDLL(None)
    call: Any = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call


def _shorten(descriptor: int, first: int, last: int) -> int:
    content = _SHORTENED + os.pread(descriptor, last, os.fstat(descriptor).st_size - last)
    os.ftruncate(descriptor, first)
    held = first + len(content)
    while content:
        content = content[os.write(descriptor, content) :]
    return held


class _CappedLog:
    __slots__ = ("cap", "due", "full_at", "left", "path", "wait_s")

    def __init__(self, path: str, cap: int, now: float) -> None:
        self.path = path
        self.cap = self.left = cap
        self.wait_s = self.shortest_s()
        self.due = now + self.wait_s
        self.full_at = now + cap / _SPEED  # at the earliest: an empty log cannot be over its cap before

    def shortest_s(self) -> float:
        return min(max(self.left / _SPEED, _SOONEST_S), _LATEST_S)


class LogCaps:
    """For an event loop: wait for up to `timeout_ms()`, and call `run()`. For one thread."""

    def __init__(self) -> None:
        self._logs: dict[str, _CappedLog] = {}
        self._due: list[tuple[float, str]] = []

    def add(self, path: str, cap: int) -> None:
        """Watch a log. Costs no call of the system: most programs end before their first look is due."""
        log = self._logs[path] = _CappedLog(path, cap, time.monotonic())
        heapq.heappush(self._due, (log.due, path))

    def remove(self, path: str) -> None:
        """Look at a log for the last time: all that write to it have ended."""
        log = self._logs.pop(path, None)
        if log is not None and time.monotonic() >= log.full_at:
            with contextlib.suppress(OSError):
                cut_if_over(path, log.cap)

    def timeout_ms(self) -> float | None:
        while self._due and not self._is_waiting(*self._due[0]):
            heapq.heappop(self._due)  # most programs end before their log is looked at
        return None if not self._due else max(0.0, (self._due[0][0] - time.monotonic()) * 1000 + 0.1)

    def run(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, path = heapq.heappop(self._due)
            if not self._is_waiting(due, path):
                continue
            log = self._logs[path]
            before, log.left = log.left, log.cap
            with contextlib.suppress(OSError):  # the file was removed, or the disk fails
                log.left = cut_if_over(log.path, log.cap)
            log.wait_s = min(log.wait_s * 2, _LATEST_S) if log.left == before else log.shortest_s()
            log.due = now + log.wait_s
            heapq.heappush(self._due, (log.due, log.path))

    def _is_waiting(self, due: float, path: str) -> bool:
        """Return whether an entry of `_due` is still the next look at its log."""
        return path in self._logs and self._logs[path].due == due


def watch_log(path: str, cap: int) -> None:
    caps = LogCaps()
    caps.add(path, cap)
    while True:
        time.sleep((caps.timeout_ms() or 0.0) / 1000)
        caps.run()
