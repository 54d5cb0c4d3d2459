"""Processes on a device: each listed once, and their users and commands as far as this user may see them."""

import os
from collections.abc import Callable, Iterable

from msgspec import Struct

from gpuyard.core.printable_text import printable
from gpuyard.core.snapshot import Process


class ProcessInfo(Struct, frozen=True, kw_only=True):
    user: str | None = None
    command: str | None = None


def one_per_pid(
    listed: Iterable[Process], joined_mb: Callable[[float | None, float | None], float | None]
) -> tuple[Process, ...]:
    """Return each process once, in the order of the first entries; `joined_mb` combines the memory of two entries."""
    found: dict[int, Process] = {}
    for entry in listed:
        known = found.setdefault(entry.pid, entry)
        if known is not entry:
            memory_mb = joined_mb(known.memory_mb, entry.memory_mb)
            found[entry.pid] = Process(pid=entry.pid, memory_mb=memory_mb, name=known.name or entry.name)
    return tuple(found.values())


def larger_mb(one_mb: float | None, other_mb: float | None) -> float | None:
    """Return the memory of a process that is listed twice, as compute (C) and graphics (G), each with all of it."""
    return max((mb for mb in (one_mb, other_mb) if mb is not None), default=None)


def describe_processes(pids: Iterable[int]) -> dict[int, ProcessInfo]:
    """Return an entry for each live pid. A driver may report pids of another container, which do not exist here."""
    import psutil

    found = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                command = _command(process.cmdline(), process.name())
                found[pid] = ProcessInfo(user=printable(process.username()), command=command)
        except (psutil.Error, OSError, KeyError):
            continue
    return found


def _command(argv: list[str], name: str) -> str:
    """Return the command on one line, without the program's directory, made printable."""
    return printable(" ".join([os.path.basename(argv[0]), *argv[1:]]) if argv and argv[0] else name)
