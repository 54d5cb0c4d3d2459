"""Runs attempts on this machine, each in a session of its own, under a keeper that outlives the daemon.

- The keeper (`keeper.py`) is the parent of everything that a daemon starts. It writes every start and end to the
  journal, one file that all keepers append to (`keeper_connection.py`), and reports ends to the daemon.
- Prepared launches stay here until `start_prepared` sends them in one message. A daemon that dies earlier has started
  nothing.
- A daemon that takes over connects to the keepers that live. A keeper greets it only after it has started everything
  that its own daemon sent. So an attempt without a line in the journal then, or after the keeper's death, never
  started.
- When a keeper dies, the attempts that it started have no status: they are LOST. Those without a line never started.
- A keeper that does not answer counts as alive (`keeper_set.py`): its attempts keep running, and their ends are
  recorded when it answers again.
- The keeper starts the rest of a slice by itself, one after the other, and reports each beginning within 25 ms.
- The journal is emptied when it has grown, no attempt is live, and `ended` is called with all earlier ends recorded.

A job's environment is that of its Launch plus GPUYARD_QUEUE, which identifies its processes (`attempt_processes.py`).
"""

import contextlib
import os
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.engines.common.program_outcome import BEGAN
from gpuyard.engines.common.spawn_program import UNBEGUN_LOG
from gpuyard.engines.common.unbegun_words import is_unbegun
from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local.attempt_processes import ProcessSignals
from gpuyard.engines.local.keeper_connection import (
    HELLO,
    Journal,
    JournalEntry,
    KeeperConnection,
    not_taken,
    remove_dead_sockets,
    remove_socket,
)
from gpuyard.engines.local.keeper_messages import frame, slice_message
from gpuyard.engines.local.keeper_set import KeeperSet
from gpuyard.engines.local.launch_builder import LaunchBuilder
from gpuyard.engines.local.watched_attempt import LogReads, WatchedAttempt
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.ports import Ended, IsCutOff, Launch, PlacesNothing, Prepared, Signalling, SiteStatus
from gpuyard.system.clock import wall_time_of
from gpuyard.system.private_files import make_folder
from gpuyard.system.system_limits import open_files_limit
from gpuyard.system.wakeable_poll import WakeablePoll

# Ends of attempts that one step records: some 10 ms of work.
_MOST_ENDS = 100
_MOST_AT_ONCE = 100
_CREATE_LOG = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

# The attempt's key and its keeper's pid.
Name = tuple[str, int]


class _Prepared(Struct, frozen=True):
    """A slice: most are one attempt."""

    keeper: KeeperConnection
    watched: list[WatchedAttempt]
    content: bytes
    lease: int | None

    @property
    def names(self) -> list[Name]:
        return [(each.key, self.keeper.pid) for each in self.watched]


