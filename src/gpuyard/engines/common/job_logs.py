"""Job logs: where they are, how they are kept short, and how they are read while they grow.

A log over its cap is cut: all but its newest part moves to `17.1.log.1`, replacing the earlier content. Writers notice
nothing, because they append at the end. So both files together hold the newest output, up to about twice the cap.
`17.1.log.cut` counts all bytes that were ever cut off, by which a reader finds its place again.

If the file system can remove a range from a file (ext4, XFS), nothing is lost. Otherwise the log is copied and
truncated: output in the microseconds between the two is lost, and more if a program writes faster than we copy.

A reader holds a shared lock on the log while it reads, and cutting takes an exclusive one, so that no reader sees the
text in both files or in neither. Writers take no part in this. But a program may lock its own output (`flock 1`), so a
reader waits up to 0.25 s and then reads without the lock.
"""

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.system.file_locks import lock_within, try_lock

_COLLAPSE_RANGE = 0x08
_CHUNK = 1 << 16
_POLL_S = 0.05
_LOCK_WITHIN_S = 0.25


def name_of(job_id: int, attempt: int) -> str:
    return f"{job_id}.{attempt}.log"


def path_of(folder: Path, job_id: int, attempt: int) -> Path:
    return folder / name_of(job_id, attempt)


def remove_logs(folder: Path, job_id: int, attempt: int) -> None:
    """Remove all files of one attempt's output."""
    path = path_of(folder, job_id, attempt)
    for file in (path, _old(path), _count(path)):
        file.unlink(missing_ok=True)


def _old(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _count(path: Path) -> Path:
    return path.with_name(f"{path.name}.cut")


# Cutting


def rotate_if_over(path: Path, cap_bytes: int) -> bool:
    """Cut the log if it is over the cap. Return whether it was cut.

    Copies up to the log's size, so do not call it in a thread that others wait for. Does nothing while the log is being
    read. Raises OSError if the disk is full.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return os.fstat(descriptor).st_size > cap_bytes and try_lock(descriptor) and _cut(path, descriptor)
    finally:
        os.close(descriptor)


def _cut(path: Path, descriptor: int) -> bool:
    status = os.fstat(descriptor)
    # Only whole blocks can be removed from a file, and not all of them.
    length = (status.st_size - 1) // status.st_blksize * status.st_blksize
    if length <= 0:
        return False
    before = _cut_so_far(path)
    _old(path).unlink(missing_ok=True)  # first, to free disk space
    with _new_file(_old(path)) as old:
        _copy(descriptor, old, 0, length)
        _set_cut_so_far(path, before + length)
        collapse = _fallocate()
        if collapse is None or collapse(descriptor, _COLLAPSE_RANGE, 0, length):
            # Truncate when the copy has caught up with the writers. Faster writers lose what it did not reach.
            reached = _copy(descriptor, old, length, length + length // 2)
            os.ftruncate(descriptor, 0)
            _set_cut_so_far(path, before + reached)
    return True


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """Create a file, and remove it again if an OSError follows."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        yield descriptor
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _copy(source: int, target: int, start: int, end: int) -> int:
    """Copy up to `end` or the end of the source. Return where it stopped."""
    at = start
    while at < end and (chunk := os.pread(source, min(_CHUNK, end - at), at)):
        at += len(chunk)
        while chunk:
            chunk = chunk[os.write(target, chunk) :]
    return at


@functools.lru_cache(maxsize=1)
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    library = ctypes.CDLL(None)
    call = getattr(library, "fallocate64", None) or getattr(library, "fallocate", None)
    if call is None:
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function: Callable[[int, int, int, int], int] = call
    return function


def _cut_so_far(path: Path) -> int:
    try:
        return int(_count(path).read_bytes())
    except (FileNotFoundError, ValueError):
        return 0


def _set_cut_so_far(path: Path, count: int) -> None:
    descriptor = os.open(_count(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.pwrite(descriptor, b"%020d" % count, 0)
    finally:
        os.close(descriptor)


# Reading


def read_tail(path: Path, lines: int) -> bytes:
    """Return the last lines of the log; empty if there is no log."""
    try:
        with open_kept(path) as kept:
            return b"".join(kept.read_all(kept.start_of_last(lines), kept.end))
    except FileNotFoundError:
        return b""


def follow(path: Path, is_over: Callable[[], bool], lines: int | None = None) -> Iterator[bytes]:
    """Yield the log, or its last lines, then everything that is written until `is_over`.

    Nothing comes twice, and nothing is skipped except what was cut off twice before this reader reached it.
    """
    at: int | None = None
    while True:
        ends_here = is_over()  # checked first: output until then is still to be read
        at, chunk = _next(path, at, lines)
        if chunk:
            yield chunk
        elif ends_here:
            return
        else:
            time.sleep(_POLL_S)


def _next(path: Path, at: int | None, lines: int | None) -> tuple[int | None, bytes]:
    try:
        with open_kept(path) as kept:
            if at is None:
                at = kept.first if lines is None else kept.start_of_last(lines)
            at = max(at, kept.first)
            chunk = kept.read(at)
            return at + len(chunk), chunk
    except FileNotFoundError:
        return at, b""


@contextlib.contextmanager
def open_kept(path: Path) -> Iterator["Kept"]:
    with contextlib.ExitStack() as opened:
        log = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, log)
        lock_within(log, _LOCK_WITHIN_S, shared=True)
        first = cut = _cut_so_far(path)
        old = -1
        with contextlib.suppress(FileNotFoundError):
            old = os.open(_old(path), os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, old)
            first = cut - os.fstat(old).st_size
        yield Kept(log, old, cut, first)


class Kept(Struct, frozen=True):
    """Both files as one text. Positions count from the start of the output; `first` is the first that is left."""

    log: int
    old: int
    cut: int
    first: int

    @property
    def end(self) -> int:
        return self.cut + os.fstat(self.log).st_size

    def read(self, at: int, most: int = _CHUNK) -> bytes:
        if at < self.cut:
            return os.pread(self.old, min(most, self.cut - at), at - self.first)
        return os.pread(self.log, most, at - self.cut)

    def start_of_last(self, lines: int) -> int:
        """Return the position of the last lines; an unfinished line counts too."""
        end = self.end
        if lines <= 0:
            return end
        at, missing = end, lines + (self.read(end - 1, 1) == b"\n" if end > self.first else 0)
        while at > self.first:
            start = max(self.first, at - _CHUNK)
            chunk = b"".join(self.read_all(start, at))
            found = chunk.count(b"\n")
            if found >= missing:
                for _ in range(found - missing):
                    chunk = chunk[chunk.index(b"\n") + 1 :]
                return at - len(chunk) + chunk.index(b"\n") + 1
            missing -= found
            at = start
        return self.first

    def read_all(self, start: int, end: int) -> Iterator[bytes]:
        while start < end and (chunk := self.read(start, end - start)):
            start += len(chunk)
            yield chunk
