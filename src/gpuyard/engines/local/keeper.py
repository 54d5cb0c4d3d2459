"""The keeper: the parent of a daemon's jobs. It starts them, waits for them, and outlives the daemon.

The daemon starts it as a separate process that uses the standard library alone, so that it starts fast and stays small.
Descriptor 3 is the connection to that daemon, 4 the journal. Arguments: FOLDER, and the limit on open files for jobs.

- For each launch the keeper writes a line to the journal, starts the program in a session of its own, and writes
  another line when it ends: `17.1 KEEPER began .`, `17.1 KEEPER 0 PID TIME .` The second also goes to every connected
  daemon. TIME is in seconds since the machine booted. A line starts with a newline and ends with a dot because a full
  disk may have cut off the line before, or this one.
- A slice is launches that run one after the other on one lease. With the line of an end the keeper writes that of the
  launch that begins then: `18.1 KEEPER began TIME .` Before the program starts, it carries out what its daemon sent. If
  the daemon is gone or has withdrawn the launch, it does not start. So no launch of a slice starts after the death of
  its daemon, and the next daemon finds the line of every program that may have started.
- What starts no more gets a line such as `18.1 KEEPER unbegun-returned .`, or `unbegun-log-enospc` where a
  limit of the system keeps programs from starting.
- It greets its own daemon as soon as other daemons can find it, and another, at the socket KEEPER.sock in FOLDER, after
  everything that its own daemon sent is carried out. So that one finds every attempt that was ever started in the
  journal after the greeting.
- It adopts the processes that a job leaves behind, also those that daemonised and closed all descriptors, and holds the
  job's lease until the last of them has ended. The job's end is reported when its program ends.
- It exits when its daemon, its last job and the last process of a job are gone. No signal but SIGKILL ends it earlier.

A message is sent as its length in four bytes and a marshalled value. One with leases carries
their descriptors along with its first byte, and starts with their number."""

import contextlib
import ctypes
import errno
import fcntl
import marshal
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from gpuyard.engines.common.handled_signals import is_pause_process
from gpuyard.engines.common.log_cap import LogCaps
from gpuyard.engines.common.spawn_program import (
    BEGAN,
    LEASE_AT,
    RETURNED,
    NotBegun,
    SpawnSpec,
    StartFailure,
    exit_status,
    is_unbegun,
    open_above,
    spawn,
)
from gpuyard.system import user_sockets
from gpuyard.system.wakeable_poll import open_signal_pipe

# Variables of a job that all its processes inherit.
_MARKS = ("GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE")


class KeptLaunch(NamedTuple):
    key: str
    spec: SpawnSpec


# The number of leases that come with a message; whether a slice has one of them, and its launches (values that its
# environments share are sent once: `marshal` knows them again); or the keys of launches that are withdrawn.
Message = int | tuple[bool, list[tuple[str, tuple[object, ...]]]] | list[str]


def frame(message: Message) -> bytes:
    body = marshal.dumps(message)
    return len(body).to_bytes(4, "big") + body


class Slice:
    """Launches that run one after the other with one lease: most are one. `rest` have not started."""

    __slots__ = ("has_lease", "lease", "rest")

    def __init__(self, has_lease: bool, launches: list[tuple[str, tuple[object, ...]]]) -> None:  # noqa: FBT001
        self.has_lease = has_lease
        self.lease: int | None = None
        self.rest = deque(KeptLaunch(key, SpawnSpec._make(spec)) for key, spec in launches)


class KeptJob:
    """A job whose program runs, or whose processes that were left behind run."""

    __slots__ = ("key", "logs", "marks", "slice")

    def __init__(self, launch: KeptLaunch, started: Slice) -> None:
        self.key, self.slice = launch.key, started
        # Not files of the user, which others may write to.
        self.logs = {path: cap for path, cap in launch.spec.outputs if cap}
        environment = launch.spec.environment
        self.marks = {os.fsencode(f"{name}={environment[name]}") for name in _MARKS if name in environment}

    def owns(self, pid: int) -> bool:
        """Return whether a process that we adopted is the job's, by its environment or because it writes to the log.
        Also if that cannot be found out at the moment: a GPU must not be given to others while it may be in use."""
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if self.marks and self.marks.issubset(file.read().split(b"\0")):
                    return not is_pause_process(pid)
            return any(os.readlink(f"/proc/{pid}/fd/{name}") in self.logs for name in os.listdir(f"/proc/{pid}/fd"))
        except OSError as error:  # it has ended, or is another user's
            return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class DaemonLink:
    """A connected daemon and the lines that it has not received yet. None is skipped: it would wait forever."""

    def __init__(self, link: socket.socket) -> None:
        link.settimeout(0)
        self.link = link
        self.unsent = bytearray()
        self.is_full = False  # as the poll knows it: it reports when more can be sent


