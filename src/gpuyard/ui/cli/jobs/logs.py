"""`gpuyard logs`: the output of a job. The command reads the log file itself; the daemon only gives its path."""

import sys
import time

from gpuyard.connect.retrying import RetryingClient
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ui.cli.ask_daemon import select_one
from gpuyard.ui.cli.jobs.job_text import FINISHED
from gpuyard.ui.cli.terminal import note
from gpuyard.ui.cli.verb_options import ONE, Answer, Option, Typed, Verb

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VERB = Verb(
    """Print the output of a job: its standard output and standard error.

    With -f it follows the output through all attempts until the job has finished; Ctrl-C ends it. ID is 17, or name=big
    if only one job has that name.

    A line that was overwritten, as by a progress bar, is printed as a terminal would show it in the end; -f on a
    terminal shows it move.
    """,
    (
        Option("follow", None, "Follow the output until the job has finished.", short="f"),
        Option("lines", "N", "Only the last N lines. [all]", short="n"),
        Option("attempt", "N", "The output of attempt N. [the last]"),
        Option("raw", None, "The bytes as the program wrote them."),
    ),
    ONE,
)
_POLL_S = 0.2


def run(typed: Typed) -> int:
    lines, number = _number(typed, "lines"), _number(typed, "attempt")
    with RetryingClient() as queue:
        watched = _WatchedLog(queue, typed.arguments[0])
        attempt = _await_start(watched, number) if typed.flag("follow") else watched.attempt(number)
        if attempt is None:
            missing = f"is {watched.state} and has no output: it has not run"
            if number is not None:
                missing = f"has no attempt {number}"
            raise UserError(f"job {watched.id} {missing}", hint=f"`gpuyard show {watched.id}` says more")
        if typed.flag("follow"):
            _follow(watched, attempt, lines, is_last=number is not None, is_raw=typed.flag("raw"))
        else:
            _print(watched, attempt, lines, is_raw=typed.flag("raw"))
    return 0


class _WatchedLog:
    """The daemon's last answer about a job, requested again at most every 0.2 s."""

    def __init__(self, queue: RetryingClient, word: str) -> None:
        self._queue = queue
        self._path = f"/jobs/{select_one(self._queue.get, word)}"
        self.refresh()

    def refresh(self) -> None:
        self._job = self._queue.get(self._path)
        self.id: int = self._job["id"]
        self.state: str = self._job["state"]
        self._refreshed_at = time.monotonic()

    def wait_and_refresh(self) -> None:
        time.sleep(max(0.0, self._refreshed_at + _POLL_S - time.monotonic()))
        self.refresh()

    def attempt(self, number: int | None) -> Answer | None:
        """Return that attempt, or the last one for None; None if it has not started."""
        found = [attempt for attempt in self._job["attempts"] if number in (None, attempt["number"])]
        return found[-1] if found else None

    def has_ended(self, number: int) -> bool:
        """Return whether this attempt has ended. Called many times a second; the daemon is asked every 0.2 s."""
        if time.monotonic() >= self._refreshed_at + _POLL_S:
            self.refresh()
        attempt = self.attempt(number)
        return attempt is None or attempt["ended_at"] is not None


def _print(watched: _WatchedLog, attempt: Answer, lines: int | None, *, is_raw: bool) -> None:
    from pathlib import Path

    from gpuyard.engines.common.job_logs import follow

    log = Path(attempt["log"] or "")
    if not log.is_file():
        raise EnvironmentFault(f"the log of attempt {attempt['number']} of job {watched.id} is missing: {log}")
    chunks = follow(log, lambda: True, lines)
    _write(chunks if is_raw else _shown(chunks))


def _follow(watched: _WatchedLog, attempt: Answer | None, lines: int | None, *, is_last: bool, is_raw: bool) -> None:
    """Print this attempt as it is written, and the attempts after it unless `is_last`."""
    from functools import partial
    from pathlib import Path

    from gpuyard.engines.common.job_logs import follow

    while attempt is not None:
        number = attempt["number"]
        if attempt["log"] is not None:
            chunks = follow(Path(attempt["log"]), partial(watched.has_ended, number), lines)
            _write(chunks if is_raw else _shown(chunks, is_live=sys.stdout.isatty()))
        lines = None
        attempt = None if is_last else _await_start(watched, number + 1)
        if attempt is not None:
            note(f"--- attempt {attempt['number']} ---")


def _await_start(watched: _WatchedLog, number: int | None) -> Answer | None:
    """Wait for the attempt to start and return it; None if the job finishes without it."""
    noted = ""
    while (attempt := watched.attempt(number)) is None:
        if watched.state in FINISHED:
            return None
        if watched.state != noted:
            noted = watched.state
            note(f"gpuyard: job {watched.id} is {noted}; waiting for it to start")
        watched.wait_and_refresh()
    return attempt


def _number(typed: Typed, name: str) -> int | None:
    text = typed.text(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit():
        raise UserError(f"--{name} '{text}' is not a number", hint=f"write it as --{name} 20")
    return int(text)


def _shown(chunks: "Iterable[bytes]", *, is_live: bool = False) -> "Iterator[bytes]":
    """Yield what a terminal would show of each line. With `is_live`, yield what is written from now on unchanged."""
    from gpuyard.core.terminal_line import ShownLines

    lines, left = ShownLines(), iter(chunks)
    for chunk in left:
        yield lines.feed(chunk)
        if is_live and not chunk:
            yield lines.shorten()
            yield from left
            return
    yield lines.finish()


def _write(chunks: "Iterable[bytes]") -> None:
    """Write to standard output. A log may contain any bytes."""
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
