"""Runs a program in the foreground; its lease lives exactly as long as anything of the program's does.

    the front ── the keeper ── the starter ── the program

- The front is who called: it waits, passes signals on, and answers with the program's status as soon as the program
  itself ends.
- The keeper holds the lease and adopts what the program leaves behind, also what daemonised and closed all descriptors;
  it ends with the last of them. It is in a session of its own, where no signal to the terminal or the group finds it.
- The starter is the program's parent, in the same process group as the front and the program. It tells the front when
  the program stops, so that Ctrl-Z stops both, and ends as the program ends.
- The program has the caller's descriptors, terminal, group and ways with signals, and the lease's descriptor.

When the front is killed with SIGKILL, the program goes on, and so does its lease. A signal to the front reaches the
program once: what was sent to the whole group, by a terminal or by `kill %1`, is pending for the starter too, which
blocks it; so the program has it already. Where there is no Linux nobody adopts: then the lease lives as long as
somebody keeps its descriptor open.
"""

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

from gpuyard.errors import EnvironmentFault

_PASSED_ON = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
    signal.SIGTSTP,
)  # fmt: skip
_BLOCKED_IN_HELPERS = {*_PASSED_ON, signal.SIGTTIN, signal.SIGTTOU}
# The kernel drops the one that is pending when the other comes, and may hand both over in the wrong order; but then the
# whole group has had both, and the program has done as the last one said.
_UNDONE_BY: dict[int, int] = {signal.SIGCONT: signal.SIGTSTP, signal.SIGTSTP: signal.SIGCONT}
# Python ignores these two from its start, and a program must not inherit that.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_SET_CHILD_SUBREAPER = 36
CANNOT_EXECUTE, NOT_FOUND, BY_SIGNAL = 126, 127, 128


class ForegroundProgram(Struct, frozen=True, kw_only=True):
    """`arguments` begin with the name that the program goes by."""

    path: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class _Ways(Struct, frozen=True, kw_only=True):
    """How signals were dealt with before we came: the program is to find it so."""

    ignored: frozenset[signal.Signals]
    mask: frozenset[int]


@contextlib.contextmanager
def signals_for_the_main_thread() -> Iterator[None]:
    """Threads that are started in here leave signals to the main thread: two of them would mix up their order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_HELPERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_program(program: ForegroundProgram, lease: Path, descriptor: int) -> int:
    """The program's exit status, 128 and more for a signal. The lease's descriptor is no longer the caller's.

    Only for the main thread, and for a process that ends soon after.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)  # it might be in the place of a closed standard stream
    os.close(descriptor)
    front, helpers = socket.socketpair()
    with front, _signals_on_a_wire() as (wire, ways):
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_IN_HELPERS)
        keeper = _fork(lambda: _keep(program, ways, lease, kept, helpers))
        signal.pthread_sigmask(signal.SIG_SETMASK, ways.mask)
        helpers.close()
        os.close(kept)
        return _attend(front, wire, keeper)


@contextlib.contextmanager
def _signals_on_a_wire() -> Iterator[tuple[int, _Ways]]:
    """A descriptor to read the numbers of arriving signals from."""
    watched = (*_PASSED_ON, signal.SIGCHLD)
    before = {signum: signal.getsignal(signum) for signum in watched}
    ignored = frozenset(signum for signum, way in before.items() if way is signal.SIG_IGN)
    ways = _Ways(ignored=ignored, mask=frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    wire, _ = _lay_wire()
    for signum in _PASSED_ON:
        signal.signal(signum, _leave_to_the_wire)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, no child's status can be had
    try:
        yield wire, ways
    finally:
        signal.set_wakeup_fd(-1)
        for signum, way in before.items():
            signal.signal(signum, way)


def _lay_wire() -> tuple[int, int]:
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading, writing


def _arrived(wire: int) -> bytes:
    try:
        return os.read(wire, 64)
    except BlockingIOError:
        return b""


def _leave_to_the_wire(*_: object) -> None:
    """Being caught is enough: Python writes the number to the wire."""


def _fork(body: Callable[[], int]) -> int:
    """A child that does this and nothing else: nothing of the caller's is run or flushed when it ends."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = body()
    finally:
        os._exit(status)


# The front


def _attend(helpers: socket.socket, wire: int, keeper: int) -> int:
    """Passes signals on and follows the program's stops, until it has ended."""
    poll = _poll(helpers.fileno(), wire)
    unread = b""
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        # Always: a stop that is told of below may have sent a signal here since the poll.
        _pass_to(helpers, _arrived(wire))
        if helpers.fileno() in ready:
            news = helpers.recv(4096)
            if not news:
                raise EnvironmentFault(
                    "the process that keeps the lease was killed",
                    hint="the program may go on, and its lease with it: see `gpuyard leases`",
                )
            *told, unread = (unread + news).split(b"\n")
            status = _hear(told, keeper)
            if status is not None:
                return status


def _pass_to(helpers: socket.socket, signums: bytes) -> None:
    with contextlib.suppress(OSError):
        helpers.sendall(bytes(dict.fromkeys(signums)))


def _hear(told: list[bytes], keeper: int) -> int | None:
    for line in told:
        word, number = line.split()
        if word == b"stopped":
            _stop_beside(int(number))
            continue
        if word == b"ended":  # and nobody is left: the keeper ends, too
            os.waitpid(keeper, 0)
        return int(number)
    return None


def _stop_beside(pid: int) -> None:
    """As the shell that started us expects; unless somebody has let the program go on in the meantime."""
    import psutil

    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)


