"""Finds the processes of an attempt, also those that left its process group, and measures their RAM.

A process belongs to an attempt if any of these is true:
- its environment names the queue, the job and the attempt; every program that the job starts inherits this;
- it writes to the attempt's log;
- it is in a session that such a process leads;
- its parent belongs to the attempt.

The keeper, which has to report the end, this process, podman's pause process and other users' processes never belong to
it.

A process that left the session, lost its parent, cleared its environment and closed the log is not found.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.core.job.job import Attempt
from gpuyard.engines.common.handled_signals import handles, inner_pid
from gpuyard.engines.common.pause_process import is_pause_process

QUEUE = "GPUYARD_QUEUE"
_IS_LINUX = sys.platform == "linux"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MB_PER_PAGE = os.sysconf("SC_PAGE_SIZE") / 1048576
# Reading a thousand processes takes 10 ms.
_MEASURE_EVERY_S = 2.0
# A forked child may appear in the next round only. Stopping a program that outruns this many rounds takes a cgroup.
_MOST_ROUNDS = 50
# A process cannot react to these by starting another, so a new process was forked before and gets the signal too.
_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})
# These reach the processes in containers one by one. Others go to the first process, as `docker stop` sends them.
_FOR_ALL = _UNCATCHABLE | {signal.SIGCONT}


class TrackedProcess(Struct, frozen=True, kw_only=True):
    pid: int
    parent: int
    session: int
    started: float
    is_dead: bool
    is_stopped: bool


def read_again(process: TrackedProcess) -> TrackedProcess | None:
    """Return the current state of the same process, or None if it has ended."""
    now = _read_process(process.pid)
    return now if now is not None and now.started == process.started and not now.is_dead else None


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, as by SIGSTOP."""
    process = _read_process(pid)
    return process is not None and process.is_stopped


def signal_each(attempts: Sequence[Attempt], queue: str, signum: int) -> list[int]:
    """Send the signal to all processes of each attempt. Return to how many, by attempt.

    SIGKILL and SIGSTOP are sent again until no new process is found. Most other signals are not sent into containers
    (`_without_contained`). One reading of the process table serves all attempts.
    """
    reached: list[set[tuple[int, float]]] = [set() for _ in attempts]
    left = list(zip(attempts, reached, strict=True))
    for _ in range(_MOST_ROUNDS if signum in _UNCATCHABLE else 1):
        table = ProcessTable(queue)
        left = [(attempt, known) for attempt, known in left if _signal_new(table.of(attempt), signum, known)]
        if not left:
            break
    return list(map(len, reached))


def _signal_new(found: list[TrackedProcess], signum: int, reached: set[tuple[int, float]]) -> bool:
    """Signal the processes that are not in `reached`, and add them to it. Return whether there were any."""
    found = found if signum in _FOR_ALL else _without_contained(found)
    new = [each for each in found if (each.pid, each.started) not in reached]
    reached.update((each.pid, each.started) for each in new if send(each, signum))
    return bool(new)


def warn_each(attempts: Sequence[Attempt], queue: str, signum: int) -> list[int]:
    """Send the signal to the processes of each attempt that handle it. Return to how many, by attempt: most signals end
    a process that does not handle them, such as the shell around a program. If some are in a container, only they get
    it."""
    table = ProcessTable(queue)
    return [_warn(table.of(attempt), signum) for attempt in attempts]


def _warn(found: list[TrackedProcess], signum: int) -> int:
    handling = [each for each in found if handles(each.pid, signum)]
    contained = [each for each in handling if inner_pid(each.pid) is not None]
    return sum(send(each, signum) for each in contained or handling)


# Membership


