"""Identifies processes: the system reuses a pid, but not a pid with its start time and the machine's boot id."""

import os
import pwd
from functools import lru_cache

from gpuyard.core.printable_text import printable
from gpuyard.system.machine_identity import boot_id, machine_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuyard.core.lease import Holder

_LONGEST_LABEL = 200
_LONGEST_USER = 100
_LONGEST_NAME = 60
_STOPPED = ("stopped", "tracing-stop")  # by psutil's names
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def this_process(label: str | None = None) -> "Holder":
    from gpuyard.core.lease import Holder  # a command that starts the daemon needs only `start_time`

    uid, pid = os.getuid(), os.getpid()
    return Holder(
        uid=uid,
        user=user_name(uid),
        pid=pid,
        pid_started=start_time(pid),
        boot_id=boot_id(),
        machine=machine_name(),
        label=tidy_label(label),
    )


def tidy_label(label: str | None) -> str | None:
    """Shorten a label to 200 characters, and make it printable."""
    return None if label is None else printable(label, _LONGEST_LABEL)


@lru_cache(maxsize=256)  # the system may ask a directory server
def user_name(uid: int) -> str:
    try:
        return printable(pwd.getpwuid(uid).pw_name, _LONGEST_USER)
    except KeyError:
        return str(uid)


def start_time(pid: int) -> float | None:
    """Return when the process started, in seconds since the machine booted, or None if there is no such process.

    psutil adds the time of the boot, which changes when the wall clock is set. Without /proc: seconds since the epoch.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19]) / _TICKS_PER_S
    except FileNotFoundError:
        return None if os.path.isdir("/proc/self") else _create_time(pid)
    except (OSError, IndexError):
        return None


def _create_time(pid: int) -> float | None:
    import psutil

    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def is_alive(holder: "Holder") -> bool:
    """Return whether the process that made the record still runs, under the same user."""
    import psutil

    try:
        uid = psutil.Process(holder.pid).uids().real
    except psutil.Error:
        return False
    before, started = holder.pid_started, start_time(holder.pid)
    same_start = before is None or (started is not None and abs(started - before) < 1.0)
    return same_start and uid == holder.uid and holder.boot_id in (None, boot_id())


def is_stopped(holder: "Holder") -> bool:
    """Return whether the process is stopped, as by Ctrl-Z: it would not use what is reserved for it.

    False for a process that this system does not know: the pid of one in another container may be another process here.
    """
    import psutil

    try:
        return psutil.Process(holder.pid).status() in _STOPPED and is_alive(holder)
    except psutil.Error:
        return False


def describe_process(pid: int) -> str:
    """Return the program, pid and user of a process for a message; only the pid if the system shows no more."""
    import psutil

    try:
        process = psutil.Process(pid)
        name, user = printable(process.name(), _LONGEST_NAME), user_name(process.uids().real)
        state = ", stopped" if process.status() in _STOPPED else ""
    except psutil.Error:
        return f"process {pid}"
    return f"{name} (pid {pid}, user {user}{state})"
