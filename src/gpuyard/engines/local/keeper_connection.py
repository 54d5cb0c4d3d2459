"""The daemon's end of the connections to keepers, and their journal (`keeper.py` describes its lines). The keeper's pid
is part of a line because an attempt that never started may be prepared again under the same key.

A message to a keeper is sent whole or not at all, however long that takes: half a launch would garble all that follow.
Nothing here waits for longer than 2 s: a keeper that is stopped (SIGSTOP), hangs or cannot be reached counts as alive.
Meanwhile another keeper starts new attempts."""

import contextlib
import errno
import fcntl
import logging
import os
import re
import select
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.engines.common.spawn_program import is_unbegun, spawn_in_session
from gpuyard.engines.local import keeper
from gpuyard.engines.local.attempt_processes import is_stopped
from gpuyard.engines.local.keeper import frame
from gpuyard.errors import EnvironmentFault
from gpuyard.system import user_sockets
from gpuyard.system.private_files import PrivateFileError, open_own
from gpuyard.system.processes import python_command
from gpuyard.system.system_limits import remedy_of
from gpuyard.system.wakeable_poll import WakeablePoll

_log = logging.getLogger(__name__)
HELLO = "hello"
_SEND_TIMEOUT_MS = _GREETING_MS = 2_000
_LINE = re.compile(rb"([0-9]+\.[0-9]+) ([0-9]+) ([0-9]+|[a-z-]+)(?: ([0-9]+))?(?: ([0-9]+\.[0-9]+))? \.")
# As 17.1.log, of attempt 1 of job 17.
_LOG_NAME = re.compile(r"([0-9]{1,18})\.([0-9]{1,9})\.[a-z.]+")


class JournalEntry(Struct, frozen=True):
    """`word` is a word or an exit status. `pid` is the program's, if it ran. `at` is when it ended or, within a slice,
    began, in seconds since the machine booted."""

    key: str
    keeper: int
    word: str
    pid: int | None = None
    at: float | None = None


def parse_journal(text: bytes) -> tuple[list[JournalEntry], int]:
    """Return the entries of all complete lines, and the length of those lines."""
    end = text.rfind(b"\n") + 1
    entries = []
    for match in filter(None, map(_LINE.fullmatch, text[:end].split(b"\n"))):
        pid = int(match[4]) if match[4] is not None else None
        at = float(match[5]) if match[5] is not None else None
        entries.append(JournalEntry(match[1].decode(), int(match[2]), match[3].decode(), pid, at))
    return entries, end


def begun_attempts(journal: Path, logs: Iterable[Path]) -> dict[int, int]:
    """Return the highest attempt that has begun for each job, according to the journal and the logs in these folders: a
    long journal is emptied. What cannot be read is left out; in case of doubt an attempt has begun."""
    begun: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        entries, _ = parse_journal(journal.read_bytes())
        last = {(entry.key, entry.keeper): entry.word for entry in entries}  # an unbegun one has `began` before it
        keys = (key.split(".") for (key, _), word in last.items() if not is_unbegun(word))
        begun += [(int(job_id), int(number)) for job_id, number in keys]
    for folder in logs:
        with contextlib.suppress(OSError):
            for name in filter(None, map(_LOG_NAME.fullmatch, os.listdir(folder))):
                log = None
                with contextlib.suppress(OSError):
                    log = os.lstat(folder / name[0])
                if log is None or log.st_size or not (stat.S_ISREG(log.st_mode) and log.st_mode & stat.S_ISVTX):
                    begun.append((int(name[1]), int(name[2])))
    return {job_id: number for job_id, number in sorted(begun) if job_id}


