"""Finds the processes of an attempt, also those that left its process group, and signals them.

A process belongs to an attempt if any of these is true:
- its environment names the queue, the job and the attempt; every program that the job starts inherits this;
- it writes to the attempt's log;
- it is in a session that such a process leads;
- its parent belongs to the attempt.

The keeper, which has to report the end, this process, podman's pause process and other users' processes never belong to
it.

A process that left the session, lost its parent, cleared its environment and closed the log is not found.
"""

import os
import signal
from collections.abc import Sequence

from gpuyard.core.job.job import Attempt
from gpuyard.engines.common.handled_signals import handles, inner_pid
from gpuyard.engines.common.pause_process import is_pause_process
from gpuyard.engines.local.system_processes import (
    TrackedProcess,
    all_processes,
    children_of,
    environment_with,
    files_appended,
    is_ours,
    read_process,
    send,
)

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
