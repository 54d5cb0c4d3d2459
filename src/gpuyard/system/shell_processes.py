"""The processes that a command was started by: this tells the queue which jobs a shell or script has submitted.

Read at each submission, so it imports nothing slow. A name is a pid with the process's start time and the machine's
boot id, because pids are used again.
"""

import os

# A chain of processes longer than this is cut: scripts that start scripts are rarely nested deeper.
_MOST = 16
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def starting_processes(*, with_own: bool = False) -> list[str]:
    """Return the names of the processes that started this one, the nearest first, up to the leader of its session: the
    login shell of a terminal, or the program that cron or ssh started. `with_own`: begin with this process."""
    leader, pid, boot = os.getsid(0), os.getpid() if with_own else os.getppid(), _boot()
    names: list[str] = []
    while pid > 0 and len(names) < _MOST:
        parent, name = _read(pid, boot)
        if name is not None:
            names.append(name)
        if pid == leader or parent is None:
            break
        pid = parent
    return names


def _read(pid: int, boot: str) -> tuple[int | None, str | None]:
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
