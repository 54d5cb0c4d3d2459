"""Runs a program in the foreground; its lease lasts exactly as long as the program and its descendants.

    the front ── the keeper ── the starter ── the program

- The front is the caller: it waits, forwards signals, and returns the program's status as soon as the program ends. If
  it is killed with SIGKILL, the program and its lease continue.
- The keeper holds the lease and adopts the processes that the program leaves behind (on Linux; elsewhere the lease
  lasts as long as a process keeps its descriptor open), in a session out of reach of the terminal's signals.
- The starter is the program's parent, in its process group. It reports to the front when the program stops, so that
  Ctrl-Z stops both. A signal to the whole group is also pending for the starter, which blocks it: so the program has it
  already, and gets it once."""

import contextlib
import ctypes
import fcntl
import itertools
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.engines.common.spawn_program import CANNOT_EXECUTE, NOT_FOUND, exit_status
from gpuyard.errors import EnvironmentFault
from gpuyard.system.system_limits import passes, remedy_of
from gpuyard.system.wakeable_poll import open_signal_pipe

_FORWARDED = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGTSTP,
)  # fmt: skip
_BLOCKED_IN_HELPERS = {*_FORWARDED, signal.SIGTTIN, signal.SIGTTOU}
# The kernel drops a pending signal of such a pair when the other arrives, and may deliver both in the wrong order. But
# then the whole group has received both, and the program has obeyed the last one.
_UNDONE_BY: dict[int, int] = {signal.SIGCONT: signal.SIGTSTP, signal.SIGTSTP: signal.SIGCONT}
# Python ignores these two from the start, and the program must not inherit that.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class ForegroundProgram(Struct, frozen=True, kw_only=True):
    path: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class _SignalSettings(Struct, frozen=True, kw_only=True):
    ignored: frozenset[signal.Signals]
    mask: frozenset[int]


