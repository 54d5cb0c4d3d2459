"""Finds the processes of an attempt, also those that left its process group, and signals them.

A process belongs to an attempt if any of these is true:
- its environment names the queue, the job and the attempt; every program that the job starts inherits this;
- it writes to the attempt's log;
- it is in a session that such a process leads;
- its parent belongs to the attempt.

The keeper, which has to report the end, this process, podman's pause process and other users' processes never belong to
it.

A process that left the session, lost its parent, cleared its environment and closed the log is not found.

ProcessSignals: finds and signals the processes of attempts in a thread.

Reading the process table takes about 50 µs per process of the machine: with thousands of them, the daemon's loop would
be held for 0.1 s and more. One reading serves all requests that wait for it.

Measures RAM and CPU time of the attempts of a queue.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from msgspec import Struct

from gpuyard.engines.common.handled_signals import handles, inner_pid, is_pause_process
from gpuyard.engines.local.system_processes import (
    TICKS_PER_S,
    TrackedProcess,
    all_pids,
    all_processes,
    children_of,
    environment_with,
    files_appended,
    is_ours,
    raw_environment,
    read_process,
    send,
    stat_fields,
)
from gpuyard.model.job import Attempt

QUEUE = "GPUYARD_QUEUE"
# A forked child may appear in the next round only. Stopping a program that outruns this many rounds takes a cgroup.
_MOST_ROUNDS = 50
# A process cannot react to these by starting another, so a new process was forked before and gets the signal too.
_UNCATCHABLE = frozenset({signal.SIGKILL, signal.SIGSTOP})
# These reach the processes in containers one by one. Others go to the first process, as `docker stop` sends them.
_FOR_ALL = _UNCATCHABLE | {signal.SIGCONT}


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
            for log in files_appended(pid, f"{queue}/logs/"):
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
    children = filter(None, map(read_process, children_of(attempt.keeper_pid)))
    leaders = [each for each in children if each.session == each.pid and each.parent == attempt.keeper_pid]
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


class _Request(Struct, frozen=True):
    attempt: Attempt
    signum: int
    send: SignalEach

    @property
    def name(self) -> tuple[str, int, SignalEach]:
        return self.attempt.key, self.signum, self.send


class ProcessSignals:
    """For one thread. `wake` is called, by another thread, when the numbers of some requests are known."""

    def __init__(self, queue: str, wake: Callable[[], None]) -> None:
        self._queue = queue
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: list[_Request] = []
        self._counts: dict[tuple[str, int, SignalEach], int | None] = {}  # None: under way
        self._thread = ThreadPoolExecutor(1, "gpuyard-signals")
        self._is_closed = False

    def signal(self, attempts: Sequence[Attempt], signum: int, send: SignalEach = signal_each) -> list[int | None]:
        """Return to how many processes of each attempt the signal was sent; None while it is under way. The first call
        sends it, and the first call after that returns the number."""
        requests = [_Request(attempt, signum, send) for attempt in attempts]
        with self._lock:
            new = [each for each in requests if each.name not in self._counts]
            self._counts.update(dict.fromkeys((each.name for each in new), None))
        self._begin(new)
        with self._lock:
            found = [self._counts.get(each.name) for each in requests]
            for each in requests:
                if self._counts.get(each.name) is not None:
                    del self._counts[each.name]
        return found

    def send(self, attempts: Sequence[Attempt], signum: int) -> None:
        """Send the signal soon, whether or not it is under way already."""
        self._begin([_Request(attempt, signum, signal_each) for attempt in attempts])

    def forget(self, key: str) -> None:
        """Drop the numbers of an attempt that is over."""
        with self._lock:
            for name in [name for name in self._counts if name[0] == key]:
                del self._counts[name]

    def close(self) -> None:
        """Send what was requested, and wait for that."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown()

    def _begin(self, requests: Sequence[_Request]) -> None:
        if not requests:
            return
        with self._lock:
            self._waiting += requests
        try:
            self._thread.submit(self._work).add_done_callback(_log_bug)
        except RuntimeError:  # no more threads
            self._work()

    def _work(self) -> None:
        """Send the signals of all requests that wait; those of one kind together."""
        with self._lock:
            requests, self._waiting = self._waiting, []
        kinds: dict[tuple[int, SignalEach], list[_Request]] = {}
        for each in requests:
            kinds.setdefault((each.signum, each.send), []).append(each)
        for (signum, send_each), alike in kinds.items():
            try:
                counts = send_each([each.attempt for each in alike], self._queue, signum)
            except BaseException:
                self._forget_all(requests)
                raise
            self._note(alike, counts)

    def _forget_all(self, requests: Sequence[_Request]) -> None:
        """Drop requests that failed: the next call sends them again."""
        with self._lock:
            for each in requests:
                if self._counts.get(each.name) is None:
                    self._counts.pop(each.name, None)

    def _note(self, requests: Sequence[_Request], counts: Sequence[int]) -> None:
        with self._lock:
            known = {
                each.name: count for each, count in zip(requests, counts, strict=True) if each.name in self._counts
            }
            self._counts.update(known)
            if known and not self._is_closed:
                self._wake()


def _log_bug(work: "Future[None]") -> None:
    if (error := work.exception()) is not None:
        _log.error("the processes of jobs could not be signalled, which is tried again", exc_info=error)


_MB_PER_PAGE = os.sysconf("SC_PAGE_SIZE") / 1048576
# Reading a thousand processes takes 10 ms.
_MEASURE_EVERY_S = 2.0


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
        if sys.platform == "linux" and now >= self._measured_at + max_age_s:
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
                cpu_s[attempt] = cpu_s.get(attempt, 0.0) + ticks / TICKS_PER_S
        self._attempts, self._cpu_s = seen, cpu_s
        return found

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
