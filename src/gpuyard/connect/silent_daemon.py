"""Distinguishes a daemon that is stopped or hangs from a busy one. Imported only after 10 s without an answer."""

import os
import time

from gpuyard.connect import paths
from gpuyard.errors import EnvironmentFault

# A busy daemon may take longer than the 10 s after which this module is asked, but not as long as this.
_GIVE_UP_S = 300.0


class SilentDaemon(EnvironmentFault):
    """The daemon runs and does not answer. It may still carry out the request later."""


class Silence:
    """Watches a daemon from the moment it is found silent until it answers or is given up."""

    def __init__(self, pid: int | None, *, may_idle: bool) -> None:
        """`may_idle`: the daemon was asked to delay its answer, and the caller has a deadline."""
        self._pid, self._may_idle, self._began_at = pid, may_idle, time.monotonic()

    def check(self) -> None:
        is_given_up = not self._may_idle and time.monotonic() - self._began_at >= _GIVE_UP_S
        if is_given_up or is_stopped(self._pid):
            raise silent(self._pid)


def silent(pid: int | None) -> SilentDaemon:
    if pid is None:
        return SilentDaemon("the daemon does not answer", hint=f"see {paths.log_path()}")
    ends = f"`kill -9 {pid}` ends it and harms no job; the next command starts another daemon"
    if is_stopped(pid):
        return SilentDaemon(
            f"the daemon (pid {pid}) is stopped and does not answer",
            hint=f"`kill -CONT {pid}` continues it, and it may then do what it was asked; {ends}",
        )
    return SilentDaemon(f"the daemon (pid {pid}) does not answer", hint=f"see {paths.log_path()}; {ends}")


def is_stopped(pid: int | None) -> bool:
    """Return whether the process is stopped, as by SIGSTOP or a debugger."""
    import psutil

    try:
        return pid is not None and psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def lock_holder() -> int | None:
    from gpuyard.connect.daemon_lock import running_pid

    return running_pid(paths.lock_path()) if os.path.exists(paths.lock_path()) else None
