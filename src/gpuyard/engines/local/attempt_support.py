"""Around the attempts of the local engine: what it knows of each, the ends of the logs of those that failed, and how
their shell differs from that of the daemon.

A log of the queue is on a local disk, and is read at once. A file that the user named may be on a network disk that
hangs: a thread reads it, for 5 s at most (`read_tail`), and the end of its attempt is held back meanwhile.
"""

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, convert

from gpuyard.engines.common.program_outcome import StartContext, read_outputs
from gpuyard.engines.common.spawn_program import LEASE_AT, ShellChange
from gpuyard.model.job import Attempt, Outcome, OutcomeKind
from gpuyard.model.shell_environment import UNLIMITED, ShellSettings, differences
from gpuyard.system.submitting_shell import limit_number, read_shell_settings


class WatchedAttempt(Struct, frozen=True):
    """`kills` is the kernel's count of out-of-memory kills when the attempt started, if known. `has_runner` is set if
    the runner of a session may have left its socket behind."""

    attempt: Attempt
    context: StartContext = StartContext()
    kills: int | None = None
    has_runner: bool = True


class LogReads:
    """For one thread. `wake` is called, by another thread, when `is_reading` has become False for an attempt."""

    def __init__(self, own_folder: Path, wake: Callable[[], None]) -> None:
        self._own_folder = f"{own_folder}/"
        self._wake = wake
        self._texts: dict[str, list[str] | None] = {}  # None: still being read

    def is_reading(self, attempt: Attempt, outcome: Outcome) -> bool:
        """Start to read the logs of a failed attempt if they are files of the user; return whether to wait."""
        logs = filter(None, (attempt.log, attempt.error_log))
        if outcome.kind is not OutcomeKind.FAILED or all(log.startswith(self._own_folder) for log in logs):
            return False
        if attempt.key not in self._texts:
            self._texts[attempt.key] = None
            try:
                threading.Thread(target=self._read, args=(attempt, outcome), daemon=True).start()
            except RuntimeError:  # no more threads
                self._read(attempt, outcome)
        return self._texts[attempt.key] is None

    def take(self, attempt: Attempt, outcome: Outcome) -> list[str]:
        """Return the ends of the logs, once `is_reading` has returned False."""
        texts = self._texts.pop(attempt.key, None)
        logs = (attempt.log, attempt.error_log)
        return read_outputs(outcome, logs, attempt.key, is_local=True) if texts is None else texts

    def _read(self, attempt: Attempt, outcome: Outcome) -> None:
        self._texts[attempt.key] = read_outputs(outcome, (attempt.log, attempt.error_log), attempt.key)
        self._wake()


class OwnShell:
    """A program gets the umask, the niceness and the limits of the shell that submitted it. Most jobs come from a shell
    that has what this process has, and its keeper inherits: then nothing is changed, and starting them costs nothing
    more. `open_files` is the limit of jobs that have none."""

    def __init__(self, open_files: int) -> None:
        own = read_shell_settings()
        own["limits"]["NOFILE"] = UNLIMITED if open_files == sys.maxsize else open_files
        self._settings = convert(own, ShellSettings)
        self._open_files = open_files

    def changes(self, wanted: ShellSettings | None) -> tuple[int, ShellChange | None]:
        """Return the limit on open files, which the keeper sets for each program, and the other changes."""
        if wanted is None or wanted == self._settings:
            return self._open_files, None
        changed = differences(wanted, self._settings)
        limits = {number: soft for name, soft in changed.limits.items() if (number := limit_number(name)) is not None}
        nofile = limits.pop(limit_number("NOFILE") or 0, self._open_files)
        # A program gets its lease with the number LEASE_AT, which has to be below its limit.
        open_files = sys.maxsize if nofile == UNLIMITED else max(nofile, LEASE_AT + 1)
        if changed.umask is None and changed.niceness is None and not limits:
            return open_files, None
        return open_files, (changed.umask, changed.niceness, limits)
