"""Distinguishes a daemon that is stopped or hangs from a busy one. Imported only after 10 s without an answer."""

import os
import time
from collections.abc import Callable

from gpuyard.connect import paths
from gpuyard.errors import EnvironmentFault

# A daemon that uses no CPU for this long does not work on the request; a busy one may take longer.
_IDLE_S, _BUSY_S = 60.0, 600.0


class SilentDaemon(EnvironmentFault):
    """The daemon runs and does not answer. It may still carry out the request later."""


class Silence:
    """Watches a daemon from the moment it is found silent until it answers or is given up."""

    def __init__(self, pid: int | None, *, may_idle: bool, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`may_idle`: the daemon was asked to delay its answer, and the caller has a deadline."""
        self._pid = pid
        self._may_idle = may_idle
        self._monotonic = monotonic
        self._began_at = self._worked_at = monotonic()
        self._cpu_s = cpu_time_of(pid)

    def check(self) -> None:
        if is_stopped(self._pid):
            raise silent(self._pid)
        if self._may_idle:
            return
        now, cpu_s = self._monotonic(), cpu_time_of(self._pid)
        if cpu_s != self._cpu_s:
            self._cpu_s, self._worked_at = cpu_s, now
        if now - self._worked_at >= _IDLE_S or now - self._began_at >= _BUSY_S:
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


def cpu_time_of(pid: int | None) -> float | None:
    """Return the CPU time that the process has used in seconds, or None if unknown."""
    import psutil

    try:
        return None if pid is None else sum(psutil.Process(pid).cpu_times()[:2])
    except psutil.Error:
        return None


def lock_holder() -> int | None:
    from gpuyard.connect.daemon_lock import running_pid

    return running_pid(paths.lock_path()) if os.path.exists(paths.lock_path()) else None