# The keeper


def _keep(program: ForegroundProgram, ways: _Ways, lease: Path, descriptor: int, front: socket.socket) -> int:
    adopts = _adopt_orphans()
    starter = _fork(lambda: _stand_by(program, ways, descriptor, front))
    os.setsid()
    os.chdir("/")  # a folder must not be in use for our sake
    _close_all_but(descriptor, front.fileno())
    status = _reap_until(starter)
    is_last = not _somebody_is_left()
    if is_last:
        _let_go(lease, descriptor, knows_all=adopts)
    with contextlib.suppress(OSError):
        front.sendall(b"%s %d\n" % (b"ended" if is_last else b"survived", status))
    front.close()
    if not is_last:
        _reap_all()
        _let_go(lease, descriptor, knows_all=adopts)
    return 0


def _adopt_orphans() -> bool:
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def _reap_until(awaited: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == awaited:
            return _exit_status(status)


def _somebody_is_left() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _let_go(lease: Path, descriptor: int, *, knows_all: bool) -> None:
    """The file goes first, as whoever finds it must find it held; it stays where others may still hold it."""
    if knows_all:
        with contextlib.suppress(OSError):
            lease.unlink()
    os.close(descriptor)


# The starter


def _stand_by(program: ForegroundProgram, ways: _Ways, descriptor: int, front: socket.socket) -> int:
    wire, end_of_wire = _lay_wire()
    signal.signal(signal.SIGCHLD, _leave_to_the_wire)
    pid = _fork(lambda: _become(program, ways, descriptor))
    _close_all_but(front.fileno(), wire, end_of_wire)
    poll = _poll(front.fileno(), wire)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        if front.fileno() in ready and not _serve(front, pid):
            poll.unregister(front.fileno())
        if _arrived(wire):
            status = _look_after(pid, front)
            if status is not None:
                return status


def _serve(front: socket.socket, pid: int) -> bool:
    """Passes on what the front has got; false when the front is gone."""
    try:
        signums = front.recv(64)
    except OSError:
        return False
    for signum in signums:
        if not _take_pending(signum) and _UNDONE_BY.get(signum) not in {*signums, *signal.sigpending()}:
            os.kill(pid, signum)
    return bool(signums)


def _take_pending(signum: int) -> bool:
    """Whether it was sent to the whole group, and so to the starter; it is pending no more."""
    if hasattr(signal, "sigtimedwait"):
        return signal.sigtimedwait({signum}, 0) is not None
    return signum in signal.sigpending() and signal.sigwait({signum}) == signum


def _look_after(pid: int, front: socket.socket) -> int | None:
    """The program's status where it has ended."""
    changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if not changed:
        return None
    if os.WIFSTOPPED(status):
        with contextlib.suppress(OSError):
            front.sendall(b"stopped %d\n" % pid)
        return None
    return _exit_status(status)


# The program


def _become(program: ForegroundProgram, ways: _Ways, descriptor: int) -> int:
    signal.set_wakeup_fd(-1)
    for signum in (*_PASSED_ON, signal.SIGCHLD, *_IGNORED_BY_PYTHON):
        signal.signal(signum, signal.SIG_IGN if signum in ways.ignored else signal.SIG_DFL)
    os.set_inheritable(descriptor, True)  # noqa: FBT003
    signal.pthread_sigmask(signal.SIG_SETMASK, ways.mask)
    try:
        os.execve(program.path, program.arguments, program.environment)  # noqa: S606
    except OSError as error:
        os.write(2, os.fsencode(f"gpuyard: {program.path}: {error.strerror}\n"))
        return NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_EXECUTE


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else BY_SIGNAL - code


def _poll(*descriptors: int) -> "select.poll":
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return poll


def _close_all_but(*kept: int) -> None:
    """Whoever waits for the end of a pipe of the caller's must not wait for us."""
    edges = [2, *sorted(descriptor for descriptor in kept if descriptor > 2), os.sysconf("SC_OPEN_MAX")]
    for below, above in itertools.pairwise(edges):
        os.closerange(below + 1, above)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in {0, 1, 2}.difference(kept):
        os.dup2(nowhere, stream)
    if nowhere > 2:
        os.close(nowhere)
