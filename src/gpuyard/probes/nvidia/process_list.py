"""The processes of one card, each once: the driver lists a process as compute (C), as graphics (G), or as both."""

from collections.abc import Iterable

from gpuyard.core.snapshot import Process


def one_per_pid(listed: Iterable[Process]) -> tuple[Process, ...]:
    """Return each process once, in the order of the first entries.

    Every entry gives the whole memory of its process, so the larger figure counts, and never the sum.
    """
    found: dict[int, Process] = {}
    for entry in listed:
        known = found.get(entry.pid)
        found[entry.pid] = entry if known is None else _joined(known, entry)
    return tuple(found.values())


def _joined(one: Process, other: Process) -> Process:
    memory = max((mb for mb in (one.memory_mb, other.memory_mb) if mb is not None), default=None)
    return Process(pid=one.pid, memory_mb=memory, name=one.name or other.name)