CONNECTION, JOURNAL = 3, 4
_CHUNK = 1 << 14
_MOST_DESCRIPTORS = 253
_REPORT_WITHIN_S = 0.025
# As in system/clock.py.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Keeper:
    def __init__(self, folder: str, open_files: int) -> None:
        """`open_files` is the jobs' limit. Ours is raised as far as it may be: each lease of a job is an open file."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._me, self._open_files = os.getpid(), open_files
        self._can_move_up = most == resource.RLIM_INFINITY or most > open_files
        self._socket = f"{folder}/{self._me}.sock"
        own = DaemonLink(socket.socket(fileno=CONNECTION))
        self._daemon: DaemonLink | None = own
        self._others: list[DaemonLink] = []
        self._report_at: float | None = None  # when ends within slices are reported, together
        # given up to receive jobs when no memory is left; they are then reported as not begun
        self._unread, self._chunk, self._reserve = bytearray(), b"", bytes(1 << 16)
        self._arrived: list[list[int]] = []
        self._leases: list[int] = []
        self._slices: list[Slice] = []  # those that go on, or whose program runs
        self._jobs: dict[int, KeptJob] = {}  # by the pid of the program
        self._left: dict[int, KeptJob] = {}  # by the pid of a process that a program left behind
        self._log_caps, self._children = LogCaps(), -1
        with contextlib.suppress(OSError):  # it stays open, in case of a limit; some systems have none
            self._children = os.open(f"/proc/self/task/{self._me}/children", os.O_RDONLY | os.O_CLOEXEC)
        self._unwritten: list[bytes] = []
        self._journal_error = OSError(errno.ENOSPC, "")
        self._listener = user_sockets.bind(self._socket)
        self._listener.listen(8)
        self._null = open_above(LEASE_AT)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._signal_pipe, _ = open_signal_pipe()
        # poll() fails while the limit on open files is below their number, epoll does not.
        self._poll = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._watch(self._signal_pipe, self._reap)
        self._watch(CONNECTION, lambda event: self._serve_own(own, event))
        self._watch(self._listener.fileno(), self._accept)
        own.unsent += _line("0.0", self._me, "hello")
        self._send(own)

    def run(self) -> None:
        while self._daemon is not None or self._jobs or self._left or self._unwritten:
            for descriptor, event in self._wait():
                handler = self._handlers.get(descriptor)
                if handler is not None:
                    handler(event)
            self._log_caps.run()
            if self._unwritten:
                self._write()
            if self._report_at is not None and time.monotonic() >= self._report_at:
                self._send_all()
        if os.path.exists(self._socket):  # a daemon that starts may have taken us for dead before we listened
            os.unlink(self._socket)

    def _wait(self) -> list[tuple[int, int]]:
        report_ms = None if self._report_at is None else max(0.0, (self._report_at - time.monotonic()) * 1000)
        waits_ms = (self._log_caps.timeout_ms(), report_ms, 1000 if self._unwritten else None)
        timeout_ms = min((each for each in waits_ms if each is not None), default=None)
        if isinstance(self._poll, select.epoll):
            return self._poll.poll(None if timeout_ms is None else timeout_ms / 1000)
        return self._poll.poll(timeout_ms)

    def _watch(self, descriptor: int, handler: Callable[[int], object]) -> None:
        self._poll.register(descriptor, select.POLLIN)
        self._handlers[descriptor] = handler

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def _serve_own(self, own: DaemonLink, event: int) -> None:
        if event & select.POLLOUT:
            self._send(own)
        if event & ~select.POLLOUT:
            self._receive_in_reserve()

    def _receive_in_reserve(self) -> bool:
        """Receive, if need be with the memory that was kept for this."""
        try:
            return self._receive()
        except MemoryError:
            if not self._reserve:
                raise
        self._reserve = b""
        self._start_received()
        return True

    def _receive(self) -> bool:
        """Carry out what our own daemon sent. Return False if there is nothing more to read now."""
        if self._daemon is None:
            return False
        space = socket.CMSG_SPACE(4 * _MOST_DESCRIPTORS)
        closed_in_jobs = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        try:
            received, ancillary, flags, _ = self._daemon.link.recvmsg(_CHUNK, space, closed_in_jobs)
        except BlockingIOError:
            return False
        except ConnectionError:
            received, ancillary, flags = b"", [], 0
        if ancillary or flags & socket.MSG_CTRUNC:  # truncated when the limit on open files is reached
            cut = [content[: len(content) // 4 * 4] for _, _, content in ancillary]
            self._arrived.append([number for content in cut for number in memoryview(content).cast("i").tolist()])
        self._chunk = received
        self._start_received()
        if not received:
            self._forget(CONNECTION)
            self._daemon.link.close()
            self._daemon = None
            self._return([launch for each in self._slices for launch in each.rest])
        return bool(received)

    def _start_received(self) -> None:
        self._unread += self._chunk
        self._chunk = b""
        while len(self._unread) >= 4:
            end = 4 + int.from_bytes(self._unread[:4], "big")
            if len(self._unread) < end:
                return
            message: Message = marshal.loads(self._unread[4:end])  # noqa: S302 - from our own daemon
            del self._unread[:end]
            if isinstance(message, int):
                self._leases = self._arrived.pop(0)
            elif isinstance(message, list):
                self._return([launch for each in self._slices for launch in each.rest if launch.key in message])
            else:
                self._start(Slice(*message))

    def _start(self, started: Slice) -> None:
        launch = started.rest.popleft()
        started.lease = self._leases.pop(0) if started.has_lease and self._leases else None
        self._slices.append(started)
        if started.has_lease and started.lease is None:
            word: str | None = NotBegun("lease", OSError(errno.EMFILE, "")).word
        else:
            self._write()  # an attempt that was unbegun may be sent again: its last line has to be the newest
            is_noted = not self._unwritten and self._try_to_write(_line(launch.key, self._me, BEGAN))
            word = self._spawn(launch, started) if is_noted else NotBegun("journal", self._journal_error).word
        if word is not None:
            self._go_on(started, launch.key, word)

    def _spawn(self, launch: KeptLaunch, started: Slice) -> str | None:
        """Start the program, whose line is written; return why it did not start."""
        try:
            pid = spawn(launch.spec, started.lease, self._null)
            started.lease = self._move_up(started.lease)
            self._jobs[pid] = job = KeptJob(launch, started)
            for path, cap in job.logs.items():
                self._log_caps.add(path, cap)
        except StartFailure as failure:
            return failure.word
        except MemoryError:
            return NotBegun("process", OSError(errno.ENOMEM, "")).word
        return None

    def _go_on(self, started: Slice, key: str, word: str) -> None:
        """Report how a launch of a slice ended, and start the next one."""
        while True:
            if is_unbegun(word):  # the next would lack the same
                self._return(started.rest)
            launch = self._next(started, _line(key, self._me, word))
            failed = None if launch is None else self._spawn(launch, started)
            if launch is None or failed is None:
                return
            key, word = launch.key, failed

    def _next(self, started: Slice, end: bytes) -> KeptLaunch | None:
        """Report the end of a launch. Return the one that starts now with its lease, if any: its line is written, and
        after that the daemon was seen to live, and not to have withdrawn it."""
        while started.rest and not self._unwritten:
            launch = started.rest[0]
            began = _line(launch.key, self._me, f"{BEGAN} {time.clock_gettime(_SINCE_BOOT):.3f}")
            if not self._try_to_write(end + began):
                break
            self._queue_line(end)
            end = b""
            while self._receive_in_reserve():
                pass
            if started.rest and started.rest[0] is launch:
                self._queue_line(began)
                self._report_at = self._report_at or time.monotonic() + _REPORT_WITHIN_S
                return started.rest.popleft()
        self._end_slice(started, end)
        return None

    def _end_slice(self, started: Slice, end: bytes, *, is_free: bool = True) -> None:
        """Return what is left of a slice, and report its last end when the lease is free."""
        self._return(started.rest)
        self._slices.remove(started)
        if is_free and started.lease is not None:
            os.close(started.lease)
        self._report(end)

    def _return(self, launches: Collection[KeptLaunch]) -> None:
        for launch in list(launches):
            next(each.rest for each in self._slices if launch in each.rest).remove(launch)
            self._report(_line(launch.key, self._me, RETURNED))

    def _move_up(self, lease: int | None) -> int | None:
        """Give the lease of a running job a number above the jobs' limit. Programs cannot be given higher ones:
        the numbers below have to be free for what the next program gets."""
        if lease is not None and lease < self._open_files and self._can_move_up:
            with contextlib.suppress(OSError):  # all numbers up to our limit are taken
                above = fcntl.fcntl(lease, fcntl.F_DUPFD_CLOEXEC, self._open_files)
                os.close(lease)
                return above
        return lease

    def _accept(self, _: int) -> None:
        """Greet another daemon, after everything that our own daemon sent is carried out."""
        while self._receive_in_reserve():
            pass
        try:
            link, _ = self._listener.accept()
        except OSError:  # the limit on open files is reached: accepted when it no longer is
            return
        if not user_sockets.is_same_user(link):
            link.close()
            return
        other = DaemonLink(link)
        self._others.append(other)
        # Another daemon sends nothing: it is ready to receive, or gone.
        self._watch(link.fileno(), lambda event: (self._drop if event & ~select.POLLOUT else self._send)(other))
        # The journal lacks what could not be written yet.
        other.unsent += _line("0.0", self._me, "hello") + b"".join(self._unwritten)
        self._send(other)

    def _drop(self, other: DaemonLink) -> None:
        self._forget(other.link.fileno())
        self._others.remove(other)
        other.link.close()

    def _reap(self, _: int) -> None:
        os.read(self._signal_pipe, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._handle_end(pid, status)

    def _handle_end(self, pid: int, status: int) -> None:
        job, left = self._jobs.pop(pid, None), self._left.pop(pid, None)
        kept = job or left
        if kept is None:
            return
        self._left.update((each, kept) for each in self._adopted() if kept.owns(each))
        is_free = kept not in self._left.values()
        for path in kept.logs if is_free else ():
            self._log_caps.remove(path)
        if job is None:
            if is_free and kept.slice.lease is not None:
                os.close(kept.slice.lease)
            return
        word = f"{exit_status(status)} {pid} {time.clock_gettime(_SINCE_BOOT):.3f}"
        if is_free:
            self._go_on(job.slice, job.key, word)
        else:
            self._end_slice(job.slice, _line(job.key, self._me, word), is_free=False)

    def _adopted(self) -> list[int]:
        """Return our children that we did not start, and do not know yet: their parents have ended."""
        content = b""
        while self._children >= 0 and (part := os.pread(self._children, _CHUNK, len(content))):
            content += part
            if len(part) < 2048:  # a shorter part of a list in /proc is the last
                break
        return [pid for pid in map(int, content.split()) if pid not in self._jobs and pid not in self._left]

    def _report(self, line: bytes) -> None:
        if line:
            self._unwritten.append(line)
            self._write()
            self._queue_line(line)
        self._send_all()

    def _queue_line(self, line: bytes) -> None:
        for daemon in filter(None, (self._daemon, *self._others)):
            daemon.unsent += line

    def _send_all(self) -> None:
        self._report_at = None
        for daemon in [self._daemon, *self._others]:
            if daemon is not None and daemon.unsent:
                self._send(daemon)

    def _write(self) -> None:
        while self._unwritten and self._try_to_write(self._unwritten[0]):
            del self._unwritten[0]

    def _try_to_write(self, line: bytes) -> bool:
        try:
            return os.write(JOURNAL, line) == len(line)
        except OSError as error:  # the disk is full
            self._journal_error = error
            return False

    def _send(self, daemon: DaemonLink) -> None:
        try:
            del daemon.unsent[: daemon.link.send(daemon.unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it is gone: the next one reads the journal
            daemon.unsent.clear()
            if daemon in self._others:
                self._drop(daemon)
                return
        if daemon.is_full != bool(daemon.unsent):
            daemon.is_full = bool(daemon.unsent)
            self._poll.modify(daemon.link, select.POLLIN | (select.POLLOUT if daemon.is_full else 0))


def _line(key: str, keeper: int, word: str) -> bytes:
    return f"\n{key} {keeper} {word} .\n".encode()


def main() -> None:
    for descriptor in (CONNECTION, JOURNAL):
        os.set_inheritable(descriptor, False)  # noqa: FBT003
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(signum, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    Keeper(sys.argv[1], int(sys.argv[2])).run()
