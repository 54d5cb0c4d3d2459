"""What the system says about processes, in /proc on Linux and by psutil elsewhere, and signals to single processes."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IS_LINUX = sys.platform == "linux"


class TrackedProcess(Struct, frozen=True, kw_only=True):
    pid: int
    parent: int
    session: int
    started: float
    is_dead: bool
    is_stopped: bool


def all_processes() -> Iterator[TrackedProcess]:
    return filter(None, map(read_process, all_pids()))


def all_pids() -> list[int]:
    if _IS_LINUX:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    import psutil

    return psutil.pids()


def children_of(pid: int) -> list[int]:
    """Return the children of a process, if the system lists them; else all processes."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return all_pids()


def read_process(pid: int) -> TrackedProcess | None:
    if not _IS_LINUX:
        return _psutil_process(pid)
    fields = stat_fields(pid)
    if not fields:
        return None
    return TrackedProcess(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]) / TICKS_PER_S,
        is_dead=fields[0] in b"ZXx",
        is_stopped=fields[0] == b"T",
    )


def _psutil_process(pid: int) -> TrackedProcess | None:
    import psutil

    try:
        seen = psutil.Process(pid)
        return TrackedProcess(
            pid=pid,
            parent=seen.ppid(),
            session=os.getsid(pid),
            started=seen.create_time(),
            is_dead=seen.status() == psutil.STATUS_ZOMBIE,
            is_stopped=seen.status() == psutil.STATUS_STOPPED,
        )
    except (psutil.Error, OSError):
        return None


def read_again(process: TrackedProcess) -> TrackedProcess | None:
    """Return the current state of the same process, or None if it has ended."""
    now = read_process(process.pid)
    return now if now is not None and now.started == process.started and not now.is_dead else None


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, as by SIGSTOP."""
    process = read_process(pid)
    return process is not None and process.is_stopped


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat that follow the program's name; none if the process has ended."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        content = os.read(descriptor, 4096)
    except OSError:
        return []
    finally:
        os.close(descriptor)
    return content[content.rindex(b")") + 2 :].split(None, 22)  # the name may contain anything


def environment_with(variable: str, pid: int) -> dict[str, str]:
    """Return the environment of a process that has the variable. That of others may be empty."""
    if _IS_LINUX:
        content = raw_environment(pid)
        if variable.encode() not in content:
            return {}
        return dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if b"=" in item)
    import psutil

    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}


def raw_environment(pid: int) -> bytes:
    """Return nothing if it cannot be read, as another user's, or does not exist yet, as while a process is starting."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def files_appended(pid: int, prefix: str) -> list[str]:
    """Return the files below `prefix` that the process has open for appending only, as the keeper opens logs: readers,
    such as `tail -f`, and editors open them otherwise. Empty on systems other than Linux."""
    found: list[str] = []
    if _IS_LINUX:
        with contextlib.suppress(OSError, ValueError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = os.readlink(f"/proc/{pid}/fd/{name}")
                if path.startswith(prefix) and _is_for_appending(pid, name):
                    found.append(path)
    return found


def _is_for_appending(pid: int, descriptor: str) -> bool:
    lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)


def is_ours(pid: int) -> bool:
    """Return whether the process has our real user id."""
    if _IS_LINUX:
        try:
            with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
                status = file.read(4096)
        except OSError:
            return False
        return int(status.partition(b"\nUid:")[2].split(None, 1)[0]) == os.getuid()
    import psutil

    try:
        return bool(psutil.Process(pid).uids().real == os.getuid())
    except psutil.Error:
        return False


def send(process: TrackedProcess, signum: int) -> bool:
    """Send the signal, with a pidfd if possible: not to a later process of the same pid. Return whether it was sent."""
    try:
        if not hasattr(signal, "pidfd_send_signal"):
            os.kill(process.pid, signum)
            return True
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        now = read_process(process.pid)
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
