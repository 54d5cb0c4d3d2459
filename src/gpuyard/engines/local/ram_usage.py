"""How much RAM the processes of each attempt hold, from one look at the system's table of processes.

Processes are told apart by their sessions: a job has one of its own, and whatever leaves it still bears the job's marks
in its environment. A session's environment is read once. What is shared between processes counts for each of them.
"""

import os
import sys
import time

from gpuyard.engines.local.process_tree import QUEUE

_MB_PER_PAGE = os.sysconf("SC_PAGE_SIZE") / 1048576
# To read of a thousand processes takes ten milliseconds.
_EVERY_S = 2.0
Key = tuple[int, int]


class RamMeter:
    """For one queue, and one thread at a time."""

    def __init__(self, queue: str) -> None:
        self._mark = f"{QUEUE}={queue}".encode(errors="surrogateescape")
        self._whose: dict[tuple[int, int], Key | None] = {}
        self._found: dict[Key, float] = {}
        self._measured_at = float("-inf")

    def measure(self) -> dict[Key, float]:
        """By job and attempt, in MB, as of two seconds ago or later; nothing where the system cannot tell."""
        now = time.monotonic()
        if sys.platform == "linux" and now >= self._measured_at + _EVERY_S:
            self._measured_at, self._found = now, self._measure()
        return self._found

    def _measure(self) -> dict[Key, float]:
        sessions = _sessions()
        seen: dict[tuple[int, int], Key | None] = {}
        found: dict[Key, float] = {}
        for session, (started, pids, pages) in sessions.items():
            name = (session, started)
            whose = self._whose[name] if name in self._whose else self._ask(pids)
            seen[name] = whose
            if whose is not None:
                found[whose] = found.get(whose, 0.0) + pages * _MB_PER_PAGE
        self._whose = seen
        return found

    def _ask(self, pids: list[int]) -> Key | None:
        for pid in pids:
            words = _environment(pid)
            if words is not None:
                return self._attempt_in(words)
        return None

    def _attempt_in(self, words: list[bytes]) -> Key | None:
        if self._mark not in words:
            return None
        values = dict(word.partition(b"=")[::2] for word in words)
        job, attempt = values.get(b"GPUYARD_JOB_ID", b""), values.get(b"GPUYARD_ATTEMPT", b"")
        return (int(job), int(attempt)) if job.isdigit() and attempt.isdigit() else None


def _sessions() -> dict[int, tuple[int, list[int], int]]:
    """By session: when its eldest started, its processes from the eldest on, and how many pages they hold."""
    found: dict[int, tuple[int, list[int], int]] = {}
    for name in sorted(filter(str.isdecimal, os.listdir("/proc")), key=int):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                content = file.read()
        except OSError:  # gone since
            continue
        fields = content[content.rindex(b")") + 2 :].split()
        session, started, pages = int(fields[3]), int(fields[19]), int(fields[21])
        eldest, pids, held = found.get(session, (started, [], 0))
        found[session] = (min(eldest, started), [*pids, int(name)], held + pages)
    return found


def _environment(pid: int) -> list[bytes] | None:
    """`None` where it cannot be read, as another user's, or is not there yet, as of one that is about to start."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0") or None
    except OSError:
        return None
