"""The daemon's end of a connection to a keeper, and the journal: one file to which all keepers of a queue append what
they start and what ends.

Lines look like `17.1 4242 began .` and `17.1 4242 0 4301 86400.123 .`: the attempt's key, the keeper's pid, and a word
or the program's exit status with its pid and the time, in seconds since the machine booted. An attempt that follows
others of its slice begins with `18.1 4242 began 86400.123 .` The keeper's pid is part of a line because an attempt that
never started may be prepared again under the same key. A line that a full disk cut off lacks its dot or runs into the
next line; it is ignored.

A message to a keeper is sent whole or not at all, however long that takes: half a launch would garble all that follow.
Nothing here waits for longer than 2 s: a keeper may be stopped (SIGSTOP), or hang in a file system that is gone.
"""

import contextlib
import errno
import fcntl
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

from gpuyard.engines.common.spawn_program import spawn_in_session
from gpuyard.engines.common.unbegun_words import is_unbegun
from gpuyard.engines.local import keeper, system_processes
from gpuyard.engines.local.keeper_messages import frame
from gpuyard.errors import EnvironmentFault
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.system import user_sockets
from gpuyard.system.private_files import PrivateFileError, open_own
from gpuyard.system.processes import python_command

HELLO = "hello"
_CHUNK = 1 << 13
_SEND_TIMEOUT_MS = 2_000
_GREETING_MS = 2_000
_TOO_MANY_UNDER_WAY_S = 0.001
_ABOVE_GIVEN_DESCRIPTORS = 10
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
    long journal is emptied. What cannot be read is left out."""
    begun: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        entries, _ = parse_journal(journal.read_bytes())
        last = {(entry.key, entry.keeper): entry.word for entry in entries}  # an unbegun one has `began` before it
        keys = (key.split(".") for (key, _), word in last.items() if not is_unbegun(word))
        begun += [(int(job_id), int(number)) for job_id, number in keys]
    for folder in logs:
        with contextlib.suppress(OSError):
            names = filter(None, map(_LOG_NAME.fullmatch, os.listdir(folder)))
            begun += [(int(name[1]), int(name[2])) for name in names if not _is_unbegun_log(folder / name[0])]
    return {job_id: number for job_id, number in sorted(begun) if job_id}


def _is_unbegun_log(path: Path) -> bool:
    """Return False in case of doubt, so that the job does not run a second time."""
    try:
        log = os.lstat(path)
    except OSError:
        return False
    return stat.S_IFMT(log.st_mode) == stat.S_IFREG and bool(log.st_mode & stat.S_ISVTX) and not log.st_size


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
        """Whether part of a message is still to be sent."""
        return len(self._unsent) > 0

    def is_silent(self) -> bool:
        """Return whether the keeper does not read, or is stopped. A keeper that was heard is not: finding out reads a
        file in /proc."""
        return self.has_unsent or (not self.was_heard and system_processes.is_stopped(self.pid))

    def receive(self) -> tuple[list[JournalEntry], bool]:
        """Return new entries, and whether the keeper is gone."""
        while True:
            try:
                received = self._link.recv(_CHUNK)
            except BlockingIOError:
                return self._entries(), False
            except ConnectionError:
                received = b""
            if not received:
                return self._entries(), True
            self._unread += received
            self.was_heard = True

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
        """Return how many bytes were sent. A keeper may be busy; if it reads nothing for 2 s it hangs, as on a file
        system that is gone."""
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
                time.sleep(_TOO_MANY_UNDER_WAY_S)

    def _wait(self, event: int, timeout_ms: int) -> bool:
        poll = select.poll()
        poll.register(self._link, event)
        return bool(poll.poll(timeout_ms))

    def _entries(self) -> list[JournalEntry]:
        entries, length = parse_journal(self._unread)
        self._unread = self._unread[length:]
        return entries


class KeeperUnreachable(EnvironmentFault):
    """A keeper that may live cannot be connected to now. It must not count as gone: its jobs would start twice."""


def connect(folder: str, pid: int) -> KeeperConnection | None:
    """Connect to a running keeper, without waiting. Return None if there is none.

    Any other failure raises KeeperUnreachable, also if a stopped keeper has not accepted earlier connections.
    """
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

        def closed_later(descriptor: int) -> int:
            until_spawned.callback(os.close, descriptor)
            return descriptor

        def moved(descriptor: int) -> int:
            return closed_later(fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE_GIVEN_DESCRIPTORS))

        until_spawned.enter_context(theirs)
        command = python_command(keeper.__name__, folder, str(open_files), options=("-I", "-S"))
        try:
            null = closed_later(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            log = closed_later(open_own(f"{folder}/log"))
            given = [(moved(theirs.fileno()), keeper.CONNECTION), (moved(journal), keeper.JOURNAL)]
            streams = [(null, 0), (log, 1), (log, 2)]
            pid = spawn_in_session(sys.executable, command, {"PATH": os.defpath}, [*given, *streams])
        except (OSError, PrivateFileError):
            ours.close()
            raise
    return KeeperConnection(pid, ours)


def silent_problem(pid: int, why: str | None = None) -> str:
    """Return what is wrong with a keeper that does not answer. `why` is set if there is no connection to it."""
    if system_processes.is_stopped(pid):
        why, remedy = "is stopped", f"`kill -CONT {pid}` continues it"
    else:
        why = f"cannot be reached: {why}" if why else "does not answer"
        remedy = "see whether a file system that jobs use hangs"
    return f"the keeper {pid} {why}; its jobs keep running, and their ends are recorded when it answers: {remedy}"


def not_taken(pid: int, folder: str) -> ResourceLimit:
    """Return the limit for an attempt that its keeper did not take."""
    text = f"the keeper of jobs (process {pid}) ended or does not answer"
    return ResourceLimit(text=text, remedy=f"see {folder}/log, and whether disk or memory is full")


_LONG = 1 << 20
_PART = 1 << 16


class Journal:
    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.descriptor = open_own(path)
        os.fchmod(self.descriptor, 0o600)

    def entries(self) -> Iterator[JournalEntry]:
        """Yield all entries, in order. Only needed after a daemon or a keeper has died."""
        at = 0
        while text := os.pread(self.descriptor, _PART, at):
            entries, length = parse_journal(text)
            yield from entries
            if not length:
                return
            at += length

    def empty_if_long(self) -> None:
        """Call it only when all that it says is recorded."""
        if os.fstat(self.descriptor).st_size > _LONG:
            os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        os.close(self.descriptor)