class LocalEngine(PlacesNothing):
    """Implements `ports.Engine`, for one thread of one process at a time.

    An event loop can watch `fileno()`: it is readable when `ended` should be called.
    """

    def __init__(self, folder: Path, *, open_files: int | None = None) -> None:
        """`folder` holds `journal`, `logs`, `keepers` and `sessions`. `open_files` is the limit on open files for jobs;
        default: that of this process."""
        folder = folder.absolute()
        self._open_files = open_files_limit() if open_files is None else open_files
        self._logs = folder / "logs"
        keepers_at = f"{folder}/keepers"
        self._sessions_at = f"{folder}/sessions"
        try:
            for place in (str(self._logs), keepers_at, self._sessions_at):
                make_folder(place, is_closed=True)
            self._journal = Journal(f"{folder}/journal")
        except OSError as error:
            raise EnvironmentFault(
                f"{error.filename or folder} cannot be used for the queue: {error.strerror}",
                hint="see that the folder is yours and its disk not full, or set GPUYARD_HOME to another",
            ) from error
        self._poll = WakeablePoll()
        builder = LaunchBuilder(folder, self._logs, self._sessions_at, self._poll, open_files=self._open_files)
        self._builder, self.queue, self.variables = builder, builder.queue, builder.variables
        self.containers, self.cgroups, self.results = builder.containers, builder.cgroups, builder.results
        self._log_reads = LogReads(self._logs, self._poll.wake)
        self._signals = ProcessSignals(self.queue, self._poll.wake)
        self._keepers = KeeperSet(keepers_at, self._journal.descriptor, self._open_files, self._poll)
        self._prepared: list[_Prepared] = []
        self._watched: dict[Name, WatchedAttempt] = {}
        self._over: list[Name] = []  # not reported by a keeper; returned at once
        self._held: list[Name] = []  # over, while their containers are removed or their logs are read
        self._unsent: set[Name] = set()  # of those: the keeper did not take them
        self._reported: deque[Name] = deque()  # reported by a keeper
        self._entries: dict[Name, JournalEntry] = {}
        self._begun: list[SiteStatus] = []
        self._may_empty_journal = False

    def fileno(self) -> int:
        """-1 if the system has no epoll: then call `ended` now and then."""
        return self._poll.fileno()

    def close(self) -> None:
        self.discard_prepared()
        self._keepers.close()
        self._log_reads.close()
        self._signals.close()
        self._poll.close()
        self._journal.close()

    # Starting

    def is_ready(self) -> bool:
        """Start a keeper if there is none. One that has not answered within 2 s counts as ready: `prepare` says why it
        cannot be used."""
        try:
            return self._own_keeper().has_answered()
        except EnvironmentFault:
            return True

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        """Raises UserError if the command cannot be passed to a program. Of the rest of a slice, takes those before the
        first of which that is true."""
        own = self._own_keeper()
        built = [self._builder.build(launch, own.pid)]
        with contextlib.suppress(UserError):
            for each in launch.rest:
                built.append(self._builder.build(each, own.pid))  # noqa: PERF401 - keeps those before an error
        message = slice_message([kept for kept, _ in built], has_lease=lease_descriptor is not None)
        watched = [each for _, each in built]
        self._prepared.append(_Prepared(own, watched, frame(message), lease_descriptor))
        first, *rest = (_prepared(each) for each in watched)
        return replace(first, rest=tuple(rest))

    def start_prepared(self) -> None:
        """Send prepared launches to the keeper. `ended` returns those that the keeper does not take."""
        prepared, self._prepared = self._prepared, []
        for each in prepared:
            self._watched.update(zip(each.names, each.watched, strict=True))
        # A keeper has the leases of one message open at a time, under the limit of its jobs.
        at_once = max(1, min(_MOST_AT_ONCE, self._open_files // 2))
        for start in range(0, len(prepared), at_once):
            batch = prepared[start : start + at_once]
            if not self._send(batch):
                names = [name for each in batch for name in each.names]
                self._unsent.update(names)
                self._over += names
                self._poll.wake()
            else:
                self._create_logs(each for one in batch for each in one.watched[1:])
        if self._keepers.own is not None:
            self._keepers.own.was_heard = False

    def discard_prepared(self) -> None:
        self._prepared.clear()

    # The rest of slices

    def _create_logs(self, upcoming: Iterable[WatchedAttempt]) -> None:
        """Create the logs of attempts whose turn has not come. That takes some file systems longer than the keeper
        needs for all the rest of a start. One that does not start loses its log again."""
        for each in upcoming:
            with contextlib.suppress(OSError):  # the keeper reports it
                if each.log is not None and each.log.startswith(f"{self._logs}/"):
                    os.close(os.open(each.log, _CREATE_LOG, UNBEGUN_LOG))

    def _remove_unused_log(self, watched: WatchedAttempt) -> None:
        with contextlib.suppress(OSError):
            is_own = watched.log is not None and watched.log.startswith(f"{self._logs}/")
            if is_own and watched.log is not None and not os.path.getsize(watched.log):
                os.unlink(watched.log)

    def withdraw(self, attempt: Attempt) -> None:
        """Ask the keeper not to start an attempt whose turn has not come. One that does not answer is not waited for:
        then the attempt stays as it is."""
        for (key, pid), watched in self._watched.items():
            if key == attempt.key and watched.attempt == attempt.number:
                self._keepers.withdraw(pid, key)

    def site_changes(self) -> list[SiteStatus]:
        """Return the attempts of slices that have begun."""
        begun, self._begun = self._begun, []
        return begun

    def _note_begun(self, entry: JournalEntry) -> None:
        if entry.at is not None:  # else it is the first of its slice, and recorded as begun
            job_id, attempt = map(int, entry.key.split("."))
            at = wall_time_of(entry.at)
            self._begun.append(SiteStatus(job_id=job_id, attempt=attempt, site_id="", at=at, keeper_pid=entry.keeper))

    def _send(self, batch: Sequence[_Prepared]) -> bool:
        own = batch[0].keeper
        # Wait for the keeper's greeting: only then can the next daemon find it. That daemon would take attempts of a
        # keeper that it cannot find for attempts that never started.
        while own is self._keepers.own and not own.is_greeted and own.wait_for_greeting():
            self._receive(own)
        if not own.is_greeted or any(each.keeper is not self._keepers.own for each in batch):
            return False
        leases = [each.lease for each in batch if each.lease is not None]
        content = frame(len(leases)) if leases else b""
        return self._keepers.send(own, content + b"".join(each.content for each in batch), leases)

    def _own_keeper(self) -> KeeperConnection:
        """Return the keeper for the next attempt. One that does not answer is replaced by a new one."""
        own = self._keepers.own
        if own is not None and not self._prepared and own.is_silent():  # once for all attempts of a step
            self._keepers.leave_silent(own)
        return self._keepers.own_or_new()

    def problems(self) -> list[str]:
        """Return a line for each keeper that does not answer now, and each container that could not be removed."""
        return [*self._keepers.problems(), *self.containers.problems(), *self.cgroups.problems()]

    # Ending

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        taken_over = list(map(WatchedAttempt.of, attempts))
        if any(not each.keeper_pid for each in taken_over):  # of a slice, or its row was damaged
            last = {(entry.key, entry.keeper): entry.word for entry in self._journal.entries()}
            keepers = {key: keeper for (key, keeper), word in last.items() if not is_unbegun(word)}
            taken_over = [replace(each, keeper_pid=each.keeper_pid or keepers.get(each.key, 0)) for each in taken_over]
        alive = self._keepers.adopt({each.keeper_pid for each in taken_over if each.keeper_pid})
        for each in taken_over:
            name = (each.key, each.keeper_pid)
            self._watched[name] = each
            if each.keeper_pid not in alive:
                self._over.append(name)
        self._read_journal()
        self._over += [name for name, entry in self._entries.items() if name in self._watched and entry.word != BEGAN]
        self._may_empty_journal = True
        self.containers.take_over({attempt.key for attempt in attempts})
        self.cgroups.take_over({attempt.key for attempt in attempts})
        remove_dead_sockets(self._keepers.folder)
        if self._over:
            self._poll.wake()

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        """Unless it `has_unrecorded`, earlier results may be removed from the journal."""
        if self._may_empty_journal and not has_unrecorded and not self._watched:
            self._journal.empty_if_long()
        for pid in self._keepers.reach_again():
            self._end_all_of(pid)
        self.containers.collect()
        for connection in self._keepers.ready():
            self._receive(connection)
        held, over, self._over, self._held = self._held, [*self._held, *self._over], [], []
        over += [self._reported.popleft() for _ in range(min(_MOST_ENDS, len(self._reported)))]
        if self._reported:
            self._poll.wake()
        names = [name for name in dict.fromkeys(over) if name in self._watched]
        return self._results(names, is_cut_off, set(held))

    def _results(self, names: Sequence[Name], is_cut_off: IsCutOff | None, held: set[Name]) -> list[Ended]:
        """Return the ends that are not held back. Of many that were, some follow at the next call."""
        results: list[Ended] = []
        for name in names:
            if name in held and len(results) >= _MOST_ENDS:
                self._held.append(name)
                self._poll.wake()
            elif not self._hold(name, is_cut_off):
                results.append(self._result(name))
        return results

    def _receive(self, connection: KeeperConnection) -> None:
        entries, is_gone = connection.receive()
        for entry in entries:
            self._handle(connection, entry)
        if is_gone:
            self._keepers.drop(connection)
            self._end_all_of(connection.pid)

    def _end_all_of(self, keeper_pid: int) -> None:
        """All attempts of a keeper that is gone are over, and the journal has the last entries."""
        self._read_journal()
        self._over += [name for name in self._watched if name[1] == keeper_pid]
        remove_socket(self._keepers.folder, keeper_pid)

    def _handle(self, connection: KeeperConnection, entry: JournalEntry) -> None:
        if entry.word == HELLO:
            connection.is_greeted = True
            if connection is not self._keepers.own:
                self._read_journal()
                pid = connection.pid
                self._over += [name for name in self._watched if name[1] == pid and name not in self._entries]
            return
        name = (entry.key, entry.keeper)
        if name not in self._watched:
            return
        self._entries[name] = entry
        if entry.word == BEGAN:
            self._note_begun(entry)
        else:
            self._reported.append(name)

    def _hold(self, name: Name, is_cut_off: IsCutOff | None) -> bool:
        """Hold an end back while its logs are read, its container is removed and then its results are brought back; of
        one that was cut off, while its processes are killed."""
        watched, entry = self._watched[name], self._entries.get(name)
        is_held = self._log_reads.is_reading(watched, entry)
        if self.containers.has(name[0]):
            status = watched.outcome(entry).status
            is_held |= self.containers.end(name[0], status, lambda: self.signal(watched.as_attempt(), signal.SIGKILL))
        is_held = is_held or self.results.holds(name[0])
        if (
            not is_held
            and is_cut_off is not None
            and is_cut_off(watched.job_id, watched.attempt, watched.outcome(entry).kind)
        ):
            is_held = None in self.signal_each([watched.as_attempt()], signal.SIGKILL)
        self._held += [name] if is_held else []
        return is_held

    def _result(self, name: Name) -> Ended:
        entry, watched = self._entries.get(name), self._watched.pop(name)
        self._entries.pop(name, None)
        if watched.has_runner:
            with contextlib.suppress(FileNotFoundError):  # the socket that a killed runner left behind
                os.unlink(f"{self._sessions_at}/{name[0]}.sock")
        self._signals.forget(watched.key)
        texts = self._log_reads.take(watched, entry)
        limit = not_taken(name[1], self._keepers.folder) if name in self._unsent else None
        self._unsent.discard(name)
        ended = watched.ended(entry, texts, limit, self.cgroups.end(name[0]))
        if ended.outcome.kind is OutcomeKind.NEVER_STARTED:
            self._remove_unused_log(watched)
        return replace(ended, unbrought=self.results.take_problem(name[0]))

    def _read_journal(self) -> None:
        """Read all of it. Only needed after a daemon or a keeper has died."""
        begun: dict[Name, JournalEntry] = {}
        for entry in self._journal.entries():
            name = (entry.key, entry.keeper)
            if name in self._watched:
                before = self._entries.get(name)
                if entry.word == BEGAN and (before is None or is_unbegun(before.word)):
                    begun[name] = entry
                self._entries[name] = entry
        for name, entry in begun.items():
            if not is_unbegun(self._entries[name].word):
                self._note_begun(entry)

    def signal(self, attempt: Attempt, signum: int) -> int:
        return process_tree.signal_each([attempt], self.queue, signum)[0]

    def signal_each(
        self, attempts: Sequence[Attempt], signum: int, how: Signalling = Signalling.ALL
    ) -> list[int | None]:
        if how is Signalling.SOON:
            self._signals.send(attempts, signum)
            return [None for _ in attempts]
        send = process_tree.warn_each if how is Signalling.HANDLERS else process_tree.signal_each
        return self._signals.signal(attempts, signum, send)

    def pid_of(self, attempt: Attempt) -> int | None:
        """Return the pid of the program itself while it runs, or None."""
        return process_tree.main_process(attempt, self.queue)


def _prepared(watched: WatchedAttempt) -> Prepared:
    return Prepared(
        job_id=watched.job_id,
        attempt=watched.attempt,
        keeper_pid=watched.keeper_pid,
        log=watched.log or "",
        error_log=watched.error_log,
    )
