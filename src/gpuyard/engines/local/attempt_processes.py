"""Finds the processes of an attempt, also those that left its process group, signals and measures them.

A process belongs to an attempt if its environment names the queue, the job and the attempt, which every program that
the job starts inherits; if it writes to the attempt's log; or if it is in a session that such a process leads, or a
child of such a process. The keeper, this process, podman's pause process and other users' processes never belong to it.
A process that left the session, lost its parent, cleared its environment and closed the log is not found."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from gpuyard.engines.common.handled_signals import handles, inner_pid, is_pause_process
from gpuyard.model.job import Attempt

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
    now = read_process(process.pid)
    return now if now is not None and now.started == process.started and not now.is_dead else None


def is_stopped(pid: int) -> bool:
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

    with contextlib.suppress(psutil.Error, OSError):
        return dict(psutil.Process(pid).environ())
    return {}


def raw_environment(pid: int) -> bytes:
    """Return nothing if it cannot be read, as another user's, or does not exist yet, as while a process is starting."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


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

    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).uids().real == os.getuid())
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


QUEUE = "GPUYARD_QUEUE"
# A forked child may appear in the next round only. Stopping a program that outruns this many rounds takes a cgroup.
_MOST_ROUNDS = 50
# A process cannot react to these by starting another, so a new process was forked before and gets the signal too.
_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})
# These reach the processes in containers one by one. Others go to the first process, as `docker stop` sends them.
_FOR_ALL = _UNCATCHABLE | {signal.SIGCONT}


def signal_each(attempts: Sequence[Attempt], queue: str, signum: int) -> list[int]:
    """Send the signal to all processes of each attempt, with one reading of the process table for all. Return to how
    many, by attempt. SIGKILL and SIGSTOP are sent again until no new process is found. Most other signals are not sent
    into containers."""
    reached: list[set[tuple[int, float]]] = [set() for _ in attempts]
    left = list(zip(attempts, reached, strict=True))
    for _ in range(_MOST_ROUNDS if signum in _UNCATCHABLE else 1):
        table, tried, left = ProcessTable(queue), left, []
        for attempt, known in tried:
            found = table.of(attempt) if signum in _FOR_ALL else _without_contained(table.of(attempt))
            new = [each for each in found if (each.pid, each.started) not in known]
            known.update((each.pid, each.started) for each in new if send(each, signum))
            left += [(attempt, known)] if new else []
        if not left:
            break
    return list(map(len, reached))


def warn_each(attempts: Sequence[Attempt], queue: str, signum: int) -> list[int]:
    """Send the signal to the processes of each attempt that handle it: it would end others, such as the shell around a
    program. If some are in a container, only they get it. Return to how many, by attempt."""
    table, counts = ProcessTable(queue), []
    for attempt in attempts:
        handling = [each for each in table.of(attempt) if handles(each.pid, signum)]
        contained = [each for each in handling if inner_pid(each.pid) is not None]
        counts.append(sum(send(each, signum) for each in contained or handling))
    return counts


class ProcessTable:
    """All processes at one moment, and the attempts of one queue that they belong to."""

    def __init__(self, queue: str, besides: int | None = None) -> None:
        """The process `besides`, as the daemon, never counts."""
        # Excluded processes are no parents here either: the daemon's children are the keeper and its jobs.
        excluded = (os.getpid(), besides)
        self._all = {each.pid: each for each in all_processes() if each.pid not in excluded and not each.is_dead}
        self._by_mark: dict[tuple[str, str], list[int]] = {}
        self._by_log: dict[str, list[int]] = {}
        self._by_session: dict[int, list[int]] = {}
        self._by_parent: dict[int, list[int]] = {}
        for pid, each in self._all.items():
            self._by_session.setdefault(each.session, []).append(pid)
            self._by_parent.setdefault(each.parent, []).append(pid)
            if (mark := _mark(pid, queue)) is not None:
                self._by_mark.setdefault(mark, []).append(pid)
            with contextlib.suppress(OSError, ValueError):
                # Open for appending only, as the keeper opens logs: readers, such as `tail -f`, open them otherwise.
                for name in os.listdir(f"/proc/{pid}/fd") if _IS_LINUX else ():
                    log = os.readlink(f"/proc/{pid}/fd/{name}")
                    if log.startswith(f"{queue}/logs/") and _is_for_appending(pid, name):
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
        ours = (self._all[pid] for pid in found if is_ours(pid) and not is_pause_process(pid))
        return sorted(ours, key=lambda each: (each.started, each.pid))


