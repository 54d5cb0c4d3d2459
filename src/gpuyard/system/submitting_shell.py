"""What a command knows of the shell that started it: its umask, niceness and limits, which a job gets that is submitted
from there, and its processes, by which the queue finds the jobs that a shell or script has submitted.

Read at each submission, so it imports nothing that takes milliseconds. A process is named by its pid with its start
time and the machine's boot id, because pids are used again.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# A chain of processes longer than this is cut: scripts that start scripts are rarely nested deeper.
_MOST = 16
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


# Settings


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


# Processes


def starting_processes(*, with_own: bool = False) -> list[str]:
    """Return the names of the processes that started this one, the nearest first, up to the leader of its session: the
    login shell of a terminal, or the program that cron or ssh started. `with_own`: begin with this process."""
    leader, pid, boot = os.getsid(0), os.getpid() if with_own else os.getppid(), _boot()
    names: list[str] = []
    while pid > 0 and len(names) < _MOST:
        parent, name = _read_process(pid, boot)
        if name is not None:
            names.append(name)
        if pid == leader or parent is None:
            break
        pid = parent
    return names


def _read_process(pid: int, boot: str) -> tuple[int | None, str | None]:
    """Return the parent of a process, None if unknown, and its name, None if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return int(fields[1]), f"{boot}:{pid}:{int(fields[19])}"
    except FileNotFoundError:
        # A system without /proc: only the parent is known, and not when it started.
        return (None, None) if os.path.isdir("/proc/self") else (None, f"{boot}:{pid}")
    except (OSError, IndexError, ValueError):
        return None, None


def _boot() -> str:
    try:
        with open(_BOOT_ID, "rb") as file:
            return file.read(8).decode("latin-1")
    except OSError:
        return os.uname().nodename[:40]
