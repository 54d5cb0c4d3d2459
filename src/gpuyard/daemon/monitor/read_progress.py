"""Reads what attempts say about their progress: new output of their logs, and their progress files.

Every read is bounded: 256 KB of a log that is read for the first time, 64 KB of new output later, 4 KB of a file. A log
that has not grown is not opened. It is called in a thread: a network disk may hang.
"""

import contextlib
import os
import re
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.progress.job_progress import NamedValues, ProgressReading, WorkDone
from gpuyard.core.progress.log_reader import LogReader, advance
from gpuyard.core.progress.progress_file import LONGEST_FILE, read_progress_line
from gpuyard.engines.common.job_logs import OpenLog, open_log
from gpuyard.engines.common.spawn_program import headline

_LINE_END = re.compile("[\r\n]")
FIRST_BYTES, NEXT_BYTES = 256 << 10, 64 << 10


class ProgressSource(Struct, frozen=True, kw_only=True):
    """Where an attempt may say how far it is. `is_over`: it has ended, so its last line is whole. `is_recorded`: its
    end is recorded, so its progress files are removed."""

    job_id: int
    number: int
    logs: tuple[str, ...]
    files: tuple[str, ...]
    is_over: bool = False
    is_recorded: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.job_id, self.number

    @property
    def folders(self) -> frozenset[str]:
        return frozenset(map(os.path.dirname, (*self.logs, *self.files)))


class _LogState(Struct):
    reader: LogReader = LogReader()
    end: int | None = None  # up to where it was read; None: nothing yet


class AttemptProgress:
    """What was read of one attempt so far. `first_bytes`: of a log that is read for the first time, this much."""

    def __init__(self, first_bytes: int = FIRST_BYTES) -> None:
        self._first_bytes = first_bytes
        self._logs: dict[str, _LogState] = {}
        self._files: dict[str, tuple[int, int]] = {}  # change time and size of what was read last
        self._is_told = False

    def read(self, source: ProgressSource) -> ProgressReading | None:
        """Return what is new, or None. Raises nothing: what cannot be read says nothing."""
        if source.is_recorded:
            for path in source.files:
                with contextlib.suppress(OSError):
                    os.unlink(path)
            return None
        told = next(filter(None, (self._read_file(path) for path in source.files)), None)
        self._is_told = self._is_told or told is not None
        if self._is_told:
            return told
        amount: WorkDone | None = None
        figures: list[NamedValues] = []
        for path in source.logs:
            found, named = self._read_log(path, source)
            amount, figures = found or amount, [*figures, *named]
        return ProgressReading(amount=amount, figures=figures) if amount is not None or figures else None

    def _read_file(self, path: str) -> ProgressReading | None:
        try:
            status = os.stat(path)
            stamp = status.st_mtime_ns, status.st_size
            if self._files.get(path) == stamp:
                return None
            with open_log(path) as file:
                text = file.read(0, LONGEST_FILE).decode(errors="replace")
        except OSError:
            return None
        reading = read_progress_line(text)
        if reading is not None:  # else it is being written
            self._files[path] = stamp
        return reading

    def _read_log(self, path: str, source: ProgressSource) -> tuple[WorkDone | None, list[NamedValues]]:
        state = self._logs.setdefault(path, _LogState())
        try:
            if os.stat(path).st_size == state.end and not source.is_over:
                return None, []
            with open_log(Path(path)) as log:
                mark = headline(str(source.job_id), str(source.number))
                text = _new_text(log, state, mark, self._first_bytes)
        except OSError:
            return None, []
        text += "\n" if source.is_over and state.end else ""
        if not text:
            return None, []
        state.reader, figures = advance(state.reader, text)
        return state.reader.amount(), list(figures)


def _new_text(log: OpenLog, state: _LogState, headline_of_attempt: str, first_bytes: int) -> str:
    """Return what was written since the last call. Of a file of the user, what was there before the attempt does not
    count."""
    end = log.end
    if state.end is None or end < state.end:
        at = max(log.first, end - first_bytes)
        text = _decoded(log, at, end)
        if at > log.first:
            text = _LINE_END.split(text, 1)[-1]
        state.reader, state.end = LogReader(), end
        return text.rpartition(headline_of_attempt)[2]
    at = log.after_hole(state.end)
    if end - at > NEXT_BYTES:
        at = end - NEXT_BYTES
    if at != state.end:  # the rest of the last line is skipped
        state.reader = replace(state.reader, last_line="")
    state.end = end
    return _decoded(log, at, end)


def _decoded(log: OpenLog, start: int, end: int) -> str:
    return b"".join(log.read_all(start, end)).decode(errors="replace")
