"""Starts a daemon that outlives its caller, through a shell that ends at once, and waits until it accepts connections.

The daemon is no child of the caller, and has none of its descriptors and no terminal. It starts with default signal
handling; what a shell makes programs in the background ignore, the daemon restores itself (`daemon/__main__.py`). The
caller must not fork: it may have threads. Of several callers at the same time, one daemon gets the lock, and all
connect to it."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Sequence

from gpuyard.client import paths
from gpuyard.client.fast_http import dial
from gpuyard.errors import EnvironmentFault
from gpuyard.system.private_files import PrivateFileError, make_folder, open_own
from gpuyard.system.user_directories import named_state_directory

DAEMON: tuple[str, ...] = (sys.executable, "-P", "-m", "gpuyard.daemon")


def start_daemon(
    command: Sequence[str] | None = None, *, timeout_s: float = 60.0, wait_for_other_s: float = 0.0
) -> bool:
    """Return when a daemon accepts connections; True if this call started it, after `wait_for_other_s`."""
    from gpuyard.client.daemon_liveness import running_pid
    from gpuyard.client.queue_host import refuse_other_machine

    refuse_other_machine(paths.state_folder())
    paths.check_state_folder()
    not_before = time.monotonic() + wait_for_other_s
    deadline = not_before + timeout_s
    try:
        log_start = os.lstat(paths.log_path()).st_size
    except OSError:
        log_start = 0
    pid, starts = None, 0
    while (connection := dial(paths.socket_path())) is None:
        if time.monotonic() > deadline:
            raise _failure(f"the daemon did not answer within {timeout_s:g} s of its start", log_start)
        is_due = time.monotonic() >= not_before and (pid is None or _has_ended(pid))
        if is_due and running_pid(paths.lock_path()) is None:
            if starts == 2:  # it may lose the lock to another that is just ending, and then a second start is needed
                raise _failure("the daemon ended as soon as it was started", log_start)
            pid, starts = _start(command or DAEMON), starts + 1
        time.sleep(0.005)
    connection.close()
    return starts > 0


def _start(command: Sequence[str]) -> int:
    # Prints the pid of the program that it starts. A Python that does this takes 20 ms.
    starter = ("/bin/sh", "-c", 'cd / || exit; "$@" >&2 & echo $!', "sh")
    try:
        make_folder(paths.state_folder())
        with open(open_own(paths.log_path()), "ab") as log:
            return int(_run_starter([*starter, *command], log.fileno()))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"the daemon cannot be started: {error}", hint=f"see {paths.log_path()}") from error


def _run_starter(command: list[str], log: int) -> bytes:
    """Run the starter in a session of its own, and return what it prints. Importing subprocess would take longer."""
    import _signal  # type: ignore[import-not-found] # `signal` imports enum, which takes 5 ms

    ours, its = os.pipe()
    signals: set[int] = _signal.valid_signals() - {_signal.SIGKILL, _signal.SIGSTOP}
    # Descriptors that others gave us to inherit. Those that Python opened close themselves.
    others = []
    for each in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the listing
            others += [each] if each > 2 and os.get_inheritable(each) else []
    # `ulimit -n` may be lower than the number of a descriptor that is open already, and then these cannot be named.
    limit = os.sysconf("SC_OPEN_MAX")
    above = [each for each in others if each >= limit]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, its, 1),
        (os.POSIX_SPAWN_DUP2, log, 2),
        *((os.POSIX_SPAWN_CLOSE, each) for each in others if each < limit),
    ]
    for each in above:
        fcntl.fcntl(each, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        pid = os.posix_spawn(
            command[0], command, _environment(), file_actions=actions, setsid=True, setsigmask=(), setsigdef=signals
        )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(its)
        for each in above:
            fcntl.fcntl(each, fcntl.F_SETFD, 0)
    with open(ours, "rb") as output:
        printed = output.read()
    with contextlib.suppress(ChildProcessError):  # the caller ignores SIGCHLD
        os.waitpid(pid, 0)
    return printed


def _environment() -> dict[str, str]:
    """Return the caller's environment with absolute paths, without that of a job, whose GPU the daemon would keep."""
    of_a_job = ("GPUYARD_JOB_ID", "GPUYARD_ATTEMPT", "GPUYARD_QUEUE")
    environment = {name: value for name, value in os.environ.items() if name not in of_a_job}
    if environment.get("GPUYARD_HOME"):
        environment["GPUYARD_HOME"] = named_state_directory()
    if environment.get("PYTHONPATH"):
        folders = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    return environment


def _has_ended(pid: int) -> bool:
    """Whether the process has ended. A zombie counts as ended: in some containers no process reaps it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return True
    import psutil  # on a system without /proc

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _failure(message: str, log_start: int) -> EnvironmentFault:
    path = paths.log_path()
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as log:
            log.seek(log_start)
            lines = log.read().decode("utf-8", "replace").splitlines()
    except (OSError, PrivateFileError):
        lines = []
    last = "".join(f"\n  {line}" for line in lines[-10:])
    return EnvironmentFault(f"{message}:{last}" if last else message, hint=f"see its log, {path}")