class KeeperConnection:
    def __init__(self, pid: int, link: socket.socket) -> None:
        link.settimeout(0)
        self.pid = pid
        self.is_greeted = False
        self.is_late = False  # it was waited for, and has not greeted
        self.was_heard = False  # it sent something in this step
        self._link = link
        self._since = time.monotonic()
        self._unread = b""
        self._unsent = memoryview(b"")

    def fileno(self) -> int:
        return self._link.fileno()

    def close(self) -> None:
        self._link.close()

    @property
    def has_unsent(self) -> bool:
        return len(self._unsent) > 0

    def is_silent(self) -> bool:
        """Return whether the keeper does not read, or is stopped. One that was heard is not: finding out reads a
        file."""
        return self.has_unsent or (not self.was_heard and is_stopped(self.pid))

    def receive(self) -> tuple[list[JournalEntry], bool]:
        """Return new entries, and whether the keeper is gone."""
        received, is_gone = b"", False
        while not is_gone:
            try:
                received = self._link.recv(1 << 13)
            except BlockingIOError:
                break
            except ConnectionError:
                received = b""
            self._unread += received
            self.was_heard, is_gone = self.was_heard or bool(received), not received
        entries, length = parse_journal(self._unread)
        self._unread = self._unread[length:]
        return entries, is_gone

    def has_answered(self) -> bool:
        """Return whether the keeper has greeted, or is late with it."""
        self.is_late = self.is_late or time.monotonic() > self._since + _GREETING_MS / 1000
        return self.is_greeted or self.is_late

    def wait_for_greeting(self) -> bool:
        """Wait for something to read, up to 2 s and only once: a later greeting is read when it arrives."""
        self.is_late = self.is_late or not self._wait(select.POLLIN, _GREETING_MS)
        return not self.is_late

    def send(self, content: bytes, leases: Sequence[int]) -> bool:
        """Return False if the keeper is gone or not reading; nothing was sent."""
        self.send_rest()
        if self.has_unsent:
            return False
        sent = self._send(memoryview(content), leases)
        self._unsent = memoryview(content)[sent:] if sent else self._unsent
        self.send_rest()
        return sent > 0

    def withdraw(self, key: str) -> None:
        """Ask the keeper not to start this launch, without waiting for one that does not read."""
        content = memoryview(bytes(self._unsent) + frame([key]))
        with contextlib.suppress(OSError):
            content = content[self._link.send(content) :]
        self._unsent = content

    def send_rest(self) -> None:
        while self._unsent:
            sent = self._send(self._unsent, ())
            if not sent:
                return
            self._unsent = self._unsent[sent:]

    def _send(self, content: memoryview, leases: Sequence[int]) -> int:
        """Return how many bytes were sent. A keeper that reads nothing for 2 s hangs, as on a file system that is
        gone."""
        numbers = b"".join(descriptor.to_bytes(4, sys.byteorder) for descriptor in leases)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if leases else []
        deadline = time.monotonic() + _SEND_TIMEOUT_MS / 1000
        while True:
            try:
                return self._link.sendmsg([content], rights)
            except BlockingIOError:
                if not self._wait(select.POLLOUT, _SEND_TIMEOUT_MS):
                    return 0
            except OSError as error:
                # The keeper has to receive others first: the system bounds the descriptors that are under way.
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    return 0
                time.sleep(0.001)

    def _wait(self, event: int, timeout_ms: int) -> bool:
        poll = select.poll()
        poll.register(self._link, event)
        return bool(poll.poll(timeout_ms))


class KeeperUnreachable(EnvironmentFault):
    """A keeper that may live cannot be connected to now. It must not count as gone: its jobs would start twice."""


def connect(folder: str, pid: int) -> KeeperConnection | None:
    """Connect to a running keeper, without waiting; None if there is none. Any other failure is KeeperUnreachable."""
    try:
        link = user_sockets.connect(f"{folder}/{pid}.sock", timeout_s=0)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except BlockingIOError:
        raise KeeperUnreachable("it does not accept connections") from None
    except OSError as error:
        raise KeeperUnreachable(error.strerror or str(error)) from error
    except PrivateFileError as error:
        raise KeeperUnreachable(error.message) from error
    return KeeperConnection(pid, socket.socket(fileno=link.detach()))


def remove_dead_sockets(folder: str) -> None:
    """Remove the sockets of keepers that were killed. A keeper that ends by itself removes its own."""
    for name in os.listdir(folder):
        pid, dot, suffix = name.partition(".")
        if dot and suffix == "sock" and pid.isdecimal():
            with contextlib.suppress(KeeperUnreachable):
                connection = connect(folder, int(pid))
                if connection is None:
                    remove_socket(folder, int(pid))
                else:
                    connection.close()