class ProcessTable:
    """All processes at one moment, and the attempts of one queue that they belong to. Reading a thousand processes
    takes about 50 ms."""

    def __init__(self, queue: str, besides: int | None = None) -> None:
        """The process `besides`, as the daemon, never counts."""
        # Excluded processes are no parents here either: the daemon's children are the keeper and its jobs.
        excluded = (os.getpid(), besides)
        self._all = {each.pid: each for each in _all_processes() if each.pid not in excluded and not each.is_dead}
        self._by_mark: dict[tuple[str, str], list[int]] = {}
        self._by_log: dict[str, list[int]] = {}
        self._by_session: dict[int, list[int]] = {}
        self._by_parent: dict[int, list[int]] = {}
        for pid, each in self._all.items():
            self._by_session.setdefault(each.session, []).append(pid)
            self._by_parent.setdefault(each.parent, []).append(pid)
            if (mark := _mark(pid, queue)) is not None:
                self._by_mark.setdefault(mark, []).append(pid)
            for log in _logs_written(pid, f"{queue}/logs/"):
                self._by_log.setdefault(log, []).append(pid)

    def of(self, attempt: Attempt) -> list[TrackedProcess]:
        """Return all processes of the attempt, oldest first."""
        found: set[int] = set()
        new = set(self._by_mark.get((str(attempt.job_id), str(attempt.number)), ()))
        # Not files that the user named: several jobs, and programs outside of jobs, may append to one.
        for log in filter(None, (attempt.log, attempt.error_log)):
            new.update(self._by_log.get(log, ()))
        new.discard(attempt.keeper_pid)
        for pid in [pid for pid in new if self._all[pid].session == pid]:
            new.update(self._by_session[pid])
        while new:  # their descendants
            new.discard(attempt.keeper_pid)
            found |= new
            new = {child for pid in new for child in self._by_parent.get(pid, ())} - found
        ours = (self._all[pid] for pid in found if _is_ours(pid) and not is_pause_process(pid))
        return sorted(ours, key=lambda each: (each.started, each.pid))


def processes_of(attempt: Attempt, queue: str, besides: int | None = None) -> list[TrackedProcess]:
    """Return all processes of the attempt, oldest first. The process `besides`, as the daemon, never counts."""
    return ProcessTable(queue, besides).of(attempt)


def _without_contained(found: list[TrackedProcess]) -> list[TrackedProcess]:
    """Leave out processes in containers if others exist: podman and docker pass signals on. Without others, the tool is
    gone: keep the first process of each container."""
    inner = {each.pid: inner_pid(each.pid) for each in found}
    outside = [each for each in found if inner[each.pid] is None]
    return outside or [each for each in found if inner[each.pid] == 1] or found


def main_process(attempt: Attempt, queue: str) -> int | None:
    """Return the pid of the program itself: the leader of the attempt's session."""
    children = filter(None, map(_read_process, _children(attempt.keeper_pid)))
    leaders = [each for each in children if each.session == each.pid and each.parent == attempt.keeper_pid]
    # The keeper adopts processes that the program left behind, which are younger.
    leaders.sort(key=lambda each: (each.started, each.pid))
    mine = (str(attempt.job_id), str(attempt.number))
    return next((each.pid for each in leaders if _mark(each.pid, queue) == mine), None)


def jobs_of_queue(queue: str) -> dict[int, int]:
    """Return the job ids of this user's live processes that name the queue, with the pid of one process each."""
    found: dict[int, int] = {}
    for process in _all_processes():
        variables = {} if process.is_dead else _environment(process.pid)
        job_id = variables.get("GPUYARD_JOB_ID", "")
        is_job = variables.get(QUEUE) == queue and job_id.isascii() and job_id.isdecimal()
        if is_job and _is_ours(process.pid):  # which takes longer
            found.setdefault(int(job_id), process.pid)
    return found


def _mark(pid: int, queue: str) -> tuple[str, str] | None:
    """Return the job and the attempt that the process's environment names; None if not of this queue."""
    variables = _environment(pid)
    if variables.get(QUEUE) != queue:
        return None
    return variables.get("GPUYARD_JOB_ID", ""), variables.get("GPUYARD_ATTEMPT", "")


def _environment(pid: int) -> dict[str, str]:
    if _IS_LINUX:
        content = _environ(pid)
        if QUEUE.encode() not in content:
            return {}
        return dict(os.fsdecode(item).split("=", 1) for item in content.split(b"\0") if b"=" in item)
    import psutil

    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}


def _environ(pid: int) -> bytes:
    """Return nothing if it cannot be read, as another user's, or does not exist yet, as while a process is starting."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def _logs_written(pid: int, prefix: str) -> list[str]:
    """Return the logs that the process has open for appending. A reader, such as `tail -f`, is not the job's."""
    found: list[str] = []
    if _IS_LINUX:
        with contextlib.suppress(OSError, ValueError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = os.readlink(f"/proc/{pid}/fd/{name}")
                if path.startswith(prefix) and _is_for_appending(pid, name):
                    found.append(path)
    return found


def _is_for_appending(pid: int, descriptor: str) -> bool:
    """Return whether the descriptor was opened as the keeper opens logs; an editor opens them otherwise."""
    lines = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)


