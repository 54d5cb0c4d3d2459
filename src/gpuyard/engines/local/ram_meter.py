"""Measures RAM and CPU time of the attempts of a queue."""

import os
import sys
import time

from gpuyard.engines.local.process_tree import QUEUE
from gpuyard.engines.local.system_processes import TICKS_PER_S, all_pids, raw_environment, stat_fields

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
