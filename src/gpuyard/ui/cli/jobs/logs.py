"""`gpuyard logs`: the output of a job. The command reads the log file itself; the daemon only gives its path."""

import os
import sys
import time

from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.model.option import Option
from gpuyard.model.printable_text import printable
from gpuyard.ui.cli.ask_daemon import select, select_one, selection_text
from gpuyard.ui.cli.command_grammar import IDS, IDS_HELP, SEVERAL, Answer, Typed, Verb
from gpuyard.ui.cli.jobs.job_text import FINISHED, job_name
from gpuyard.ui.cli.terminal import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gpuyard.engines.common.job_logs import LogCursor

VERB = Verb(
    """Print the output of a job, or of several: standard output and standard error.

    With -f it follows the output of one job through all attempts until the job has finished; Ctrl-C ends it. The output
    of several jobs is printed one after the other, each below a line with its id.

    A line that was overwritten, as by a progress bar, is printed as a terminal would show it in the end; -f on a
    terminal shows it move. If standard error has a file of its own, it follows the output; with -f, both are printed as
    they are written.

    """
    + IDS_HELP,
    (
        Option("follow", "flag", None, "Follow the output until the job has finished.", short="f"),
        Option("lines", "whole", "N", "Only the last N lines.", short="n", note="all", least=0),
        Option("attempt", "whole", "N", "The output of attempt N.", note="the last", least=1),
        Option("stdout", "flag", None, "Only standard output, of a job submitted with --split-stderr or --error."),
        Option("stderr", "flag", None, "Only standard error, of such a job."),
        Option("raw", "flag", None, "The bytes as the program wrote them."),
    ),
    SEVERAL,
)
_POLL_S = 0.2


def run(typed: Typed) -> int:
    typed.values()  # before the request: a mistake is named at once
    if not typed.arguments:
        raise UserError("which job?", hint=f"name it, or several: {IDS}")
    with RetryingClient() as queue:
        if typed.flag("follow"):
            follow_job(queue, selection_text(typed.arguments), typed)
            return 0
        ids = select(lambda _, path, query: queue.get(path, query), typed.arguments)
        for job_id in ids:
            watched = _WatchedLog(queue, str(job_id))
            printer = _LogPrinter(watched, typed)
            try:
                values = typed.values()
                attempt = watched.found(watched.attempt(values["attempt"]), values["attempt"])
                if len(ids) > 1:
                    printer.write_line(f"==> {watched.id} {printable(job_name(watched.job))}: {watched.state} <==")
                printer.print(attempt, values["lines"])
                if len(ids) > 1 and printer.is_within_a_line:  # a last line that the program did not end
                    printer.write_line("")
            except GpuyardError as error:
                if len(ids) == 1:
                    raise
                note(f"gpuyard: {error}")
    return 0


def follow_job(queue: RetryingClient, word: str, typed: Typed) -> None:
    values = typed.values()
    watched, number = _WatchedLog(queue, word), values["attempt"]
    attempt = watched.found(_await_start(watched, number), number)
    _LogPrinter(watched, typed).follow(attempt, values["lines"], is_last=number is not None)


class _WatchedLog:
    """The daemon's last answer about a job, requested again at most every 0.2 s."""

    def __init__(self, queue: RetryingClient, word: str) -> None:
        self._queue = queue
        self._path, self._refreshed_at = f"/jobs/{select_one(self._queue.get, word)}", 0.0
        self.refresh()

    def refresh(self, *, waits: bool = False) -> None:
        if waits:
            time.sleep(max(0.0, self._refreshed_at + _POLL_S - time.monotonic()))
        self.job = self._queue.get(self._path)
        self.id: int = self.job["id"]
        self.state: str = self.job["state"]
        self._refreshed_at = time.monotonic()

    def found(self, attempt: Answer | None, number: int | None) -> Answer:
        """Return the attempt; UserError if there is none of this number."""
        if attempt is None:
            has_no = f"is {self.state} and has no output: it has not run"
            text = f"job {self.id} {has_no if number is None else f'has no attempt {number}'}"
            raise UserError(text, hint=f"`gpuyard show {self.id}` says more")
        return attempt

    def attempt(self, number: int | None) -> Answer | None:
        """Return that attempt, or the last one for None; None if it has not started."""
        found = [attempt for attempt in self.job["attempts"] if number in (None, attempt["number"])]
        return found[-1] if found else None

    def has_ended(self, number: int) -> bool:
        """Return whether this attempt has ended. Called many times a second; the daemon is asked every 0.2 s."""
        if time.monotonic() >= self._refreshed_at + _POLL_S:
            self.refresh()
        attempt = self.attempt(number)
        return attempt is None or attempt["ended_at"] is not None


