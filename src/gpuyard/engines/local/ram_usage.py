"""Measures how much RAM the processes of each attempt hold, in one pass over the system's process table.

Sessions tell processes apart: a job has a session of its own, and a process that leaves it still has the job's
variables in its environment. A session's environment is read once. Shared memory counts for each process.
"""

import os
import sys
import time

from gpuyard.engines.local.process_tree import QUEUE

_MB_PER_PAGE = os.sysconf("SC_PAGE_SIZE") / 1048576
# Reading a thousand processes takes 10 ms.
_EVERY_S = 2.0
# Job and attempt.
Key = tuple[int, int]


class RamMeter:
    """For one queue, and one thread at a time."""

    def __init__(self, queue: str) -> None:
        self._mark = f"{QUEUE}={queue}".encode(errors="surrogateescape")
        self._attempts: dict[tuple[int, int], Key | None] = {}
        self._found: dict[Key, float] = {}
        self._measured_at = float("-inf")

    def measure(self) -> dict[Key, float]:
        """Return MB by job and attempt, at most 2 s old; empty on systems other than Linux."""
        now = time.monotonic()
        if sys.platform == "linux" and now >= self._measured_at + _EVERY_S:
            self._measured_at, self._found = now, self._measure()
        return self._found

    def _measure(self) -> dict[Key, float]:
        seen: dict[tuple[int, int], Key | None] = {}
        found: dict[Key, float] = {}
        for session, (started, pids, pages) in _sessions().items():
            name = (session, started)
            attempt = self._attempts[name] if name in self._attempts else self._find_attempt(pids)
            seen[name] = attempt
            if attempt is not None:
                found[attempt] = found.get(attempt, 0.0) + pages * _MB_PER_PAGE
        self._attempts = seen
        return found

    def _find_attempt(self, pids: list[int]) -> Key | None:
        variables = next(filter(None, map(_environment, pids)), None)
        if variables is None or self._mark not in variables:
            return None
        values = dict(variable.partition(b"=")[::2] for variable in variables)
        job, attempt = values.get(b"GPUYARD_JOB_ID", b""), values.get(b"GPUYARD_ATTEMPT", b"")
        return (int(job), int(attempt)) if job.isdigit() and attempt.isdigit() else None


def _sessions() -> dict[int, tuple[int, list[int], int]]:
    """Return by session: when its oldest process started, its processes, and how many pages they hold."""
    found: dict[int, tuple[int, list[int], int]] = {}
    for name in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                content = file.read()
        except OSError:  # it has ended in the meantime
            continue
        fields = content[content.rindex(b")") + 2 :].split()
        session, started, pages = int(fields[3]), int(fields[19]), int(fields[21])
        oldest, pids, held = found.get(session, (started, [], 0))
        found[session] = (min(oldest, started), [*pids, int(name)], held + pages)
    return found


def _environment(pid: int) -> list[bytes] | None:
    """Return None if it cannot be read, as another user's, or does not exist yet, as of a process that is starting."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0") or None
    except OSError:
        return None
