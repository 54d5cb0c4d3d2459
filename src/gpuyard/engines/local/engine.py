"""Runs attempts on this machine, each in a session of its own, under a keeper that outlives the daemon.

- Prepared launches stay here until `start_prepared` sends them in one message. A daemon that dies earlier has started
  nothing.
- A daemon that takes over connects to the keepers that live, and waits for their greetings (`keeper.py`). An attempt
  without a line in the journal then, or after the keeper's death, never started. Those that a keeper started before it
  died have no status: they are LOST.
- The journal is emptied when it has grown, no attempt is live, and `ended` is called with all earlier ends recorded.

A job's environment is that of its Launch plus GPUYARD_QUEUE, which identifies its processes."""

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct, convert
from msgspec.structs import replace

from gpuyard.engines.common import job_logs, output_relay
from gpuyard.engines.common.bring_results import SnapshotResults
from gpuyard.engines.common.hold_ends import Holds
from gpuyard.engines.common.program_outcome import (
    OomKillCount,
    StartContext,
    check_arguments,
    evidence_of,
    limit_of,
    outcome_of,
    read_outputs,
)
from gpuyard.engines.common.spawn_program import BEGAN, LEASE_AT, UNBEGUN_LOG, ShellChange, SpawnSpec, is_unbegun
from gpuyard.engines.containers import StartedContainers
from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local.attempt_processes import ProcessSignals
from gpuyard.engines.local.job_cgroups import JobCgroups
from gpuyard.engines.local.keeper import KeptLaunch, Message, frame
from gpuyard.engines.local.keeper_connection import (
    HELLO,
    Journal,
    JournalEntry,
    KeeperConnection,
    KeeperSet,
    remove_dead_sockets,
    remove_socket,
)
from gpuyard.engines.session.task_files import start_command
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.job import Attempt, Outcome, OutcomeKind, Started
from gpuyard.model.out_of_memory import ended_at_limit
from gpuyard.model.shell_environment import UNLIMITED, ShellSettings, differences
from gpuyard.output.progress_line import VARIABLE as PROGRESS_VARIABLE
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.ports import Ended, IsCutOff, Launch, PlacesNothing, Prepared, Signalling, SiteStatus
from gpuyard.system.clock import wall_time_of
from gpuyard.system.private_files import make_folder
from gpuyard.system.submitting_shell import limit_number, read_shell_settings
from gpuyard.system.system_limits import open_files_limit
from gpuyard.system.wakeable_poll import WakeablePoll

# Starts of one message to a keeper; ends that one step records, some 10 ms of work.
_MOST_AT_ONCE = 100

# The attempt's key and its keeper's pid.
Name = tuple[str, int]


class WatchedAttempt(Struct, frozen=True):
    """`kills` is the kernel's count of out-of-memory kills when the attempt started, if known. `has_runner` is set if
    the runner of a session may have left its socket behind."""

    attempt: Attempt
    context: StartContext = StartContext()
    kills: int | None = None
    has_runner: bool = True


class _Prepared(Struct, frozen=True):
    keeper: KeeperConnection
    watched: list[WatchedAttempt]
    content: bytes
    lease: int | None

    @property
    def names(self) -> list[Name]:
        return [(each.attempt.key, self.keeper.pid) for each in self.watched]