@contextlib.contextmanager
def signals_for_the_main_thread() -> Iterator[None]:
    """Threads that start in this block leave signals to the main thread: several threads would mix up their order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_HELPERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_program(
    program: ForegroundProgram, lease: Path, descriptor: int, meanwhile: Callable[[], None] | None = None
) -> int:
    """Run the program and return its exit status, 128 + the number for a signal. Closes the lease's descriptor.
    `meanwhile` is called about every second until the program ends. Raises EnvironmentFault if a limit of the system
    keeps the program from starting; its lease has ended then. Only for the main thread, and for a process that ends
    soon after."""
    try:
        return _run(program, lease, descriptor, meanwhile)
    except OSError as error:
        if not passes(error):
            raise
        with contextlib.suppress(OSError):
            lease.unlink()
        raise EnvironmentFault(
            f"{program.arguments[0]} was not started: {error.strerror}", hint=remedy_of(error)
        ) from error


def _run(program: ForegroundProgram, lease: Path, descriptor: int, meanwhile: Callable[[], None] | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    kept = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)  # it might have the number of a closed standard stream
    os.close(descriptor)
    front, helpers = socket.socketpair()
    with front, _caught_signals() as (signal_pipe, settings):
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_HELPERS)
        try:
            keeper = _fork(lambda: _keep(program, settings, lease, kept, helpers))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, settings.mask)
            helpers.close()
            os.close(kept)
        return _wait_for_end(front, signal_pipe, keeper, meanwhile)


@contextlib.contextmanager
def _caught_signals() -> Iterator[tuple[int, _SignalSettings]]:
    """Catch signals in this block. Yields a descriptor for the numbers of signals, and the earlier settings."""
    before = {signum: signal.getsignal(signum) for signum in (*_FORWARDED, signal.SIGCHLD)}
    ignored = frozenset(signum for signum, handler in before.items() if handler is signal.SIG_IGN)
    settings = _SignalSettings(ignored=ignored, mask=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    signal_pipe, _ = open_signal_pipe()
    for signum in _FORWARDED:
        signal.signal(signum, _write_to_pipe_only)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, the system keeps no child's status
    try:
        yield signal_pipe, settings
    finally:
        signal.set_wakeup_fd(-1)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _read_signals(signal_pipe: int) -> bytes:
    with contextlib.suppress(BlockingIOError):
        return os.read(signal_pipe, 64)
    return b""


def _write_to_pipe_only(*_: object) -> None:
    """Do nothing: Python writes the number of a caught signal to the pipe."""


def _fork(body: Callable[[], int], front: socket.socket | None = None) -> int:
    """Fork a child that runs `body` alone. If that fails in a process behind the `front`, tell it and exit."""
    try:
        pid = os.fork()
    except OSError as error:
        if front is None:
            raise
        with contextlib.suppress(OSError):
            front.sendall(b"unbegun %d\n" % (error.errno or 0))
        os._exit(CANNOT_EXECUTE)
    if pid:
        return pid
    status = 1
    try:
        status = body()
    finally:
        os._exit(status)


def _wait_for_end(helpers: socket.socket, signal_pipe: int, keeper: int, meanwhile: Callable[[], None] | None) -> int:
    poll = _poll(helpers.fileno(), signal_pipe)
    unread = b""
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(None if meanwhile is None else 1000)}
        if meanwhile is not None and not ready:
            meanwhile()
        # Always: the event that stopped the program, which is read below, may have signalled us since the poll.
        with contextlib.suppress(OSError):
            helpers.sendall(bytes(dict.fromkeys(_read_signals(signal_pipe))))
        if helpers.fileno() in ready:
            received = helpers.recv(4096)
            if not received:
                raise EnvironmentFault(
                    "the process that holds the lease was killed",
                    hint="the program may still run with its lease: see `gpuyard leases`",
                )
            *lines, unread = (unread + received).split(b"\n")
            status = _handle_reports(lines, keeper)
            if status is not None:
                return status


def _handle_reports(lines: list[bytes], keeper: int) -> int | None:
    for line in lines:
        word, number = line.split()
        if word == b"stopped":
            import psutil

            # Stop as the shell that started us expects, unless the program was continued in the meantime.
            with contextlib.suppress(psutil.Error):
                if psutil.Process(int(number)).status() == psutil.STATUS_STOPPED:
                    os.kill(os.getpid(), signal.SIGSTOP)
            continue
        if word == b"unbegun":
            os.waitpid(keeper, 0)
            raise OSError(int(number), os.strerror(int(number)))
        if word == b"ended":  # no process is left, so the keeper exits too
            os.waitpid(keeper, 0)
        return int(number)
    return None


def _keep(
    program: ForegroundProgram, settings: _SignalSettings, lease: Path, descriptor: int, front: socket.socket
) -> int:
    # 36: PR_SET_CHILD_SUBREAPER
    adopts = sys.platform == "linux" and ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
    starter = _fork(lambda: _supervise(program, settings, descriptor, front), front)
    os.setsid()
    os.chdir("/")  # do not keep a folder in use
    _close_all_but(descriptor, front.fileno())
    pid = status = 0
    while pid != starter:
        pid, status = os.wait()
    is_last = not _has_children()
    if is_last:
        _release(lease, descriptor, is_only_holder=adopts)
    with contextlib.suppress(OSError):
        front.sendall(b"%s %d\n" % (b"ended" if is_last else b"survived", exit_status(status)))
    front.close()
    if not is_last:
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        _release(lease, descriptor, is_only_holder=adopts)
    return 0


def _has_children() -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _release(lease: Path, descriptor: int, *, is_only_holder: bool) -> None:
    """Remove the file, unless other processes may hold it, before the lock is released: it is never found unlocked."""
    if is_only_holder:
        with contextlib.suppress(OSError):
            lease.unlink()
    os.close(descriptor)


def _supervise(program: ForegroundProgram, settings: _SignalSettings, descriptor: int, front: socket.socket) -> int:
    reading, writing = open_signal_pipe()
    signal.signal(signal.SIGCHLD, _write_to_pipe_only)
    pid = _fork(lambda: _become(program, settings, descriptor), front)
    _close_all_but(front.fileno(), reading, writing)
    poll = _poll(front.fileno(), reading)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if front.fileno() in ready and not _forward_signals(front, pid):
            poll.unregister(front.fileno())
        if _read_signals(reading):
            status = _check_program(pid, front)
            if status is not None:
                return status


def _forward_signals(front: socket.socket, pid: int) -> bool:
    """Send the program the signals that the front has received. Return False when the front is gone."""
    try:
        signums = front.recv(64)
    except OSError:
        return False
    for signum in signums:
        if not _take_pending(signum) and _UNDONE_BY.get(signum) not in {*signums, *signal.sigpending()}:
            os.kill(pid, signum)
    return bool(signums)


def _take_pending(signum: int) -> bool:
    """Return whether the signal was pending, because it was sent to the whole group; then it no longer is."""
    if hasattr(signal, "sigtimedwait"):
        return signal.sigtimedwait({signum}, 0) is not None
    return signum in signal.sigpending() and signal.sigwait({signum}) == signum


def _check_program(pid: int, front: socket.socket) -> int | None:
    changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if changed and os.WIFSTOPPED(status):
        with contextlib.suppress(OSError):
            front.sendall(b"stopped %d\n" % pid)
        return None
    return exit_status(status) if changed else None


def _become(program: ForegroundProgram, settings: _SignalSettings, descriptor: int) -> int:
    signal.set_wakeup_fd(-1)
    for signum in (*_FORWARDED, signal.SIGCHLD, *_IGNORED_BY_PYTHON):
        signal.signal(signum, signal.SIG_IGN if signum in settings.ignored else signal.SIG_DFL)
    os.set_inheritable(descriptor, True)  # noqa: FBT003
    signal.pthread_sigmask(signal.SIG_SETMASK, settings.mask)
    try:
        os.execve(program.path, program.arguments, program.environment)  # noqa: S606
    except OSError as error:
        os.write(2, os.fsencode(f"gpuyard: {program.path}: {error.strerror}\n"))
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE


def _poll(*descriptors: int) -> "select.poll":
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


def _close_all_but(*kept: int) -> None:
    """Close all other descriptors, so that readers of the caller's pipes do not wait for our end."""
    edges = [2, *sorted(descriptor for descriptor in kept if descriptor > 2), os.sysconf("SC_OPEN_MAX")]
    for below, above in itertools.pairwise(edges):
        os.closerange(below + 1, above)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2}.difference(kept):
        os.dup2(null, stream)
    if null > 2:
        os.close(null)
