"""Starts a daemon that outlives whoever starts it, and waits until it answers.

    the caller ── the starter ── the daemon

The starter ends at once, so the daemon is nobody's child, has no terminal and no descriptor of the caller's. It starts
with signals as they are by default, whatever the caller ignored or blocked. That takes a process of its own: the caller
may have threads, and must not fork.

Any number may start a daemon at once. One gets the lock, the others end, and all callers find the one that has it.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence

from gpuyard.connect import paths
from gpuyard.errors import EnvironmentFault

DAEMON: tuple[str, ...] = (sys.executable, "-P", "-m", "gpuyard.daemon")
_STARTER = (sys.executable, "-P", "-m", "gpuyard.connect.autostart")
# A daemon may lose the lock to one that is just about to end: then it takes a second.
_MOST_STARTS = 2
_POLL_S = 0.005
_LAST_LINES = 10


def start_daemon(
    command: Sequence[str] | None = None, *, timeout_s: float = 60.0, wait_for_other_s: float = 0.0
) -> bool:
    """Returns when a daemon, this one or another's, accepts connections: whether one was started here.

    None is before `wait_for_other_s` have passed, so that somebody else, such as a service manager, can do it.
    """
    from gpuyard.connect.daemon_lock import running_pid

    not_before = time.monotonic() + wait_for_other_s
    deadline = not_before + timeout_s
    log_start, pid, starts = _log_size(), None, 0
    while not _accepts():
        if time.monotonic() > deadline:
            raise _failure(f"the daemon did not answer within {timeout_s:g} s of its start", log_start)
        is_due = time.monotonic() >= not_before and (pid is None or _has_ended(pid))
        if is_due and running_pid(paths.lock_path()) is None:
            if starts == _MOST_STARTS:
                raise _failure("the daemon ended as soon as it was started", log_start)
            pid, starts = _start(command or DAEMON), starts + 1
        time.sleep(_POLL_S)
    return starts > 0


def _accepts() -> bool:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            paths.reach(paths.socket_path(), probe.connect)
        except OSError:
            return False
    return True


def _start(command: Sequence[str]) -> int:
    """The daemon's pid."""
    import subprocess

    try:
        log = _open_log()
        try:
            done = subprocess.run(
                [*_STARTER, *command],
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                check=True,
            )
        finally:
            os.close(log)
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvironmentFault(
            f"the daemon cannot be started: {error}", hint=f"{paths.log_path()} may say more"
        ) from error


def _open_log() -> int:
    path = paths.log_path()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _environment() -> dict[str, str]:
    """The caller's, with paths that mean the same in another working directory."""
    environment = dict(os.environ)
    if environment.get("GPUYARD_HOME"):
        environment["GPUYARD_HOME"] = paths.state_folder()
    if environment.get("PYTHONPATH"):
        folders = environment["PYTHONPATH"].split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(folder) for folder in folders)
    return environment


def _has_ended(pid: int) -> bool:
    """Also where nobody has taken notice of its end: not every container's first process does."""
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _log_size() -> int:
    try:
        return os.path.getsize(paths.log_path())
    except OSError:
        return 0


def _failure(message: str, log_start: int) -> EnvironmentFault:
    """With the last of what was logged since; what others left there before says nothing about this start."""
    path = paths.log_path()
    try:
        with open(path, "rb") as log:
            log.seek(log_start)
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    said = "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
    return EnvironmentFault(f"{message}:{said}" if said else message, hint=f"{path} is its log")


def _launch(command: Sequence[str]) -> int:
    """The starter's part: by now in a session of its own, with only the standard streams open."""
    may_be_reset = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    return os.posix_spawn(
        command[0],
        tuple(command),
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)],
        setsigmask=(),
        setsigdef=may_be_reset,
    )


if __name__ == "__main__":
    print(_launch(sys.argv[1:]))  # noqa: T201 - the caller reads it
