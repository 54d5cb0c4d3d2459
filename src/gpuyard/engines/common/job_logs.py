"""Job logs: where they are, and how they are read while they grow and while their middle is cut out (`log_cap`).

Positions are offsets in the file, which cutting does not change. What is cut while it is being read would read as zero
bytes, so a reader looks for the hole after each read."""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from gpuyard.engines.common.log_cap import find_hole

if TYPE_CHECKING:
    from gpuyard.ports import Launch

# Paths with caps, as in SpawnSpec.
Outputs: TypeAlias = tuple[tuple[str, int], ...]
_CHUNK = 1 << 16
_POLL_S = 0.05


def name_of(job_id: int, attempt: int) -> str:
    return f"{job_id}.{attempt}.log"


def progress_file_of(folder: Path | str, key: str) -> str:
    """Return the file that the program of an attempt may write about its progress, beside its log in `folder`."""
    return f"{folder}/{key}.progress"


def outputs_of(own: str, launch: "Launch") -> Outputs:
    """Return the files for the output of an attempt; `own` is the path of its log, if it gets one."""
    cap = max(1, launch.log_cap)
    log = (own, cap) if launch.output is None else (launch.output, 0)
    if launch.error is not None and launch.error != launch.output:
        return log, (launch.error, 0)
    return (log, (str(Path(own).with_suffix(".err.log")), cap)) if launch.split_stderr else (log,)


class LogCursor:
    """Reads a growing log in chunks; nothing comes twice, and a line stands for what was cut out before."""

    def __init__(self, path: Path | str, lines: int | None = None) -> None:
        self.path, self._lines = path, lines
        self._at: int | None = None

    def read(self) -> bytes:
        try:
            with open_log(self.path) as log:
                return self._read(log)
        except FileNotFoundError:
            return b""

    def _read(self, log: "OpenLog") -> bytes:
        if self._at is None and self._lines is not None:
            self._at = log.start_of_last(self._lines)
            start, end = find_hole(log.descriptor)
            if self._lines > 0 and start < end and self._at == log.first:
                return _cut_line(self._at - start)  # with the rest of the line that was cut apart
        at = self._at or 0
        self._at = log.after_hole(at)
        if self._at != at:
            return _cut_line(self._at - at)
        chunk = log.read(at)
        self._at = at + len(chunk)
        return chunk


def follow(cursors: Sequence[LogCursor], is_over: Callable[[], bool]) -> Iterator[tuple[LogCursor, bytes]]:
    """Yield chunks of these logs until `is_over`. An empty one means that there is nothing more at the moment."""
    while True:
        ends_here = is_over()  # checked first: output until then is still to be read
        chunks = [(cursor, cursor.read()) for cursor in cursors]
        yield from chunks
        if not any(chunk for _, chunk in chunks):
            if ends_here:
                return
            time.sleep(_POLL_S)


def _cut_line(missing: int) -> bytes:
    amount = f"{missing:,} bytes are" if missing > 0 else "some output is"
    return f"\n[gpuyard: {amount} cut out here: the log is over its cap (--log-cap)]\n".encode()


@contextlib.contextmanager
def open_log(path: Path | str) -> Iterator["OpenLog"]:
    """Raises FileNotFoundError for anything but a plain file: another user may put a pipe into a shared folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileNotFoundError(errno.ENOENT, "it is not a plain file", str(path))
        yield OpenLog(descriptor)
    finally:
        os.close(descriptor)


class OpenLog(Struct, frozen=True):
    descriptor: int

    @property
    def end(self) -> int:
        return os.fstat(self.descriptor).st_size

    @property
    def first(self) -> int:
        """Where the part begins that reaches the end without a gap: 0, or the first whole line after the hole."""
        start, end = find_hole(self.descriptor)
        return self._line_start(end) if start < end else 0

    def after_hole(self, at: int) -> int:
        """Return where to go on reading: behind the hole if `at` is in it; not behind the end of a file that got
        shorter."""
        start, end = find_hole(self.descriptor)
        return self._line_start(end) if start <= at < end else min(at, self.end)

    def read(self, at: int, most: int = _CHUNK) -> bytes:
        """Return up to `most` bytes, but none beyond a hole, and nothing if `at` is in it."""
        data = os.pread(self.descriptor, most, at)
        start, end = find_hole(self.descriptor)
        return data if at >= end else data[: max(0, start - at)]

    def start_of_last(self, lines: int) -> int:
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
        while start < end and (chunk := self.read(start, end - start)):
            start += len(chunk)
            yield chunk

    def text(self, start: int, end: int) -> str:
        return b"".join(self.read_all(start, end)).decode(errors="replace")

    def _line_start(self, at: int) -> int:
        """Return where the next line begins: the one at `at` lacks its beginning. `at` itself if it is very long."""
        return at + os.pread(self.descriptor, _CHUNK, at).find(b"\n") + 1