class LocalEngine(PlacesNothing):
    """Implements `ports.Engine`, for one thread of one process at a time. An event loop can watch `fileno()`: it is
    readable when `ended` should be called."""

    def __init__(self, folder: Path, *, open_files: int | None = None) -> None:
        """`folder` is the queue's. `open_files` is the limit on open files for jobs; default: that of this process."""
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
        self.queue = str(folder)
        self.variables = {process_tree.QUEUE: self.queue}  # set for all jobs
        self.containers = StartedContainers(f"{folder}/containers", self._poll.wake)
        self.cgroups, self.results = JobCgroups(self.queue), SnapshotResults(self._poll.wake)
        self._own_shell, self._oom_kills = OwnShell(self._open_files), OomKillCount()
        self._log_reads: Holds[list[str]] = Holds(self._poll.wake)
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
        self._signals.close()
        self._poll.close()
        self._journal.close()

    def is_ready(self) -> bool:
        """Start a keeper if there is none. One that is late counts as ready: `prepare` says why it cannot be used."""
        with contextlib.suppress(EnvironmentFault):
            return self._own_keeper().has_answered()
        return True

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        """Raises UserError if the command cannot be passed. Takes the rest of a slice up to the first of which that is
        true."""
        own = self._own_keeper()
        built = [self._build(launch, own.pid)]
        with contextlib.suppress(UserError):
            for each in launch.rest:
                built.append(self._build(each, own.pid))  # noqa: PERF401 - keeps those before an error
        message: Message = (lease_descriptor is not None, [(kept.key, tuple(kept.spec)) for kept, _ in built])
        watched = [each for _, each in built]
        self._prepared.append(_Prepared(own, watched, frame(message), lease_descriptor))
        first, *rest = (_prepared(each.attempt) for each in watched)
        return replace(first, rest=tuple(rest))

    def _build(self, launch: Launch, keeper_pid: int) -> tuple[KeptLaunch, WatchedAttempt]:
        """Raises UserError if the command cannot be passed to a program."""
        outputs = job_logs.outputs_of(f"{self._logs}/{job_logs.name_of(launch.job_id, launch.attempt)}", launch)
        progress = {PROGRESS_VARIABLE: job_logs.progress_file_of(self._logs, launch.key)}
        environment = {**launch.environment, **self.variables, **progress}
        self.results.note(launch)
        launch = self.containers.contain(launch, environment, self.queue)
        check_arguments(launch, environment)
        if launch.folder is not None:
            with contextlib.suppress(OSError):  # the program notices, and has the better error message
                os.mkdir(launch.folder)
        open_files, shell = self._own_shell.changes(launch.shell)
        spec = SpawnSpec(
            command=start_command(launch, self._sessions_at),
            environment=environment,
            directory=launch.cwd,
            outputs=outputs,
            stdin=launch.stdin or "",
            relay=output_relay.command(outputs) if launch.timestamps else (),
            open_files=open_files,
            shell=shell,
            cpus=launch.cpus,
            cgroup=self.cgroups.create(launch.key, launch.ram_limit_mb if launch.container is None else None),
        )
        attempt = Attempt(
            job_id=launch.job_id,
            number=launch.attempt,
            phase=Started(at=0.0, keeper_pid=keeper_pid),
            log=outputs[0][0],
            error_log=outputs[1][0] if len(outputs) > 1 else None,
        )
        kills, has_runner = self._oom_kills.now(), launch.task is not None
        watched = WatchedAttempt(attempt, StartContext.of(launch), kills=kills, has_runner=has_runner)
        return KeptLaunch(launch.key, spec), watched

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
                # The logs of attempts whose turn has not come: creating them takes some file systems longer than the
                # keeper needs for all the rest of a start. One that does not start loses its log again.
                for log in (each.attempt.log or "" for one in batch for each in one.watched[1:]):
                    if self._is_own(log):
                        with contextlib.suppress(OSError):  # the keeper reports it
                            os.close(os.open(log, os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, UNBEGUN_LOG))
        if self._keepers.own is not None:
            self._keepers.own.was_heard = False

    def discard_prepared(self) -> None:
        self._prepared.clear()

    def withdraw(self, attempt: Attempt) -> None:
        """Ask the keeper not to start an attempt whose turn has not come. One that does not answer is not waited
        for."""
        for key, pid in self._watched:
            if key == attempt.key:
                self._keepers.withdraw(pid, key)

    def site_changes(self) -> list[SiteStatus]:
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
        return [*self._keepers.problems(), *self.containers.problems(), *self.cgroups.problems()]

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        keepers: dict[str, int] = {}
        adopted: list[Name] = []
        if any(not each.keeper_pid for each in attempts):  # of a slice, or its row was damaged
            last = {(entry.key, entry.keeper): entry.word for entry in self._journal.entries()}
            keepers = {key: keeper for (key, keeper), word in last.items() if not is_unbegun(word)}
        for attempt in attempts:
            pid = attempt.keeper_pid or keepers.get(attempt.key, 0)
            known = attempt if attempt.keeper_pid else replace(attempt, phase=Started(at=0.0, keeper_pid=pid))
            self._watched[attempt.key, pid] = WatchedAttempt(known)
            adopted.append((attempt.key, pid))
        alive = self._keepers.adopt({pid for _, pid in adopted if pid})
        self._over += [name for name in adopted if name[1] not in alive]
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
        held, over, self._over, self._held = set(self._held), [*self._held, *self._over], [], []
        over += [self._reported.popleft() for _ in range(min(_MOST_AT_ONCE, len(self._reported)))]
        if self._reported:
            self._poll.wake()
        results: list[Ended] = []
        for name in [name for name in dict.fromkeys(over) if name in self._watched]:
            if (
                len(results) >= _MOST_AT_ONCE and name in held
            ):  # of many that were held back, some follow at the next call
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

    def _outcome(self, name: Name) -> Outcome:
        entry = self._entries.get(name)
        return outcome_of(None if entry is None else entry.word, self._watched[name].context)

    def _hold(self, name: Name, is_cut_off: IsCutOff | None) -> bool:
        """Hold an end back while its logs are read, its container is removed and then its results are brought back; of
        one that was cut off, while its processes are killed."""
        attempt, outcome = self._watched[name].attempt, self._outcome(name)
        is_held = False
        if outcome.kind is OutcomeKind.FAILED and not all(map(self._is_own, filter(None, _logs_of(attempt)))):
            is_held = self._log_reads.holds(name[0], partial(read_outputs, outcome, _logs_of(attempt), name[0]), 30.0)
        if self.containers.has(name[0]):
            kill = partial(self.signal, attempt, signal.SIGKILL)
            is_held |= self.containers.end(name[0], outcome.status, kill)
        is_held = is_held or self.results.holds(name[0])
        if not is_held and is_cut_off is not None and is_cut_off(attempt.job_id, attempt.number, outcome.kind):
            is_held = None in self.signal_each([attempt], signal.SIGKILL)
        self._held += [name] if is_held else []
        return is_held

    def _result(self, name: Name) -> Ended:
        outcome, (key, keeper) = self._outcome(name), name
        entry, watched = self._entries.pop(name, None), self._watched.pop(name)
        attempt = watched.attempt
        if watched.has_runner:
            with contextlib.suppress(FileNotFoundError):  # the socket that a killed runner left behind
                os.unlink(f"{self._sessions_at}/{key}.sock")
        self._signals.forget(key)
        if key in self._log_reads.begun:
            texts = self._log_reads.take(key) or []
        else:
            texts = read_outputs(outcome, _logs_of(attempt), key, is_local=True)
        evidence = evidence_of(outcome, texts, watched.kills)
        limit = limit_of(None if entry is None else entry.word)
        if name in self._unsent:
            text = f"the keeper of jobs (process {keeper}) ended or does not answer"
            limit = ResourceLimit(
                text=text, remedy=f"see {self._keepers.folder}/log, and whether disk or memory is full"
            )
        self._unsent.discard(name)
        if evidence.outcome.kind is OutcomeKind.NEVER_STARTED and attempt.log and self._is_own(attempt.log):
            with contextlib.suppress(OSError):
                if not os.path.getsize(attempt.log):
                    os.unlink(attempt.log)
        return Ended(
            job_id=attempt.job_id,
            attempt=attempt.number,
            outcome=evidence.outcome,
            pid=None if entry is None else entry.pid,
            at=None if entry is None or entry.at is None else wall_time_of(entry.at),
            shortage=ended_at_limit(self.cgroups.end(key)) or evidence.shortage,
            device_fault=evidence.device_fault,
            limit=limit,
            unbrought=self.results.take_problem(key),
        )

    def _is_own(self, log: str) -> bool:
        """Return whether a log is the queue's, and not a file that the user named."""
        return log.startswith(f"{self._logs}/")

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
        return process_tree.main_process(attempt, self.queue)


def _prepared(attempt: Attempt) -> Prepared:
    return Prepared(
        job_id=attempt.job_id,
        attempt=attempt.number,
        keeper_pid=attempt.keeper_pid,
        log=attempt.log or "",
        error_log=attempt.error_log,
    )


def _logs_of(attempt: Attempt) -> tuple[str | None, str | None]:
    return attempt.log, attempt.error_log


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
