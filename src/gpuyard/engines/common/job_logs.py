"""Job logs: where they are, and how they are read while they grow and while their middle is cut out (`log_cap`).

Positions are offsets in the file, which cutting does not change. A reader sees the first part of a log, a line that
says how much is missing, and the last part. What is cut while it is being read would read as zero bytes, so a reader
looks for the hole after each read.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.engines.common.log_cap import find_hole

_CHUNK = 1 << 16
_POLL_S = 0.05


def name_of(job_id: int, attempt: int) -> str:
    return f"{job_id}.{attempt}.log"


def path_of(folder: Path, job_id: int, attempt: int) -> Path:
    return folder / name_of(job_id, attempt)


def remove_log(folder: Path, job_id: int, attempt: int) -> None:
    path_of(folder, job_id, attempt).unlink(missing_ok=True)


def follow(path: Path, is_over: Callable[[], bool], lines: int | None = None) -> Iterator[bytes]:
    """Yield the log, or its last lines, then everything that is written until `is_over`.

    Nothing comes twice, and a line stands for everything that was cut out before this reader reached it. An empty chunk
    means that there is nothing more at the moment.
    """
    at: int | None = None
    while True:
        ends_here = is_over()  # checked first: output until then is still to be read
        at, chunk = _next(path, at, lines)
        yield chunk
        if not chunk:
            if ends_here:
                return
            time.sleep(_POLL_S)


def _next(path: Path, at: int | None, lines: int | None) -> tuple[int | None, bytes]:
    try:
        with open_log(path) as log:
            if at is None and lines is not None:
                at = log.start_of_last(lines)
                if lines > 0 and at == log.first and log.missing:
                    return at, _cut_line(log.missing)
            at = at or 0
            after = log.after_hole(at)
            if after != at:
                return after, _cut_line(after - at)
            chunk = log.read(at)
            return at + len(chunk), chunk
    except FileNotFoundError:
        return at, b""


def _cut_line(missing: int) -> bytes:
    amount = f"{missing:,} bytes are" if missing > 0 else "some output is"
    return f"\n[gpuyard: {amount} cut out here: the log is over its cap (--log-cap)]\n".encode()


@contextlib.contextmanager
def open_log(path: Path) -> Iterator["OpenLog"]:
    """Raises FileNotFoundError if there is no log."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield OpenLog(descriptor)
    finally:
        os.close(descriptor)


class OpenLog(Struct, frozen=True):
    descriptor: int

    @property
    def end(self) -> int:
        return os.fstat(self.descriptor).st_size

    @property
    def missing(self) -> int:
        """How many bytes are cut out, with the rest of the line that was cut apart."""
        start, end = find_hole(self.descriptor)
        return self._line_start(end) - start if start < end else 0

    @property
    def first(self) -> int:
        """Where the part begins that reaches the end without a gap: 0, or the first whole line after the hole."""
        start, end = find_hole(self.descriptor)
        return self._line_start(end) if start < end else 0

    def after_hole(self, at: int) -> int:
        """Return where to go on reading: `at` itself, or the first line after the hole if `at` is in it.

        Return a smaller position if the file has become shorter, as where the file system cannot make holes.
        """
        start, end = find_hole(self.descriptor)
        if start <= at < end:
            return self._line_start(end)
        return min(at, self.end)

    def read(self, at: int, most: int = _CHUNK) -> bytes:
        """Return up to `most` bytes, but none beyond a hole, and nothing if `at` is in it."""
        data = os.pread(self.descriptor, most, at)
        start, end = find_hole(self.descriptor)
        if at >= end:
            return data
        return data[: max(0, start - at)]

    def start_of_last(self, lines: int) -> int:
        """Return the position of the last lines, `first` at least; an unfinished line counts too."""
        end, first = self.end, self.first
        if lines <= 0:
            return end
        at, missing = end, lines + (self.read(end - 1, 1) == b"\n" if end > first else 0)
        while at > first:
            start = max(first, at - _CHUNK)
            chunk = b"".join(self.read_all(start, at))
            found = chunk.count(b"\n")
            if found >= missing:
                for _ in range(found - missing):
                    chunk = chunk[chunk.index(b"\n") + 1 :]
                return at - len(chunk) + chunk.index(b"\n") + 1
            missing -= found
            at = start
        return first

    def read_all(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes between two positions, up to a hole."""
        while start < end and (chunk := self.read(start, end - start)):
            start += len(chunk)
            yield chunk

    def _line_start(self, at: int) -> int:
        """Return where the next line begins: the one at `at` lacks its beginning. `at` itself if it is very long."""
        return at + os.pread(self.descriptor, _CHUNK, at).find(b"\n") + 1