def _without_contained(found: list[TrackedProcess]) -> list[TrackedProcess]:
    """Leave out processes in containers if others exist: podman and docker pass signals on. Without others, the tool is
    gone: keep the first process of each container."""
    inner = {each.pid: inner_pid(each.pid) for each in found}
    outside = [each for each in found if inner[each.pid] is None]
    return outside or [each for each in found if inner[each.pid] == 1] or found


def main_process(attempt: Attempt, queue: str) -> int | None:
    """Return the pid of the program itself: the leader of the attempt's session."""
    keeper = attempt.keeper_pid
    try:
        with open(f"/proc/{keeper}/task/{keeper}/children", encoding="ascii") as file:
            pids = list(map(int, file.read().split()))
    except OSError:  # the system does not list them
        pids = all_pids()
    children = filter(None, map(read_process, pids))
    leaders = [each for each in children if each.session == each.pid and each.parent == keeper]
    # The keeper adopts processes that the program left behind, which are younger.
    leaders.sort(key=lambda each: (each.started, each.pid))
    mine = (str(attempt.job_id), str(attempt.number))
    return next((each.pid for each in leaders if _mark(each.pid, queue) == mine), None)


def jobs_of_queue(queue: str) -> dict[int, int]:
    """Return the job ids of this user's live processes that name the queue, with the pid of one process each."""
    found: dict[int, int] = {}
    for process in all_processes():
        variables = {} if process.is_dead else environment_with(QUEUE, process.pid)
        job_id = variables.get("GPUYARD_JOB_ID", "")
        is_job = variables.get(QUEUE) == queue and job_id.isascii() and job_id.isdecimal()
        if is_job and is_ours(process.pid):  # which takes longer
            found.setdefault(int(job_id), process.pid)
    return found


def _mark(pid: int, queue: str) -> tuple[str, str] | None:
    """Return the job and the attempt that the process's environment names; None if not of this queue."""
    variables = environment_with(QUEUE, pid)
    if variables.get(QUEUE) != queue:
        return None
    return variables.get("GPUYARD_JOB_ID", ""), variables.get("GPUYARD_ATTEMPT", "")


_log = logging.getLogger(__name__)
# Signals the processes of attempts of one queue; returns to how many, by attempt.
SignalEach = Callable[[Sequence[Attempt], str, int], list[int]]