def _is_ours(pid: int) -> bool:
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


# The system's process table


def _pids() -> list[int]:
    if _IS_LINUX:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    import psutil

    return psutil.pids()


def _children(pid: int) -> list[int]:
    """Return the children of a process, if the system lists them; else all processes."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return list(map(int, file.read().split()))
    except OSError:
        return _pids()


def _all_processes() -> Iterator[TrackedProcess]:
    return filter(None, map(_read_process, _pids()))


def _read_process(pid: int) -> TrackedProcess | None:
    if not _IS_LINUX:
        return _psutil_process(pid)
    fields = _stat(pid)
    if not fields:
        return None
    return TrackedProcess(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]) / _TICKS_PER_S,
        is_dead=fields[0] in b"ZXx",
        is_stopped=fields[0] == b"T",
    )


def _stat(pid: int) -> list[bytes]:
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
        now = _read_process(process.pid)
        if now is None or now.started != process.started:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


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


# RAM and CPU time


class RamMeter:
    """Measures RAM and CPU time of each attempt of one queue, in one pass over all processes. For one thread at a time.

    Sessions tell processes apart: a job has a session of its own, and a process that leaves it still has the job's
    variables in its environment. A session's environment is read once. Shared memory counts for each process.
    """

    def __init__(self, queue: str) -> None:
        self._mark = f"{QUEUE}={queue}".encode(errors="surrogateescape")
        self._attempts: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._found: dict[tuple[int, int], float] = {}
        self._cpu_s: dict[tuple[int, int], float] = {}
        self._measured_at = float("-inf")

    def measure(self, max_age_s: float = _MEASURE_EVERY_S) -> dict[tuple[int, int], float]:
        """Return MB by job and attempt, at most `max_age_s` old (default: 2 s); empty on systems other than Linux."""
        now = time.monotonic()
        if _IS_LINUX and now >= self._measured_at + max_age_s:
            self._measured_at, self._found = now, self._measure()
        return self._found

    def cpu_s(self) -> dict[tuple[int, int], float]:
        """Return the CPU time by job and attempt, of the last `measure`: that of live processes, and of children that
        they have waited for."""
        return self._cpu_s

    def _measure(self) -> dict[tuple[int, int], float]:
        seen: dict[tuple[int, int], tuple[int, int] | None] = {}
        found: dict[tuple[int, int], float] = {}
        cpu_s: dict[tuple[int, int], float] = {}
        for session, (started, pids, pages, ticks) in _sessions().items():
            name = (session, started)
            attempt = self._attempts[name] if name in self._attempts else self._find_attempt(pids)
            seen[name] = attempt
            if attempt is not None:
                found[attempt] = found.get(attempt, 0.0) + pages * _MB_PER_PAGE
                cpu_s[attempt] = cpu_s.get(attempt, 0.0) + ticks / _TICKS_PER_S
        self._attempts, self._cpu_s = seen, cpu_s
        return found

    def _find_attempt(self, pids: list[int]) -> tuple[int, int] | None:
        variables = next(filter(None, map(_environ, pids)), b"").split(b"\0")
        if self._mark not in variables:
            return None
        values = dict(variable.partition(b"=")[::2] for variable in variables)
        job, attempt = values.get(b"GPUYARD_JOB_ID", b""), values.get(b"GPUYARD_ATTEMPT", b"")
        return (int(job), int(attempt)) if job.isdigit() and attempt.isdigit() else None


def _sessions() -> dict[int, tuple[int, list[int], int, int]]:
    """Return by session: when its oldest process started, its processes, how many pages they hold, and the clock ticks
    of CPU time that they have used, with those of children that have ended."""
    found: dict[int, tuple[int, list[int], int, int]] = {}
    for pid in sorted(_pids()):
        if fields := _stat(pid):
            session, started, pages = int(fields[3]), int(fields[19]), int(fields[21])
            oldest, pids, held, ticks = found.get(session, (started, [], 0, 0))
            ticks += sum(map(int, fields[11:15]))
            found[session] = (min(oldest, started), [*pids, pid], held + pages, ticks)
    return found
