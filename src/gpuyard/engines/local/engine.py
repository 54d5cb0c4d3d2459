"""Runs attempts on this machine, each in a session of its own, under a keeper that outlives the daemon.

- The keeper (`keeper.py`) is the parent of all that a daemon starts. It writes to the journal, one file that all
  keepers append to (`journal.py`), what begins and how it ended, and tells the daemon.
- What is prepared is kept here and is sent with `start_prepared`, in one message. A daemon that dies before that has
  started nothing.
- A daemon that takes over connects to the keepers that live. A keeper greets it only when all that its own daemon had
  sent is begun; so what has no line in the journal then, or when the keeper is gone, never began.
- A keeper that is gone left what it began without a status: those attempts are LOST.
- The journal is emptied when it has grown, nothing is live, and `ended` is asked again: what it told before has been
  recorded by then.

The job's environment is that of its Launch, and GPUYARD_QUEUE, by which its processes are found again (`tree.py`).
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.core.job.job import Attempt
from gpuyard.engines.argument_checks import refuse_unpassable
from gpuyard.engines.local import job_logs, keeper, keeper_journal, oom_evidence, process_tree
from gpuyard.engines.local.keeper_connection import KeeperConnection, connect
from gpuyard.engines.session.runner_command import remove_socket, start_command
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Ended, Launch, PlacesNothing, Prepared

_LONG_JOURNAL = 1 << 20
_CHUNK = 1 << 16
_MOST_AT_ONCE = 100
_HINDERED_S = 1.0
_COUNT_EVERY_S = 1.0
_ABOVE_ALL_OF_THEM = 10
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})

Name = tuple[str, int]


class _WatchedAttempt(Struct, frozen=True, kw_only=True):
    """`kills` is how many the kernel had killed for want of memory when it began, where that is known."""

    job_id: int
    attempt: int
    things: keeper_journal.StartContext = keeper_journal.StartContext()
    log: str | None = None
    kills: int | None = None


class _Prepared(Struct, frozen=True):
    keeper: KeeperConnection
    watched: _WatchedAttempt
    content: bytes
    lease: int | None

    @property
    def name(self) -> Name:
        return f"{self.watched.job_id}.{self.watched.attempt}", self.keeper.pid


class LocalEngine(PlacesNothing):
    """Implements `ports.Engine`, for one thread of one process at a time.

    An event loop can watch `fileno()`: it is readable while `ended` has something to do or to tell.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` holds `journal`, `logs`, `keepers` and `sessions`. Jobs get our umask as it is at the first one."""
        folder = folder.absolute()
        self.queue = str(folder)
        self._logs = f"{folder}/logs"
        self._keepers_at = f"{folder}/keepers"
        self._sessions_at = f"{folder}/sessions"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # one that is there may be more than ours
            for place in (self._logs, self._keepers_at, self._sessions_at):
                _make_private(Path(place))
            self._journal = _open_journal(folder / "journal")
        except OSError as error:
            raise EnvironmentFault(
                f"{error.filename or folder} cannot be used for the queue: {error.strerror}",
                hint="see that the folder is yours and its disk not full, or set GPUYARD_HOME to another",
            ) from error
        self._poll = select.epoll() if hasattr(select, "epoll") else None
        self._bell = _hang_bell(self._poll)
        self._own: KeeperConnection | None = None
        self._keepers: dict[int, KeeperConnection] = {}
        self._prepared: list[_Prepared] = []
        self._watched: dict[Name, _WatchedAttempt] = {}
        self._over: list[Name] = []
        self._news: deque[Name] = deque()
        self._words: dict[Name, keeper_journal.JournalEntry] = {}
        self._may_empty_journal = False
        self._hindered_until = 0.0
        self._counted_at = float("-inf")
        self._kills: int | None = None

    def fileno(self) -> int:
        """-1 where the system cannot watch several at once: there, ask `ended` now and then."""
        return -1 if self._poll is None else self._poll.fileno()

    def close(self) -> None:
        self.discard_prepared()
        for each in list(self._keepers.values()):
            self._part_with(each)
        if self._poll is not None:
            self._poll.close()
            os.close(self._bell)
        os.close(self._journal)

    # Starting

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        """UserError where the command cannot be given to any program."""
        if time.monotonic() < self._hindered_until:
            raise EnvironmentFault(
                f"no job could be begun just now: the journal in {self.queue} cannot be written, or no file be opened",
                hint="free some disk space, or see whether the limit on open files (ulimit -n) is reached",
            )
        own = self._own_keeper()
        log = f"{self._logs}/{job_logs.name_of(launch.job_id, launch.attempt)}"
        environment = {**launch.environment, process_tree.QUEUE: self.queue}
        refuse_unpassable(launch, environment)
        if launch.folder is not None:
            with contextlib.suppress(OSError):  # the program finds out, and knows better what to say
                os.mkdir(launch.folder)
        content = keeper.frame(
            (
                launch.key, lease_descriptor is not None, start_command(launch, self._sessions_at),
                environment, launch.cwd, log, launch.stdin or "",
            )
        )  # fmt: skip
        things = keeper_journal.StartContext(directory=launch.cwd, program=launch.command[0], stdin=launch.stdin)
        watched = _WatchedAttempt(
            job_id=launch.job_id, attempt=launch.attempt, things=things, log=log, kills=self._count_kills()
        )
        self._prepared.append(_Prepared(own, watched, content, lease_descriptor))
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, pid=own.pid, log=log)

    def start_prepared(self) -> None:
        """Sends it to the keeper. Of what the keeper does not take, `ended` tells that it never began."""
        prepared, self._prepared = self._prepared, []
        for each in prepared:
            self._watched[each.name] = each.watched
        for start in range(0, len(prepared), _MOST_AT_ONCE):
            some = prepared[start : start + _MOST_AT_ONCE]
            if not self._send(some):
                self._over += [each.name for each in some]
                self._ring()

    def discard_prepared(self) -> None:
        self._prepared.clear()

    def _send(self, some: Sequence[_Prepared]) -> bool:
        own = some[0].keeper
        if any(each.keeper is not own for each in some) or not self._is_there(own):
            return False
        leases = [each.lease for each in some if each.lease is not None]
        content = keeper.frame(len(leases)) if leases else b""
        is_sent = own.send(content + b"".join(each.content for each in some), leases)
        self._watch(own)
        return is_sent

    def _is_there(self, own: KeeperConnection) -> bool:
        """Only what can be found by those who come after us may be told anything: they would take what they do not
        find for something that never began."""
        while own is self._own and not own.is_greeted and own.has_news_soon():
            self._listen(own)
        return own is self._own and own.is_greeted

    def _own_keeper(self) -> KeeperConnection:
        if self._own is None:
            try:
                self._own = self._make_keeper()
            except OSError as error:
                raise EnvironmentFault(
                    f"no process can be made to keep jobs: {error.strerror}",
                    hint="see whether the limits on processes or open files (ulimit -u, ulimit -n) are reached",
                ) from error
            self._meet(self._own)
        if self._own.is_outdated:
            raise EnvironmentFault(
                f"the process {self._own.pid}, which keeps jobs, does not answer",
                hint="see whether a file system that jobs use hangs",
            )
        return self._own

    def _make_keeper(self) -> KeeperConnection:
        ours, its = socket.socketpair()
        with its:
            try:
                return KeeperConnection(self._spawn_keeper(its.fileno()), ours)
            except OSError:
                ours.close()
                raise

    def _spawn_keeper(self, connection: int) -> int:
        with contextlib.ExitStack() as until_spawned:

            def opened(descriptor: int) -> int:
                until_spawned.callback(os.close, descriptor)
                return descriptor

            def moved(descriptor: int) -> int:
                return opened(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL_OF_THEM))

            nowhere = opened(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            log = opened(
                os.open(f"{self._keepers_at}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            )
            given = [(moved(connection), keeper.CONNECTION), (moved(self._journal), keeper.JOURNAL)]
            streams = [(nowhere, 0), (log, 1), (log, 2)]
            return os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(keeper.__file__), self._keepers_at],
                {"PATH": os.defpath},
                file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in (*given, *streams)],
                setsid=True,
                setsigmask=(),
                setsigdef=_SIGNALS,
            )

    # Ending

    def adopt(self, attempts: Sequence[Attempt]) -> None:
        for pid in {attempt.pid for attempt in attempts}:
            connection = connect(self._keepers_at, pid)
            if connection is not None:
                self._meet(connection)
        alive = {each.pid for each in self._keepers.values()}
        for attempt in attempts:
            name = (attempt.key, attempt.pid)
            self._watched[name] = _WatchedAttempt(job_id=attempt.job_id, attempt=attempt.number, log=attempt.log)
            if attempt.pid not in alive:
                self._over.append(name)
        self._read_journal()
        self._over += [name for name, entry in self._words.items() if name in self._watched and _is_last(entry)]
        self._may_empty_journal = True
        self._ring()

    def ended(self) -> list[Ended]:
        """Ask again only when what was told is recorded: it may be gone from the journal then."""
        self._empty_long_journal()
        for each in self._ready():
            if each.is_outdated:
                each.send_rest()
                self._watch(each)
            self._listen(each)
        over, self._over = self._over, []
        if self._news:
            # Half of them at a time: while the rest is seen to, the successors of the first ones run already. To wait
            # for all would have the jobs wait for the daemon, and the daemon for the jobs, in turns; and where steps
            # are far apart, one at a time would be fewer than begin.
            over += [self._news.popleft() for _ in range(max(1, len(self._news) // 2))]
            self._ring()
        return [self._tell(name) for name in dict.fromkeys(over) if name in self._watched]

    def _ready(self) -> list[KeeperConnection]:
        if self._poll is None:
            return list(self._keepers.values())
        ready = [descriptor for descriptor, _ in self._poll.poll(0)]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        return [self._keepers[descriptor] for descriptor in ready if descriptor != self._bell]

    def _listen(self, each: KeeperConnection) -> None:
        entries, is_gone = each.listen()
        for entry in entries:
            self._hear(each, entry)
        if is_gone:
            self._lose(each)

    def _hear(self, each: KeeperConnection, entry: keeper_journal.JournalEntry) -> None:
        if entry.word == keeper_journal.HELLO:
            each.is_greeted = True
            if each is not self._own:
                self._read_journal()
                self._over += [name for name in self._watched if name[1] == each.pid and name not in self._words]
            return
        name = (entry.key, entry.keeper)
        if name in self._watched and _is_last(entry):
            if entry.word == keeper_journal.UNBEGUN:
                self._hindered_until = time.monotonic() + _HINDERED_S
            self._words[name] = entry
            self._news.append(name)

    def _lose(self, each: KeeperConnection) -> None:
        """Nothing more will be heard of what it kept."""
        self._part_with(each)
        self._read_journal()
        self._over += [name for name in self._watched if name[1] == each.pid]

    def _tell(self, name: Name) -> Ended:
        watched, entry = self._watched.pop(name), self._words.pop(name, None)
        remove_socket(self._sessions_at, name[0])
        outcome = keeper_journal.outcome_of(entry.word if entry is not None else None, watched.things)
        pid, at = (entry.pid, entry.at) if entry is not None else (None, None)
        shortage = oom_evidence.shortage_of(outcome, watched.log, watched.kills)
        return Ended(job_id=watched.job_id, attempt=watched.attempt, outcome=outcome, pid=pid, at=at, shortage=shortage)

    def _count_kills(self) -> int | None:
        """Not for each of a thousand that begin in a second."""
        now = time.monotonic()
        if now >= self._counted_at + _COUNT_EVERY_S:
            self._counted_at, self._kills = now, oom_evidence.oom_kills()
        return self._kills

    def _ring(self) -> None:
        """There is something to be told that no keeper will wake anybody for."""
        if self._poll is not None and (self._over or self._news):
            os.eventfd_write(self._bell, 1)

    def _meet(self, each: KeeperConnection) -> None:
        self._keepers[each.fileno()] = each
        if self._poll is not None:
            self._poll.register(each.fileno(), select.EPOLLIN)

    def _watch(self, each: KeeperConnection) -> None:
        if self._poll is not None:
            self._poll.modify(each.fileno(), select.EPOLLIN | (select.EPOLLOUT if each.is_outdated else 0))

    def _part_with(self, each: KeeperConnection) -> None:
        if self._poll is not None:
            self._poll.unregister(each.fileno())
        del self._keepers[each.fileno()]
        each.close()
        if each is self._own:
            self._own = None
            with contextlib.suppress(ChildProcessError):
                os.waitpid(each.pid, os.WNOHANG)

    def _read_journal(self) -> None:
        """All of it: only after a daemon's or a keeper's death does anybody need it."""
        at = 0
        while text := os.pread(self._journal, _CHUNK, at):
            entries, length = keeper_journal.parse(text)
            for entry in entries:
                if (entry.key, entry.keeper) in self._watched:
                    self._words[entry.key, entry.keeper] = entry
            if not length:
                return
            at += length

    def _empty_long_journal(self) -> None:
        if self._may_empty_journal and not self._watched and os.fstat(self._journal).st_size > _LONG_JOURNAL:
            os.ftruncate(self._journal, 0)

    def signal(self, attempt: Attempt, signum: int) -> int:
        return process_tree.signal_all(attempt, self.queue, signum)

    def pid_of(self, attempt: Attempt) -> int | None:
        """The program's own, while it runs."""
        return process_tree.main_process(attempt, self.queue)


def _is_last(entry: keeper_journal.JournalEntry) -> bool:
    return entry.word != keeper_journal.BEGAN


def _hang_bell(poll: "select.epoll | None") -> int:
    if poll is None:
        return -1
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    poll.register(bell, select.EPOLLIN)
    return bell


def _make_private(folder: Path) -> None:
    folder.mkdir(exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def _open_journal(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor
