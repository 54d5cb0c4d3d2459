"""An attempt that the local engine has started or adopted, and its end as the keeper's journal and its logs tell it.

A log of the queue is on a local disk, and is read at once. A file that the user named may be on a network disk that
hangs: a thread reads it, for 5 s at most (`read_tail`), and the end of its attempt is held back meanwhile.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from msgspec import Struct

from gpuyard.engines.common import program_outcome as oom_evidence
from gpuyard.engines.common.program_outcome import StartContext, limit_of, outcome_of
from gpuyard.engines.local.keeper_connection import JournalEntry
from gpuyard.model.job import Attempt, Outcome, Started
from gpuyard.model.out_of_memory import RamLimit, ended_at_limit
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.ports import Ended
from gpuyard.system.clock import wall_time_of


class WatchedAttempt(Struct, frozen=True, kw_only=True):
    """`kills` is the kernel's count of out-of-memory kills when the attempt started, if known. `has_runner` is set if
    the runner of a session may have left its socket behind."""

    job_id: int
    attempt: int
    keeper_pid: int
    context: StartContext = StartContext()
    log: str | None = None
    error_log: str | None = None
    kills: int | None = None
    has_runner: bool = True

    @classmethod
    def of(cls, attempt: Attempt) -> Self:
        """Return an attempt that another process has started."""
        return cls(
            job_id=attempt.job_id,
            attempt=attempt.number,
            keeper_pid=attempt.keeper_pid,
            log=attempt.log,
            error_log=attempt.error_log,
        )

    @property
    def key(self) -> str:
        return f"{self.job_id}.{self.attempt}"

    def as_attempt(self) -> Attempt:
        return Attempt(
            job_id=self.job_id,
            number=self.attempt,
            phase=Started(at=0.0, keeper_pid=self.keeper_pid),
            log=self.log,
            error_log=self.error_log,
        )

    def outcome(self, entry: JournalEntry | None) -> Outcome:
        """`entry` is the last one on this attempt, if there is any."""
        return outcome_of(None if entry is None else entry.word, self.context)

    @staticmethod
    def has_succeeded(entry: JournalEntry | None) -> bool:
        return entry is not None and entry.word == "0"

    def read_outputs(self, entry: JournalEntry | None, *, is_local: bool = False) -> list[str]:
        """Return the ends of its logs if it has failed. This may take seconds, unless its logs are on a local disk."""
        return oom_evidence.read_outputs(self.outcome(entry), (self.log, self.error_log), self.key, is_local=is_local)

    def ended(
        self,
        entry: JournalEntry | None,
        texts: Sequence[str],
        keeper_limit: ResourceLimit | None,
        ram_limit: RamLimit | None = None,
    ) -> Ended:
        """`texts` are the ends of its logs if it has failed. `keeper_limit` is set if its keeper could not take it,
        `ram_limit` if its RAM was limited."""
        evidence = oom_evidence.evidence_of(self.outcome(entry), texts, self.kills)
        return Ended(
            job_id=self.job_id,
            attempt=self.attempt,
            outcome=evidence.outcome,
            pid=None if entry is None else entry.pid,
            at=None if entry is None or entry.at is None else wall_time_of(entry.at),
            shortage=ended_at_limit(ram_limit) or evidence.shortage,
            device_fault=evidence.device_fault,
            limit=keeper_limit or limit_of(None if entry is None else entry.word),
        )


class LogReads:
    """For one thread. `wake` is called, by another thread, when `is_reading` has become False for an attempt."""

    def __init__(self, own_folder: Path, wake: Callable[[], None]) -> None:
        self._own_folder = f"{own_folder}/"
        self._wake = wake
        self._lock = threading.Lock()
        self._is_closed = False
        self._texts: dict[str, list[str] | None] = {}  # None: still being read

    def is_reading(self, watched: WatchedAttempt, entry: JournalEntry | None) -> bool:
        """Start to read the logs of an attempt that is over if they are files of the user; return whether to wait."""
        if watched.has_succeeded(entry):
            return False
        if watched.key in self._texts:
            return self._texts[watched.key] is None
        if self._are_own(watched) or not watched.outcome(entry).status:
            return False
        self._texts[watched.key] = None
        try:
            threading.Thread(target=self._read, args=(watched, entry), daemon=True).start()
        except RuntimeError:  # no more threads
            self._texts[watched.key] = watched.read_outputs(entry)
        return self._texts[watched.key] is None

    def take(self, watched: WatchedAttempt, entry: JournalEntry | None) -> list[str]:
        """Return the ends of the logs, once `is_reading` has returned False."""
        if watched.has_succeeded(entry):
            return []
        texts = self._texts.pop(watched.key, None)
        return watched.read_outputs(entry, is_local=self._are_own(watched)) if texts is None else texts

    def _are_own(self, watched: WatchedAttempt) -> bool:
        """Return whether all logs of the attempt are logs of the queue."""
        return all(log.startswith(self._own_folder) for log in (watched.log, watched.error_log) if log is not None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def _read(self, watched: WatchedAttempt, entry: JournalEntry | None) -> None:
        self._texts[watched.key] = watched.read_outputs(entry)
        with self._lock:
            if not self._is_closed:
                self._wake()