class ProcessSignals:
    """Signals processes in a thread: reading the process table takes about 50 µs per process of the machine. One
    reading serves all requests that wait for it. For one thread; `wake` is called, by another one, when the numbers of
    some requests are known."""

    def __init__(self, queue: str, wake: Callable[[], None]) -> None:
        self._queue, self._wake = queue, wake
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, SignalEach], list[Attempt]] = {}
        self._counts: dict[tuple[str, int, SignalEach], int | None] = {}  # None: under way
        self._thread = ThreadPoolExecutor(1, "gpuyard-signals")

    def signal(self, attempts: Sequence[Attempt], signum: int, send: SignalEach = signal_each) -> list[int | None]:
        """Return to how many processes of each attempt the signal was sent; None while it is under way. The first call
        sends it, and the first call after that returns the number."""
        names = [(attempt.key, signum, send) for attempt in attempts]
        with self._lock:
            new = [each for each, name in zip(attempts, names, strict=True) if name not in self._counts]
            self._counts.update(((each.key, signum, send), None) for each in new)
        self._begin(new, signum, send)
        with self._lock:
            found = [self._counts.get(name) for name in names]
            for name in [name for name in names if self._counts.get(name) is not None]:
                self._counts.pop(name, None)
        return found

    def send(self, attempts: Sequence[Attempt], signum: int) -> None:
        """Send the signal soon, whether or not it is under way already."""
        self._begin(attempts, signum, signal_each)

    def forget(self, key: str) -> None:
        with self._lock:
            for name in [name for name in self._counts if name[0] == key]:
                del self._counts[name]

    def close(self) -> None:
        """Send what was requested, and wait for that."""
        self._thread.shutdown()

    def _begin(self, attempts: Sequence[Attempt], signum: int, send: SignalEach) -> None:
        if not attempts:
            return
        with self._lock:
            self._waiting.setdefault((signum, send), []).extend(attempts)
        try:
            self._thread.submit(self._work).add_done_callback(_log_bug)
        except RuntimeError:  # no more threads
            self._work()

    def _work(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for (signum, send_each), attempts in waiting.items():
            try:
                counts = send_each(attempts, self._queue, signum)
            except BaseException:
                with self._lock:  # the next call sends those that are not known again
                    self._counts = {name: count for name, count in self._counts.items() if count is not None}
                raise
            found = {(each.key, signum, send_each): count for each, count in zip(attempts, counts, strict=True)}
            with self._lock:
                known = {name: count for name, count in found.items() if name in self._counts}
                self._counts.update(known)
            if known:
                self._wake()


def _log_bug(work: "Future[None]") -> None:
    if (error := work.exception()) is not None:
        _log.error("the processes of jobs could not be signalled, which is tried again", exc_info=error)


class RamMeter:
    """Measures RAM and CPU time of each attempt of one queue, in one pass over all processes. For one thread."""

    def __init__(self, queue: str) -> None:
        self._mark = f"{QUEUE}={queue}".encode(errors="surrogateescape")
        self._attempts: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._found: dict[tuple[int, int], float] = {}
        self._cpu_s: dict[tuple[int, int], float] = {}
        self._measured_at = float("-inf")

    def measure(self, max_age_s: float = 2.0) -> dict[tuple[int, int], float]:
        """Return MB by job and attempt, at most `max_age_s` old; empty on systems other than Linux. Reading a thousand
        processes takes 10 ms. Shared memory counts for each process."""
        now = time.monotonic()
        if sys.platform != "linux" or now < self._measured_at + max_age_s:
            return self._found
        # Sessions tell processes apart: a job has a session of its own, and a process that leaves it still has the
        # job's variables in its environment, which is read once.
        seen: dict[tuple[int, int], tuple[int, int] | None] = {}
        self._measured_at, self._found, self._cpu_s = now, {}, {}
        for session, (started, pids, pages, ticks) in _sessions().items():
            name = (session, started)
            attempt = seen[name] = self._attempts[name] if name in self._attempts else self._find_attempt(pids)
            if attempt is not None:
                held_mb = pages * os.sysconf("SC_PAGE_SIZE") / 1048576
                self._found[attempt] = self._found.get(attempt, 0.0) + held_mb
                self._cpu_s[attempt] = self._cpu_s.get(attempt, 0.0) + ticks / TICKS_PER_S
        self._attempts = seen
        return self._found

    def cpu_s(self) -> dict[tuple[int, int], float]:
        """Return the CPU time as of the last `measure`, with that of children that they have waited for."""
        return self._cpu_s

    def _find_attempt(self, pids: list[int]) -> tuple[int, int] | None:
        variables = next(filter(None, map(raw_environment, pids)), b"").split(b"\0")
        if self._mark not in variables:
            return None
        values = dict(variable.partition(b"=")[::2] for variable in variables)
        job, attempt = values.get(b"GPUYARD_JOB_ID", b""), values.get(b"GPUYARD_ATTEMPT", b"")
        return (int(job), int(attempt)) if job.isdigit() and attempt.isdigit() else None


def _sessions() -> dict[int, tuple[int, list[int], int, int]]:
    """Return by session: when its oldest process started, its processes, how many pages they hold, and the clock ticks
    of CPU time that they have used, with those of children that have ended."""
    found: dict[int, tuple[int, list[int], int, int]] = {}
    for pid in sorted(all_pids()):
        if fields := stat_fields(pid):
            session, started, pages = int(fields[3]), int(fields[19]), int(fields[21])
            oldest, pids, held, ticks = found.get(session, (started, [], 0, 0))
            ticks += sum(map(int, fields[11:15]))
            found[session] = (min(oldest, started), [*pids, pid], held + pages, ticks)
    return found
