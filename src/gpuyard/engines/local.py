"""Runs attempts on this machine, each in a session of its own under a supervisor that outlives the daemon.

- The supervisor is a few lines of shell (`supervisor.sh`): it waits at a gate, runs the program with its lease, and
  writes its status to the journal, one file that all of them append to (`journal.py`).
- The gate is a pipe that all supervisors prepared together wait at. Only this process holds the writing end, so its
  death is the end of the pipe, and whoever has not been let through leaves without having run anything.
- An attempt is over when its supervisor is gone. The journal is read after that, never before, so the line of a
  supervisor that has just written it is not missed; one that left no line is LOST.
- The journal is emptied when it has grown, nothing is live, and `ended` is asked again: what it told before has been
  recorded by then.

The job's environment is that of its Launch (`supervisor.py`), and GPUYARD_QUEUE, by which its processes are found again
(`tree.py`).
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.core.jobs import Attempt
from gpuyard.engines import journal, logs, supervisor, tree
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.ports import Ended, Launch, Prepared

_ABOVE_ALL_OF_THEM = 10
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
_LONG_JOURNAL = 1 << 20
_CHUNK = 1 << 14
# Nobody, or a number that is a thread's by now.
_NO_PROCESS = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})


class _Watched(Struct, frozen=True, kw_only=True):
    job_id: int
    attempt: int
    pid: int
    things: journal.Things = journal.Things()

    @property
    def name(self) -> tuple[str, int]:
        return f"{self.job_id}.{self.attempt}", self.pid


class LocalEngine:
    """Implements `ports.Engine`, for one thread of one process at a time.

    An event loop can watch `fileno()`: it is readable while `ended` has something to tell, but for what `adopt` found
    over already. So ask `ended` once after `adopt`.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` holds `journal` and `logs`. Jobs get the umask that this process has now."""
        folder = folder.absolute()
        self._queue = str(folder)
        self._logs = f"{folder}/logs"
        self._umask = _current_umask()
        try:
            _make_private(folder)
            _make_private(Path(self._logs))
            self._journal = _out_of_the_way(_open_journal(folder / "journal"))
            self._nowhere = _out_of_the_way(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise EnvironmentFault(
                f"{error.filename or folder} cannot be used for the queue: {error.strerror}",
                hint="see that the folder is yours and its disk not full, or set GPUYARD_HOME to another",
            ) from error
        self._read_to = 0
        self._may_empty_journal = False
        self._exits = _Exits()
        self._gate: tuple[int, int] | None = None
        self._prepared: set[int] = set()
        self._watched: dict[int, _Watched] = {}
        self._abandoned: set[int] = set()
        self._over: list[_Watched] = []
        self._words: dict[tuple[str, int], str | None] = {}

    def fileno(self) -> int:
        """-1 where the system cannot tell of exits: there, ask `ended` now and then."""
        return self._exits.fileno()

    def close(self) -> None:
        """What was prepared ends, what was begun goes on."""
        self.abandon()
        self._exits.close()
        os.close(self._journal)
        os.close(self._nowhere)

    # Starting

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        """UserError where the command cannot be given to any program."""
        log = f"{self._logs}/{logs.name_of(launch.job_id, launch.attempt)}"
        pid_started = tree.time_now()
        pid = self._spawn(launch, log, lease_descriptor)
        watched = _Watched(
            job_id=launch.job_id,
            attempt=launch.attempt,
            pid=pid,
            things=journal.Things(directory=launch.cwd, program=launch.command[0], stdin=launch.stdin),
        )
        self._prepared.add(self._watch_child(watched))
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, pid=pid, pid_started=pid_started, log=log)

    def begin(self) -> None:
        if self._gate is None:
            return
        waiting, word = self._gate
        os.close(waiting)  # so that a pipe nobody reads from any more breaks, and blocks nobody
        unsaid = b"\n" * len(self._prepared)
        with contextlib.suppress(BrokenPipeError):
            while unsaid:
                unsaid = unsaid[os.write(word, unsaid) :]
        os.close(word)
        self._gate = None
        self._prepared.clear()

    def abandon(self) -> None:
        """They have run nothing, and so are killed: one that cannot write to the journal would stay."""
        for handle in self._prepared:
            watched = self._watched[handle]
            with contextlib.suppress(ProcessLookupError):
                os.kill(watched.pid, signal.SIGKILL)
            del self._words[watched.name]
        self._abandoned.update(self._prepared)
        self._prepared.clear()
        if self._gate is not None:
            for end in self._gate:
                os.close(end)
            self._gate = None

    def _spawn(self, launch: Launch, log: str, lease: int | None) -> int:
        call = supervisor.command(launch, log, self._umask)
        call.environment[tree.QUEUE] = self._queue
        try:
            return os.posix_spawn(
                call.arguments[0],
                call.arguments,
                call.environment,
                file_actions=self._descriptors(lease),
                setsid=True,
                setsigmask=(),
                setsigdef=_SIGNALS,
            )
        except ValueError as error:
            raise UserError(f"the command of job {launch.job_id} cannot be passed to a program: {error}") from error
        except OSError as error:
            raise _spawn_fault(launch, error) from error

    def _descriptors(self, lease: int | None) -> list[tuple[int, int, int]]:
        if self._gate is None:
            waiting, word = os.pipe()
            self._gate = _out_of_the_way(waiting), _out_of_the_way(word)
        # The lease first: it may have any number, also one that another is about to get.
        given = [] if lease is None else [(lease, supervisor.LEASE_AT)]
        given += [
            (self._gate[0], supervisor.GATE_AT),
            (self._nowhere, 1),
            (self._nowhere, 2),
            (self._journal, supervisor.JOURNAL_AT),
        ]
        return [(os.POSIX_SPAWN_DUP2, source, target) for source, target in given]

    def _watch_child(self, watched: _Watched) -> int:
        try:
            return self._watch(watched)
        except EnvironmentFault:
            os.kill(watched.pid, signal.SIGKILL)
            os.waitpid(watched.pid, 0)
            raise

    def _watch(self, watched: _Watched) -> int:
        """ProcessLookupError where nobody is there."""
        try:
            handle = self._exits.watch(watched.pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            raise EnvironmentFault(
                f"job {watched.job_id} cannot be watched over: {error.strerror}",
                hint="raise the limit on open files (ulimit -n) for the daemon, or run fewer jobs at once",
            ) from error
        self._watched[handle] = watched
        self._words[watched.name] = None
        return handle

    # Ending

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            watched = _Watched(job_id=attempt.job_id, attempt=attempt.number, pid=attempt.pid)
            if watched.name not in self._words and not self._adopt_living(attempt, watched):
                self._over.append(watched)
                self._words[watched.name] = None
        self._read_to = 0
        self._may_empty_journal = True

    def _adopt_living(self, attempt: Attempt, watched: _Watched) -> bool:
        """It is looked at once it is watched: before, its pid could have become another's in between."""
        try:
            handle = self._watch(watched)
        except ProcessLookupError:
            return False
        if tree.has_supervisor(attempt):
            return True
        self._exits.forget(handle)
        del self._watched[handle]
        return False

    def ended(self) -> list[Ended]:
        """Ask again only when what was told is recorded: it may be gone from the journal then."""
        self._empty_long_journal()
        over, self._over = self._over, []
        for handle in self._exits.take():
            watched = self._watched.pop(handle)
            self._prepared.discard(handle)
            if handle in self._abandoned:
                self._abandoned.discard(handle)
            else:
                over.append(watched)
        if over:
            self._read_journal()
        return [self._tell(watched) for watched in over]

    def _tell(self, watched: _Watched) -> Ended:
        outcome = journal.outcome_of(self._words.pop(watched.name), watched.things)
        return Ended(job_id=watched.job_id, attempt=watched.attempt, outcome=outcome)

    def _read_journal(self) -> None:
        while text := os.pread(self._journal, _CHUNK, self._read_to):
            entries, length = journal.parse(text)
            for entry in entries:
                if (entry.key, entry.pid) in self._words:
                    self._words[entry.key, entry.pid] = entry.word
            self._read_to += length
            if len(text) < _CHUNK or not length:
                return

    def _empty_long_journal(self) -> None:
        if not self._may_empty_journal or self._watched or self._over:
            return
        if os.fstat(self._journal).st_size > _LONG_JOURNAL:
            os.ftruncate(self._journal, 0)
            self._read_to = 0

    def signal(self, attempt: Attempt, signum: int) -> int:
        return tree.signal_all(attempt, self._queue, signum)


class _Exits:
    """Tells which processes are gone: through a descriptor for each on Linux, else by looking at each pid.

    A handle is the descriptor, or the pid.
    """

    def __init__(self) -> None:
        self._poll = select.epoll() if _has_pidfds() else None
        self._pids: dict[int, int] = {}
        self._started: dict[int, float | None] = {}

    def fileno(self) -> int:
        return -1 if self._poll is None else self._poll.fileno()

    def close(self) -> None:
        for handle in list(self._pids):
            self.forget(handle)
        if self._poll is not None:
            self._poll.close()

    def watch(self, pid: int) -> int:
        """ProcessLookupError where nobody is there."""
        if self._poll is None:
            self._started[pid] = tree.start_time(pid)
            self._pids[pid] = pid
            return pid
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
            raise
        self._pids[handle] = pid
        self._poll.register(handle, select.EPOLLIN)
        return handle

    def forget(self, handle: int) -> None:
        del self._pids[handle]
        if self._poll is not None:
            # Closing alone would not do: a child that is just being made has a copy for a moment, and the poll would
            # tell of this one under the number of the next.
            self._poll.unregister(handle)
            os.close(handle)

    def take(self) -> list[int]:
        """Some that are gone; they are reaped and forgotten.

        One at a time where it can be: while the daemon works on the next, the first one's successor runs already. To
        wait for all of them would have everybody wait for the daemon, and the daemon for everybody, in turns.
        """
        if self._poll is None:
            gone = [pid for pid in self._pids if _reap(pid) or tree.start_time(pid) != self._started[pid]]
        else:
            gone = [handle for handle, _ in self._poll.poll(0, 1)]
        for handle in gone:
            _reap(self._pids[handle])
            self.forget(handle)
        return gone


def _spawn_fault(launch: Launch, error: OSError) -> EnvironmentFault | UserError:
    if error.errno == errno.E2BIG:
        return UserError(
            f"the command of job {launch.job_id} with its environment is longer than the system allows",
            hint="put long arguments into a file",
        )
    return EnvironmentFault(
        f"job {launch.job_id} cannot be started: {error.strerror}",
        hint="see whether the limits on processes or open files (ulimit -u, ulimit -n) are reached",
    )


def _current_umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def _open_journal(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def _out_of_the_way(descriptor: int) -> int:
    """Above the numbers that supervisors know things by; they replace each other one by one."""
    if descriptor >= _ABOVE_ALL_OF_THEM:
        return descriptor
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL_OF_THEM)
    os.close(descriptor)
    return moved


def _has_pidfds() -> bool:
    if not hasattr(os, "pidfd_open") or not hasattr(select, "epoll"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel, or a sandbox
        return False
    return True


def _reap(pid: int) -> bool:
    """Whether it was a child of ours, and over."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False