class _LogPrinter:
    """Prints the files of an attempt: its log, and that of its standard error where it has one."""

    def __init__(self, watched: _WatchedLog, typed: Typed) -> None:
        self._watched = watched
        self._is_raw = typed.flag("raw")
        names = {"log": "stdout", "error_log": "stderr"}
        self._files = [key for key, name in names.items() if typed.flag(name)] or list(names)
        self.is_within_a_line = False

    def print(self, attempt: Answer, lines: int | None) -> None:
        from gpuyard.engines.common.job_logs import LogCursor, follow

        files, number = self._files_of(attempt), attempt["number"]
        for path in files:
            if not os.path.exists(path):
                if attempt["started_at"] is None:  # its engine has not started it
                    job_id, state, hint = self._watched.id, self._watched.state, "says what it waits for"
                    text = f"job {job_id} is {state} on {attempt['engine']} and has no output: it has not started there"
                    if attempt["ended_at"] is not None:
                        text = f"attempt {number} of job {job_id} has no output: it never started"
                    raise UserError(text, hint=f"`gpuyard why {job_id}` {hint}")
                raise EnvironmentFault(
                    f"the log of attempt {number} of job {self._watched.id} is missing: {path}",
                    hint="[keep] in config.toml says how long logs are kept, and how many",
                )
            if path != files[0] and os.path.getsize(path):
                self._note("--- standard error ---")
            self._write(self._shown(follow([LogCursor(path, lines)], lambda: True)))

    def follow(self, attempt: Answer | None, lines: int | None, *, is_last: bool) -> None:
        """Print this attempt as it is written, and the attempts after it unless `is_last`."""
        from functools import partial

        from gpuyard.engines.common.job_logs import LogCursor, follow

        cursors: list[LogCursor] = []
        while attempt is not None:
            number, files = attempt["number"], self._files_of(attempt)
            if [cursor.path for cursor in cursors] != files:  # else the attempts share a file: go on in it
                cursors = [LogCursor(path, lines) for path in files]
            chunks = follow(cursors, partial(self._watched.has_ended, number))
            self._write(self._shown(chunks, is_live=sys.stdout.isatty()))
            lines = None
            attempt = None if is_last else _await_start(self._watched, number + 1, self._note)
            if attempt is not None:
                self._note(f"--- attempt {attempt['number']} ---")

    def write_line(self, text: str) -> None:
        self._write([f"{text}\n".encode(errors="replace")])

    def _write(self, chunks: "Iterable[bytes]") -> None:
        """Write to standard output. A log may contain any bytes."""
        for chunk in chunks:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            if chunk:
                self.is_within_a_line = not chunk.endswith(b"\n")

    def _note(self, text: str) -> None:
        """Print a line to standard error, also after output that does not end its last line."""
        note(f"\n{text}" if self.is_within_a_line else text)
        self.is_within_a_line = False

    def _files_of(self, attempt: Answer) -> list[str]:
        if attempt["error_log"] is None and "log" not in self._files:
            raise UserError(
                f"the standard error of job {self._watched.id} is in the same log as its output",
                hint="submit it with --split-stderr or --error to tell them apart",
            )
        return [attempt[key] for key in self._files if attempt[key] is not None]

    def _shown(self, chunks: "Iterable[tuple[LogCursor, bytes]]", *, is_live: bool = False) -> "Iterator[bytes]":
        """Yield what a terminal would show of each line. With `is_live`, what is written from now on is unchanged."""
        from gpuyard.model.terminal_line import ShownLines

        lines: dict[LogCursor, ShownLines | None] = {}
        for cursor, chunk in chunks:
            shown = lines.setdefault(cursor, None if self._is_raw else ShownLines())
            yield chunk if shown is None else shown.feed(chunk)
            if shown is not None and is_live and not chunk:
                yield shown.shorten()
                lines[cursor] = None
        yield from (shown.finish() for shown in lines.values() if shown is not None)


def _await_start(watched: _WatchedLog, number: int | None, write_note: "Callable[[str], None]" = note) -> Answer | None:
    """Wait for the attempt to start and return it; None if the job finishes without it."""
    noted = ""
    # An attempt that has ended without a start never will start: its site did not take it.
    while (attempt := watched.attempt(number)) is None or not (attempt["started_at"] or attempt["ended_at"]):
        if watched.state in FINISHED:
            return None
        if watched.state != noted:
            noted = watched.state
            write_note(f"gpuyard: job {watched.id} is {noted}; waiting for it to start")
        watched.refresh(waits=True)
    return attempt