def remove_socket(folder: str, pid: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{pid}.sock")


def spawn_keeper(folder: str, journal: int, open_files: int) -> KeeperConnection:
    """Start a keeper that listens in this folder; its jobs may have `open_files` open. Raises OSError."""
    ours, theirs = socket.socketpair()
    with contextlib.ExitStack() as until_spawned:

        def above_given(descriptor: int) -> int:
            copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
            until_spawned.callback(os.close, copy)
            return copy

        until_spawned.enter_context(theirs)
        command = python_command(keeper.__name__, folder, str(open_files), options=("-I", "-S"))
        try:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            until_spawned.callback(os.close, null)
            log = open_own(f"{folder}/log")
            until_spawned.callback(os.close, log)
            given = [(above_given(theirs.fileno()), keeper.CONNECTION), (above_given(journal), keeper.JOURNAL)]
            streams = [(null, 0), (log, 1), (log, 2)]
            pid = spawn_in_session(sys.executable, command, {"PATH": os.defpath}, [*given, *streams])
        except (OSError, PrivateFileError):
            ours.close()
            raise
    return KeeperConnection(pid, ours)


def silent_problem(pid: int, why: str | None = None) -> str:
    """Return what is wrong with a keeper that does not answer. `why` is set if there is no connection to it."""
    if is_stopped(pid):
        why, remedy = "is stopped", f"`kill -CONT {pid}` continues it"
    else:
        why = f"cannot be reached: {why}" if why else "does not answer"
        remedy = "see whether a file system that jobs use hangs"
    return f"the keeper {pid} {why}; its jobs keep running, and their ends are recorded when it answers: {remedy}"


class Journal:
    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.descriptor = open_own(path)
        os.fchmod(self.descriptor, 0o600)

    def entries(self) -> Iterator[JournalEntry]:
        """Yield all entries, in order. Only needed after a daemon or a keeper has died."""
        at = 0
        while text := os.pread(self.descriptor, 1 << 16, at):
            entries, length = parse_journal(text)
            yield from entries
            if not length:
                return
            at += length

    def empty_if_long(self) -> None:
        """Call it only when all that it says is recorded."""
        if os.fstat(self.descriptor).st_size > 1 << 20:
            os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        os.close(self.descriptor)


# With this many keepers that do not answer, new attempts wait: what stops one may stop all.
_MOST_SILENT = 4


class KeeperSet:
    def __init__(self, folder: str, journal: int, open_files: int, poll: WakeablePoll) -> None:
        """`folder` holds their sockets; they write to `journal`; `open_files` is their jobs' limit."""
        self.folder = folder
        self.own: KeeperConnection | None = None  # starts new attempts
        self._journal, self._open_files, self._poll = journal, open_files, poll
        self._connected: dict[int, KeeperConnection] = {}  # by descriptor
        self._silent: dict[int, KeeperConnection] = {}  # by pid; replaced as the keeper of new attempts
        self._unreached: dict[int, str] = {}  # by pid: why there is no connection yet

    def close(self) -> None:
        for connection in list(self._connected.values()):
            self.drop(connection)

    def own_or_new(self) -> KeeperConnection:
        """Return our own keeper, or start one. Raises EnvironmentFault if that fails, or if it has not answered in
        time."""
        if self.own is None:
            try:
                self.own = spawn_keeper(self.folder, self._journal, self._open_files)
            except OSError as error:
                raise EnvironmentFault(
                    f"the keeper of jobs cannot be started: {error.strerror}", hint=remedy_of(error)
                ) from error
            self._add(self.own)
        if self.own.is_late and not self.own.is_greeted:
            raise EnvironmentFault(
                f"the keeper of jobs (process {self.own.pid}) has not answered yet",
                hint="the machine is busy, or a file system hangs",
            )
        return self.own

    def leave_silent(self, own: KeeperConnection) -> None:
        """Let the next attempts get another keeper. Raises EnvironmentFault if too many do not answer."""
        known = ((pid, each) for pid, each in self._silent.items() if self._connected.get(each.fileno()) is each)
        self._silent = {pid: each for pid, each in known if each.is_silent()}
        if len(self._silent) >= _MOST_SILENT:
            pids = " ".join(map(str, self._silent))
            raise EnvironmentFault(
                f"{len(self._silent)} keepers of jobs do not answer (processes {pids})",
                hint=f"`kill -CONT {pids}` if they are stopped, or see whether a file system that jobs use hangs",
            )
        self._silent[own.pid] = own
        self.own = None
        _log.warning("%s; another keeper starts new jobs", silent_problem(own.pid))

    def send(self, connection: KeeperConnection, content: bytes, leases: Sequence[int]) -> bool:
        is_sent = connection.send(content, leases)
        self._poll.want_to_write(connection.fileno(), wants=connection.has_unsent)
        return is_sent

    def withdraw(self, pid: int, key: str) -> None:
        connection = next((each for each in self._connected.values() if each.pid == pid), None)
        if connection is not None:
            connection.withdraw(key)
            self._poll.want_to_write(connection.fileno(), wants=connection.has_unsent)

    def ready(self) -> Iterator[KeeperConnection]:
        """Yield the connections that have something to read, or whose keepers are gone."""
        for connection in self._poll.ready(self._connected):
            if connection.has_unsent:
                connection.send_rest()
                self._poll.want_to_write(connection.fileno(), wants=connection.has_unsent)
            yield connection

    def drop(self, connection: KeeperConnection) -> None:
        self._poll.forget(connection.fileno())
        del self._connected[connection.fileno()]
        connection.close()
        if connection is self.own:
            self.own = None
        with contextlib.suppress(ChildProcessError):  # an earlier daemon's
            os.waitpid(connection.pid, os.WNOHANG)

    def problems(self) -> list[str]:
        silent = [silent_problem(each.pid) for each in self._connected.values() if each.is_silent()]
        return [*silent, *(silent_problem(pid, why) for pid, why in self._unreached.items())]

    def adopt(self, pids: Iterable[int]) -> set[int]:
        """Connect to these keepers. Return the pids of all keepers that count as alive."""
        for pid in pids:
            self._reach(pid)
            if pid in self._unreached:
                _log.warning("%s", silent_problem(pid, self._unreached[pid]))
        return {*self._unreached, *(each.pid for each in self._connected.values())}

    def reach_again(self) -> Iterator[int]:
        """Try to connect to the keepers that could not be reached. Yield the pids of those that are gone."""
        for pid in list(self._unreached):
            if not self._reach(pid):
                yield pid

    def _reach(self, pid: int) -> bool:
        """Connect to the keeper of an earlier daemon. Return False if it is gone."""
        try:
            connection = connect(self.folder, pid)
        except KeeperUnreachable as error:
            self._unreached[pid] = error.message
            return True
        self._unreached.pop(pid, None)
        if connection is not None:
            self._add(connection)
        return connection is not None

    def _add(self, connection: KeeperConnection) -> None:
        self._connected[connection.fileno()] = connection
        self._poll.watch(connection.fileno())
