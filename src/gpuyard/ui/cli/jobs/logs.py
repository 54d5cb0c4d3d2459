"""`gpuyard logs`: what a job wrote, read from its log by ourselves; the daemon only says where that is."""

import sys
import time

from gpuyard.connect.retrying import RetryingClient
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli.select_jobs import only_one
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.verb_options import ONE, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

VERB = Verb(
    """Print what a job wrote, to its standard output and its standard error.

    With -f it goes on until the job is over, through all its attempts; Ctrl-C ends it. ID is such as 17, or name=big
    where only one job has that name.
    """,
    (
        Option("follow", None, "Go on with what it writes, until it is over.", short="f"),
        Option("lines", "N", "Only the last N lines. [all]", short="n"),
        Option("attempt", "N", "What this attempt wrote. [the last one]"),
    ),
    ONE,
)
_FINISHED = ("succeeded", "failed", "cancelled", "rejected")
_LOOK_AGAIN_S = 0.2


def run(typed: Typed) -> int:
    lines, number = _number(typed, "lines"), _number(typed, "attempt")
    with RetryingClient() as queue:
        watched = _WatchedLog(queue, typed.words[0])
        attempt = _await_start(watched, number) if typed.flag("follow") else watched.attempt(number)
        if attempt is None:
            raise UserError(_absence(watched, number), hint=f"`gpuyard show {watched.id}` says more")
        if typed.flag("follow"):
            _follow(watched, attempt, lines, is_last=number is not None)
        else:
            _print(watched, attempt, lines)
    return 0


class _WatchedLog:
    """A job as the daemon last told of it."""

    def __init__(self, queue: RetryingClient, word: str) -> None:
        self._queue = queue
        self._path = f"/jobs/{only_one(self._queue.get, word)}"
        self.look()

    def look(self) -> None:
        self._job = self._queue.get(self._path)
        self._looked_at = time.monotonic()

    def look_again(self) -> None:
        """As often as makes sense."""
        time.sleep(max(0.0, self._looked_at + _LOOK_AGAIN_S - time.monotonic()))
        self.look()

    @property
    def id(self) -> int:
        return int(self._job["id"])

    @property
    def state(self) -> str:
        return str(self._job["state"])

    @property
    def is_finished(self) -> bool:
        return self.state in _FINISHED

    def attempt(self, number: int | None) -> "dict[str, Any] | None":
        """That attempt, or the last one; None where it has not begun."""
        found = [one for one in self._job["attempts"] if number in (None, one["number"])]
        return found[-1] if found else None

    def is_over(self, number: int) -> bool:
        """Whether this attempt is; asked many times a second, so mostly answered from memory."""
        if time.monotonic() >= self._looked_at + _LOOK_AGAIN_S:
            self.look()
        attempt = self.attempt(number)
        return attempt is None or attempt["ended_at"] is not None


def _print(watched: _WatchedLog, attempt: "dict[str, Any]", lines: int | None) -> None:
    from pathlib import Path

    from gpuyard.engines.local.job_logs import follow, read_tail

    log = Path(attempt["log"] or "")
    if not log.is_file():
        raise EnvironmentFault(f"the log of attempt {attempt['number']} of job {watched.id} is not there: {log}")
    _write(follow(log, lambda: True) if lines is None else [read_tail(log, lines)])


def _follow(watched: _WatchedLog, attempt: "dict[str, Any] | None", lines: int | None, *, is_last: bool) -> None:
    """Through this attempt, and unless it is the last one asked for, through those that come after it."""
    from functools import partial
    from pathlib import Path

    from gpuyard.engines.local.job_logs import follow

    while attempt is not None:
        number = attempt["number"]
        if attempt["log"] is not None:
            _write(follow(Path(attempt["log"]), partial(watched.is_over, number), lines))
        lines = None
        attempt = None if is_last else _await_start(watched, number + 1)
        if attempt is not None:
            note(f"--- attempt {attempt['number']} ---")


def _await_start(watched: _WatchedLog, number: int | None) -> "dict[str, Any] | None":
    """The attempt once it has begun, or None where the job is over without it."""
    told = ""
    while (attempt := watched.attempt(number)) is None:
        if watched.is_finished:
            return None
        if watched.state != told:
            told = watched.state
            note(f"gpuyard: job {watched.id} is {told}; waiting for it to start")
        watched.look_again()
    return attempt


def _absence(watched: _WatchedLog, number: int | None) -> str:
    if number is None:
        return f"job {watched.id} is {watched.state}, and never ran"
    return f"job {watched.id} has no attempt {number}"


def _number(typed: Typed, name: str) -> int | None:
    text = typed.text(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise UserError(f"--{name} '{text}' is not a number", hint=f"write it as --{name} 20")
    return int(text)


def _write(chunks: "Iterable[bytes]") -> None:
    """As it was written: a log may hold any bytes."""
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
