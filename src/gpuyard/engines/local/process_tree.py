"""The processes of an attempt, found again wherever they went.

A process belongs to an attempt where any of these is so:
- its environment names the queue, the job and the attempt, as that of every program the job starts does unless it was
  cleared;
- it writes to the attempt's log;
- it is in a session that such a process leads;
- its parent belongs to it.

Never the keeper, which has to tell of the end, never this process, and never another user's.

Who left the session, lost its parent, cleared its environment and closed the log is not found.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from gpuyard.core.job.job import Attempt

QUEUE = "GPUYARD_QUEUE"
_IS_LINUX = sys.platform == "linux"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# After a fork the child may be in the next round only; what outruns this many rounds needs a cgroup, not a scheduler.
_MOST_ROUNDS = 50
# These let nobody answer by starting something, so whoever is new was forked before and is meant too.
_UNANSWERABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


class TrackedProcess(Struct, frozen=True, kw_only=True):
    pid: int
    parent: int
    session: int
    started: float
    is_dead: bool
    is_stopped: bool


def start_time(pid: int) -> float | None:
    """Only ever compared with another answer of this function on the same boot; `None` where nobody is there."""
    process = _look_at(pid)
    return None if process is None else process.started


def read_again(process: TrackedProcess) -> TrackedProcess | None:
    """The same one as it is now; `None` where it has ended."""
    now = _look_at(process.pid)
    return now if now is not None and now.started == process.started and not now.is_dead else None


def signal_all(attempt: Attempt, queue: str, signum: int) -> int:
    """To how many it went. Those that cannot be dodged are sent until nobody new is found."""
    reached: set[tuple[int, float]] = set()
    for _ in range(_MOST_ROUNDS if signum in _UNANSWERABLE else 1):
        fresh = [one for one in processes_of(attempt, queue) if (one.pid, one.started) not in reached]
        if not fresh:
            break
        reached.update((one.pid, one.started) for one in fresh if send(one, signum))
    return len(reached)


# Who belongs to it


def processes_of(attempt: Attempt, queue: str, besides: int | None = None) -> list[TrackedProcess]:
    """All that belong to it by now, the oldest first; `besides` is another that never does, as the daemon."""
    # Whoever is left out here is no parent of anybody either: the daemon's children are the keeper and its jobs.
    left_out = (os.getpid(), attempt.pid, besides)
    others = {one.pid: one for one in _everybody() if one.pid not in left_out and not one.is_dead}
    found = {pid for pid in others if _is_marked(pid, attempt, queue) or _writes_to(pid, attempt.log)}
    sessions = {others[pid].session for pid in found if others[pid].session == pid}
    found |= {pid for pid, one in others.items() if one.session in sessions}
    found |= _descendants(others, found)
    return sorted((others[pid] for pid in found if _is_ours(pid)), key=lambda one: (one.started, one.pid))


def main_process(attempt: Attempt, queue: str) -> int | None:
    """The one that leads the attempt's session: the program itself."""
    leaders = (one for one in _everybody() if one.session == one.pid and one.parent == attempt.pid)
    return next((one.pid for one in leaders if _is_marked(one.pid, attempt, queue)), None)


def _descendants(table: dict[int, TrackedProcess], of: set[int]) -> set[int]:
    found: set[int] = set()
    fresh = of
    while fresh:
        fresh = {pid for pid, one in table.items() if one.parent in fresh} - found - of
        found |= fresh
    return found


def _is_marked(pid: int, attempt: Attempt, queue: str) -> bool:
    words = _environment(pid)
    return (
        words.get("GPUYARD_JOB_ID") == str(attempt.job_id)
        and words.get("GPUYARD_ATTEMPT") == str(attempt.number)
        and words.get(QUEUE) == queue
    )


def _environment(pid: int) -> dict[str, str]:
    if not _IS_LINUX:
        return _environment_elsewhere(pid)
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            content = file.read()
    except OSError:
        return {}
    if QUEUE.encode() not in content:
        return {}
    return dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if b"=" in item)


def _writes_to(pid: int, log: str | None) -> bool:
    """Those that only read it, such as `tail -f`, have nothing to do with the job."""
    if log is None or not _IS_LINUX:
        return False
    with contextlib.suppress(OSError, ValueError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}") == log and _is_for_appending(pid, name):
                return True
    return False


def _is_for_appending(pid: int, descriptor: str) -> bool:
    """As the keeper opened it; the user's own editor would not."""
    lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)


def _is_ours(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).uids().real == os.getuid())
    except psutil.Error:
        return False


# What the system says


def _everybody() -> Iterator[TrackedProcess]:
    if not _IS_LINUX:
        yield from _everybody_elsewhere()
        return
    for name in os.listdir("/proc"):
        process = _look_at(int(name)) if name.isdecimal() else None
        if process is not None:
            yield process


def _look_at(pid: int) -> TrackedProcess | None:
    if not _IS_LINUX:
        return _look_elsewhere(pid)
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        content = os.read(descriptor, 4096)
    except OSError:  # gone since
        return None
    finally:
        os.close(descriptor)
    fields = content[content.rindex(b")") + 2 :].split(None, 20)  # the name before may hold anything
    return TrackedProcess(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]) / _TICKS_PER_S,
        is_dead=fields[0] in b"ZXx",
        is_stopped=fields[0] == b"T",
    )


def send(process: TrackedProcess, signum: int) -> bool:
    """Through a descriptor where there are any: it stays that of the process that was looked at."""
    try:
        if not hasattr(signal, "pidfd_send_signal"):
            os.kill(process.pid, signum)
            return True
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if start_time(process.pid) != process.started:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


# Where there is no /proc


def _everybody_elsewhere() -> Iterator[TrackedProcess]:
    import psutil

    for pid in psutil.pids():
        process = _look_elsewhere(pid)
        if process is not None:
            yield process


def _look_elsewhere(pid: int) -> TrackedProcess | None:
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


def _environment_elsewhere(pid: int) -> dict[str, str]:
    import psutil

    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}
