"""Measure the RAM that the processes of each lease hold: the holder and its descendants.

- Memory that a process has for itself, or shares with other programs as shared memory, counts; files that are mapped,
  such as libraries, do not: the kernel counts them as available.
- A lease that says itself what it uses (the queue's) is not measured. A holder that has ended, or whose processes this
  user may not see, is unknown.
- Pages that a process shares with its children since a fork are counted for each of them.
"""

import os
import sys
from collections.abc import Iterator, Sequence

from gpuyard.core.lease import Lease
from gpuyard.core.scheduling.host_capacity import HostUse
from gpuyard.core.units import MB
from gpuyard.system.process_identity import is_alive

_IS_LINUX = sys.platform == "linux"
_OWN_MEMORY = (b"RssAnon:", b"RssShmem:")
_KB_PER_MB = 1024.0
# Any user can start a great many processes: measuring one lease must not take long.
_MOST_PROCESSES = 4096


class HostMeter:
    """Processes as they were at the last `read`, so that a reading of the machine can follow that is not older."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] | None = None

    def read(self) -> None:
        """Read which process has which children."""
        self._children = _children() if _IS_LINUX else None

    def forget(self) -> None:
        """Read the processes again when they are next needed."""
        self._children = None

    def use_of(self, leases: Sequence[Lease]) -> dict[str, HostUse]:
        """Return the use by lease id, of leases that reserve RAM and do not say themselves what they use."""
        measured = [each for each in leases if each.host and each.host.ram_mb is not None and each.host.used_mb is None]
        if not measured:
            return {}
        if self._children is None and _IS_LINUX:
            self.read()
        by_holder: dict[int, list[Lease]] = {}
        for lease in measured:
            by_holder.setdefault(lease.holder.pid, []).append(lease)
        return {lease_id: use for own in by_holder.values() for lease_id, use in self._divide(own)}

    def held_by(self, leases: Sequence[Lease]) -> dict[str, float]:
        """Return the RAM that each lease says it uses, or that its holder's processes hold; of several leases of one
        holder, all of it for each. What cannot be measured is left out."""
        if self._children is None and _IS_LINUX:
            self.read()
        told = {each.id: each.host.used_mb for each in leases if each.host is not None}
        found = {
            each.id: told.get(each.id) if told.get(each.id) is not None else self._held_mb(each) for each in leases
        }
        return {lease_id: held_mb for lease_id, held_mb in found.items() if held_mb is not None}

    def tree_mb(self, pid: int) -> tuple[float | None, float | None]:
        """Return the RAM of a process with its descendants, and of the process alone; None where it is unknown."""
        if not _IS_LINUX:
            return None, None
        self.read()
        return self._tree_mb(pid), _own_mb(pid)

    def _held_mb(self, lease: Lease) -> float | None:
        return self._tree_mb(lease.holder.pid) if is_alive(lease.holder) else None

    def _divide(self, leases: Sequence[Lease]) -> Iterator[tuple[str, HostUse]]:
        """Divide what a holder's processes use among its leases: each gets up to its reservation, the last the rest."""
        left_mb = self._held_mb(leases[0])
        for lease in leases:
            if left_mb is None:
                yield lease.id, HostUse()
                continue
            reserved_mb = (lease.host and lease.host.ram_mb) or 0.0
            part_mb = left_mb if lease is leases[-1] else min(left_mb, reserved_mb)
            left_mb -= part_mb
            yield lease.id, HostUse(ram_mb=part_mb)

    def _tree_mb(self, pid: int) -> float | None:
        """Return the memory of a process and its descendants; None if the process itself cannot be read."""
        if self._children is None:
            return _psutil_tree_mb(pid)
        own_mb = _own_mb(pid)
        if own_mb is None:
            return None
        found, waiting, total_mb = {pid}, list(self._children.get(pid, ())), own_mb
        while waiting and len(found) < _MOST_PROCESSES:
            child = waiting.pop()
            if child not in found:
                found.add(child)
                total_mb += _own_mb(child) or 0.0
                waiting += self._children.get(child, ())
        return total_mb


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            content = _read(f"/proc/{name}/stat")
            fields = content[content.rfind(b")") + 2 :].split(None, 2)  # the name may contain anything
            if len(fields) > 1:
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _own_mb(pid: int) -> float | None:
    lines = [line for line in _read(f"/proc/{pid}/status").splitlines() if line.startswith(_OWN_MEMORY)]
    return sum(int(line.split()[1]) for line in lines) / _KB_PER_MB if lines else None


def _read(path: str) -> bytes:
    """Return nothing if the process has ended, or if this user may not see it."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _psutil_tree_mb(pid: int) -> float | None:
    import psutil

    try:
        root = psutil.Process(pid)
        return sum(_rss_mb(each) for each in (root, *root.children(recursive=True)))
    except psutil.Error:
        return None


def _rss_mb(process: "object") -> float:
    import psutil

    try:
        return float(process.memory_info().rss) / MB  # type: ignore[attr-defined]
    except psutil.Error:
        return 0.0
