"""The processes of an attempt, found again wherever they went.

A process belongs to an attempt where any of these is so:
- it is in the supervisor's session;
- its environment names the queue, the job and the attempt, as that of every program the job starts does unless it was
  cleared;
- it writes to the attempt's log;
- its parent belongs to it.

Never the supervisor, which has to tell of the end, never this process, and never another user's. The supervisor's pid
is believed only together with its start time and the machine's boot. On Linux a start time counts from the boot, so
that a clock which is set anew changes nothing; elsewhere it is what psutil says.

Who left the session, lost its parent, cleared its environment and closed the log is not found.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from gpuyard.core.jobs import Attempt

QUEUE = "GPUYARD_QUEUE"
_IS_LINUX = sys.platform == "linux"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STARTED_WITHIN_S = 0.5
# After a fork the child may be in the next round only; what outruns this many rounds needs a cgroup, not a scheduler.
_MOST_ROUNDS = 50
# These let nobody answer by starting something, so whoever is new was forked before and is meant too.
_UNANSWERABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})


class _Process(Struct, frozen=True, kw_only=True):
    pid: int
    parent: int
    session: int
    started: float
    is_dead: bool


def start_time(pid: int) -> float | None:
    """Only ever compared with another answer of this function on the same boot; `None` where nobody is there."""
    process = _look_at(pid)
    return None if process is None else process.started


def time_now() -> float:
    """On the clock that `start_time` goes by. To ask the kernel for the start of a process that is just being made
    takes ten times as long, and a number is not given to another process within the same half second."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if _IS_LINUX else time.time()


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def has_supervisor(attempt: Attempt) -> bool:
    """Whether the very process that was made for the attempt is there, dead or alive."""
    process = _look_at(attempt.pid)
    return process is not None and _is_supervisor(process, attempt)


def signal_all(attempt: Attempt, queue: str, signum: int) -> int:
    """To how many it went. Those that cannot be dodged are sent until nobody new is found."""
    reached: set[tuple[int, float]] = set()
    for _ in range(_MOST_ROUNDS if signum in _UNANSWERABLE else 1):
        fresh = [one for one in _members(attempt, queue) if (one.pid, one.started) not in reached]
        if not fresh:
            break
        reached.update((one.pid, one.started) for one in fresh if _send(one, signum))
    return len(reached)


# Who belongs to it


def _members(attempt: Attempt, queue: str) -> list[_Process]:
    table = {process.pid: process for process in _everybody()}
    leader = table.get(attempt.pid)
    if leader is not None and not _is_supervisor(leader, attempt):
        leader = None
    # Whoever is left out here is no parent of anybody either: the daemon's children are the other jobs.
    others = {pid: one for pid, one in table.items() if one is not leader and pid != os.getpid() and not one.is_dead}
    found = {pid for pid, one in others.items() if leader is not None and one.session == leader.pid}
    found |= {pid for pid in others.keys() - found if _is_marked(pid, attempt, queue) or _writes_to(pid, attempt.log)}
    found |= _descendants(others, found | ({leader.pid} if leader is not None else set()))
    return sorted((others[pid] for pid in found if _is_ours(pid)), key=lambda one: (one.started, one.pid))


def _is_supervisor(process: _Process, attempt: Attempt) -> bool:
    """Supervisors lead a session; where nothing was recorded, that has to do."""
    same_boot = attempt.boot_id is None or attempt.boot_id == boot_id()
    told = attempt.pid_started
    same_start = told is None or abs(told - process.started) < _STARTED_WITHIN_S
    return same_boot and same_start and process.session == process.pid


def _descendants(table: dict[int, _Process], of: set[int]) -> set[int]:
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
    """As the supervisor opened it; the user's own editor would not."""
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


def _everybody() -> Iterator[_Process]:
    if not _IS_LINUX:
        yield from _everybody_elsewhere()
        return
    for name in os.listdir("/proc"):
        process = _look_at(int(name)) if name.isdecimal() else None
        if process is not None:
            yield process


def _look_at(pid: int) -> _Process | None:
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
    return _Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]) / _TICKS_PER_S,
        is_dead=fields[0] in b"ZXx",
    )


def _send(process: _Process, signum: int) -> bool:
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


def _everybody_elsewhere() -> Iterator[_Process]:
    import psutil

    for pid in psutil.pids():
        process = _look_elsewhere(pid)
        if process is not None:
            yield process


def _look_elsewhere(pid: int) -> _Process | None:
    import psutil

    try:
        seen = psutil.Process(pid)
        return _Process(
            pid=pid,
            parent=seen.ppid(),
            session=os.getsid(pid),
            started=seen.create_time(),
            is_dead=seen.status() == psutil.STATUS_ZOMBIE,
        )
    except (psutil.Error, OSError):
        return None


def _environment_elsewhere(pid: int) -> dict[str, str]:
    import psutil

    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}
