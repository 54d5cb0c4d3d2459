"""Allocates the host memory that a driver is about to fill, on several threads and ahead of the driver.

A driver that suspends a process maps memory of the size of its device memory in that process, and lets the kernel
allocate its pages with one thread: 35 GB took 3 to 12 s, and 2 s where they were allocated. The threads begin where the
driver will be a moment later, and go on ahead of it. They never change a byte: the kernel is asked to copy from a page
that cannot be read, so it allocates the pages to write to, and then the copy fails. Only mappings that appear while it
is at work are touched, no more than `most_bytes` in all. Without the right of a debugger nothing happens, and `refusal`
says why."""

import ctypes
import errno
import mmap
import os
import queue
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Self

_ANONYMOUS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-p \S+ 00:00 0 *$", re.MULTILINE)
_PIECE = 1 << 21
MOST_THREADS = 8

Range = tuple[int, int]


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Prefault:
    def __init__(self, pid: int, most_bytes: int, threads: int = MOST_THREADS) -> None:
        self.refusal: str | None = None
        self.touched_bytes = 0
        self._pid, self._most_bytes = pid, most_bytes
        self._before = _mappings(pid)
        self._pieces: queue.SimpleQueue[Range | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._unreadable = _UnreadablePage()
        count = max(1, min(threads, len(os.sched_getaffinity(0))))
        self._workers = [threading.Thread(target=self._touch_pieces, daemon=True) for _ in range(count)]
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        for thread in (self._watcher, *self._workers):
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watcher.join()
        for _ in self._workers:
            self._pieces.put(None)
        for worker in self._workers:
            worker.join()
        self._unreadable.close()

    def _watch(self) -> None:
        known = self._before
        while not self._is_over.wait(0.002) and self.refusal is None:
            current = _mappings(self._pid)
            for begin, end in subtract(current, known):
                if end - begin >= 16 << 20:
                    self._add(begin, end)
            known = current

    def _add(self, begin: int, end: int) -> None:
        begin = max(begin, end - max(0, self._most_bytes - self.touched_bytes))
        for start in in_order(range(begin, end, _PIECE)):
            self._pieces.put((start, min(end, start + _PIECE)))
        self.touched_bytes += end - begin

    def _touch_pieces(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if self._is_over.is_set() or self.refusal is not None:
                continue
            code = self._unreadable.copy_to(self._pid, *piece)
            if code not in (0, errno.EFAULT):
                self.refusal = os.strerror(code)


class _UnreadablePage:
    """Memory of this process that cannot be read, as the source of copies that fail after their target is allocated."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = mmap.mmap(-1, _PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_WRITE)
        self._view = ctypes.c_char.from_buffer(self._memory)
        self._address = ctypes.addressof(self._view)
        if self._libc.mprotect(ctypes.c_void_p(self._address), ctypes.c_size_t(_PIECE), 0):
            raise OSError(ctypes.get_errno(), "mprotect")

    def copy_to(self, pid: int, begin: int, end: int) -> int:
        source, target = _Vector(self._address, end - begin), _Vector(begin, end - begin)
        one, no_flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
        copied = self._libc.process_vm_writev(
            ctypes.c_int(pid), ctypes.byref(source), one, ctypes.byref(target), one, no_flags
        )
        return ctypes.get_errno() if copied < 0 else 0

    def close(self) -> None:
        del self._view
        self._memory.close()


def _mappings(pid: int) -> list[Range]:
    """Return the private anonymous memory of a process, in order; nothing if it has ended."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            return [(int(begin, 16), int(end, 16)) for begin, end in _ANONYMOUS.findall(file.read())]
    except OSError:
        return []


def in_order(pieces: Sequence[int]) -> Iterator[int]:
    """Yield the pieces of a mapping in the order in which they are allocated: what is left to the driver last."""
    left = len(pieces) // 12
    yield from pieces[left:]
    yield from reversed(pieces[:left])


def subtract(ranges: list[Range], known: list[Range]) -> list[Range]:
    """Return the parts of `ranges` that are not in `known`. Both are in order, without overlaps."""
    left: list[Range] = []
    others = iter(known)
    other = next(others, None)
    for begin, end in ranges:
        start = begin
        while other is not None and other[0] < end:
            if start < other[0]:
                left.append((start, other[0]))
            start = max(start, other[1])
            if other[1] > end:
                break
            other = next(others, None)
        if start < end:
            left.append((start, end))
    return left
