"""What a command knows of the shell that started it: its umask, niceness and limits, which a job gets that is submitted
from there, and its processes, by which the queue finds the jobs that a shell or script has submitted.

Read at each submission, so it imports nothing that takes milliseconds."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def read_shell_settings() -> "dict[str, Any]":
    """Return the settings as the fields of `core.job.shell_settings.ShellSettings`."""
    return {"umask": _read_umask(), "niceness": os.getpriority(os.PRIO_PROCESS, 0), "limits": _get_limits(0)}


def hard_limits() -> dict[str, int]:
    return _get_limits(1)


def limit_number(name: str) -> int | None:
    """Return the system's number of a limit, or None if the system has no such limit."""
    import resource

    number: int | None = getattr(resource, f"RLIMIT_{name}", None)
    return number


def _get_limits(place: int) -> dict[str, int]:
    """Return the soft limits, with place 0, or the hard ones, with place 1."""
    import resource

    names = (name for name in vars(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE")  # now NOFILE
    return {name.removeprefix("RLIMIT_"): resource.getrlimit(getattr(resource, name))[place] for name in names}


def _read_umask() -> int:
    """Read it from /proc where there is one: setting it to read it would affect files that other threads create."""
    try:
        with open("/proc/self/status", "rb") as file:
            return int(file.read(4096).partition(b"Umask:")[2].split(maxsplit=1)[0], 8)
    except (OSError, IndexError, ValueError):
        umask = os.umask(0o077)
        os.umask(umask)
        return umask


def starting_processes(*, with_own: bool = False) -> list[str]:
    """Return the names of the processes that started this one, the nearest first, up to the leader of its session: the
    login shell of a terminal, or the program that cron or ssh started. A process is named by the machine's boot id, its
    pid and its start time, because pids are used again. `with_own`: begin with this process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read(8).decode("latin-1")
    except OSError:
        boot = os.uname().nodename[:40]
    leader, pid = os.getsid(0), os.getpid() if with_own else os.getppid()
    names: list[str] = []
    while pid > 0 and len(names) < 16:  # scripts that start scripts are rarely nested deeper
        fields = stat_fields(pid)
        if fields:
            names.append(f"{boot}:{pid}:{int(fields[19])}")
        elif not os.path.isdir("/proc/self"):  # only the parent is known, and not when it started
            names.append(f"{boot}:{pid}")
        if pid == leader or not fields:
            break
        pid = int(fields[1])
    return names


def stat_fields(pid: int) -> list[bytes]:
    """Return the kernel's fields of a process after its name; none if it is gone, or without /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return []
    return fields if len(fields) > 19 else []
