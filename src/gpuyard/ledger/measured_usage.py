"""What the processes of each lease use, its holder and the descendants: device memory and load as far as the driver
reports them, and RAM; and the load that processes outside gpuyard put on each device.

RAM that a process has for itself or as shared memory counts; mapped files, such as libraries, do not. A lease that says
itself what it uses (the queue's) is not measured. A holder that has ended, or is another user's, is unknown."""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.model.lease import Lease
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.model.printable_text import printable
from gpuyard.model.units import MB
from gpuyard.policy.foreign_load import (
    NO_FOREIGN_LOAD,
    ForeignLoad,
    ForeignProcess,
    follow_foreign_load,
    may_have_unlisted_processes,
    read_foreign_load,
)
from gpuyard.policy.host_room import HostUse
from gpuyard.policy.numbers import IDLE_PERCENT
from gpuyard.system.processes import is_alive

LEASE_VARIABLE = "GPUYARD_LEASE"
Measured = dict[tuple[str, str], float | None]
_IS_LINUX = sys.platform == "linux"


class HostMeter:
    """Processes as they were at the last `read`, so that a reading of the machine can follow that is not older."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] | None = None

    def read(self) -> None:
        if not _IS_LINUX:
            return
        self._children = {}
        for name in filter(str.isdecimal, os.listdir("/proc")):
            content = _read(f"/proc/{name}/stat")
            fields = content[content.rfind(b")") + 2 :].split(None, 2)  # the name may contain anything
            if len(fields) > 1:
                self._children.setdefault(int(fields[1]), []).append(int(name))

    def forget(self) -> None:
        """Read the processes again when they are next needed."""
        self._children = None

    def use_of(self, leases: Sequence[Lease]) -> dict[str, HostUse]:
        """Return the use by lease id, of leases that reserve RAM and do not say themselves what they use."""
        measured = [each for each in leases if each.host and each.host.ram_mb is not None and each.host.used_mb is None]
        if measured and self._children is None:
            self.read()
        found = {}
        for own in _by_holder(measured).values():
            parts = _divide(self._held_mb(own[0]), [(each.host and each.host.ram_mb) or 0.0 for each in own])
            found.update({lease.id: HostUse(ram_mb=part) for lease, part in zip(own, parts, strict=True)})
        return found

    def held_by(self, leases: Sequence[Lease]) -> dict[str, float]:
        """Return the RAM that each lease says it uses, or that its holder's processes hold, as far as it is known."""
        if self._children is None:
            self.read()
        told = {each.id: None if each.host is None else each.host.used_mb for each in leases}
        found = {each.id: self._held_mb(each) if told[each.id] is None else told[each.id] for each in leases}
        return {lease_id: held_mb for lease_id, held_mb in found.items() if held_mb is not None}

    def tree_mb(self, pid: int) -> tuple[float | None, float | None]:
        """Return the RAM of a process with its descendants, and of the process alone; None where it is unknown."""
        if not _IS_LINUX:
            return None, None
        self.read()
        return self._tree_mb(pid), _own_mb(pid)

    def _held_mb(self, lease: Lease) -> float | None:
        return self._tree_mb(lease.holder.pid) if is_alive(lease.holder) else None

    def _tree_mb(self, pid: int) -> float | None:
        """Return the memory of a process and its descendants; None if the process itself cannot be read."""
        if self._children is None:
            return _psutil_tree_mb(pid)
        found, waiting, total_mb = {pid}, list(self._children.get(pid, ())), _own_mb(pid)
        while waiting and total_mb is not None and len(found) < 4096:  # any user can start a great many processes
            child = waiting.pop()
            if child not in found:
                found.add(child)
                total_mb += _own_mb(child) or 0.0
                waiting += self._children.get(child, ())
        return total_mb


def _own_mb(pid: int) -> float | None:
    lines = [line for line in _read(f"/proc/{pid}/status").splitlines() if line.startswith((b"RssAnon:", b"RssShmem:"))]
    return sum(int(line.split()[1]) for line in lines) / 1024.0 if lines else None


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
        processes = (root, *root.children(recursive=True))
    except psutil.Error:
        return None
    total_mb = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total_mb += process.memory_info().rss / MB
    return total_mb


def measure(snapshot: Snapshot, leases: Sequence[Lease]) -> Measured:
    """Return the memory by lease and device: 0 if the lease has not allocated anything, None if unknown. If the driver
    lists no processes, a lease that is alone on its device is charged the growth of the device's used memory since the
    lease was granted."""
    measured: Measured = {}
    for device in snapshot.devices:
        here = [lease for lease in leases if lease.on(device.id)]
        if here and device.hides_processes:
            measured |= {(lease.id, device.id): _growth(device, here) for lease in here}
        elif here:
            finder = LeaseFinder(here)
            shares = ((each.id, each.on(device.id)) for each in here)
            most_mb = {
                lease_id: math.inf if share is None or share.memory_mb is None else share.memory_mb
                for lease_id, share in shares
            }
            sums: dict[str, float | None] = {each.id: 0.0 for each in here}
            for process in device.processes or ():
                own = [each.id for each in finder.find(process.pid)]
                left_mb = [most_mb[each] - (sums[each] or 0.0) for each in own]
                for lease_id, part in zip(own, _divide(process.memory_mb, left_mb), strict=True):
                    known = sums[lease_id]
                    sums[lease_id] = None if known is None or part is None else known + part
            measured |= {(lease_id, device.id): sum_mb for lease_id, sum_mb in sums.items()}
    return measured


def _divide(total_mb: float | None, reserved_mb: Sequence[float]) -> Iterator[float | None]:
    """Divide what processes use among leases of one holder: each gets up to its reservation, and the last the rest."""
    for position, reserved in enumerate(reserved_mb):
        if total_mb is None:
            yield None
            continue
        part_mb = total_mb if position == len(reserved_mb) - 1 else min(total_mb, max(0.0, reserved))
        total_mb -= part_mb
        yield part_mb


def measure_loads(snapshot: Snapshot, leases: Sequence[Lease]) -> Measured:
    """Return by lease and device how busy its processes keep the device, in percent; only where the driver says so."""
    loads: Measured = {}
    for device in snapshot.devices:
        here = [lease for lease in leases if lease.on(device.id)]
        busy = [each for each in device.processes or () if each.utilization_percent is not None]
        if not here or not busy:
            continue
        finder = LeaseFinder(here)
        loads.update({(lease.id, device.id): 0.0 for lease in here})
        for process in busy:
            for lease in finder.find(process.pid)[:1]:
                key = lease.id, device.id
                loads[key] = (loads[key] or 0.0) + (process.utilization_percent or 0.0)
    return loads


def find_foreign_processes(device: Device, leases: Sequence[Lease]) -> Iterator[ForeignProcess]:
    """Yield the processes on the device that belong to no lease there, except zombies; without a user, if this system
    does not know the process: it has ended since the device was read, or is in another container."""
    import psutil

    finder = LeaseFinder([lease for lease in leases if lease.on(device.id)])
    for process in device.processes or ():
        if finder.find(process.pid):
            continue
        try:
            seen = psutil.Process(process.pid)
            if seen.status() != psutil.STATUS_ZOMBIE:
                name, user = process.name or printable(seen.name()), printable(seen.username())
                yield ForeignProcess(process=replace(process, name=name), user=user)
        except psutil.Error:
            yield ForeignProcess(process=process)


def _growth(device: Device, leases: Sequence[Lease]) -> float | None:
    share = leases[0].on(device.id)
    if len(leases) > 1 or device.memory_used_mb is None or share is None or share.foreign_mb is None:
        return None
    return max(0.0, device.memory_used_mb - share.foreign_mb)


class LeaseFinder:
    """Finds the leases of a process through its environment and its ancestors. Process and lease must belong to the
    same user: users cannot hide memory behind the lease of another. The program of a container, which is no descendant
    of the lease's holder, counts to the lease that its environment names."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._by_id = {lease.id: lease for lease in leases}
        self._by_pid = _by_holder(leases)

    def find(self, pid: int) -> list[Lease]:
        """Return the leases of the process; several if one process holds several."""
        import psutil

        try:
            process = psutil.Process(pid)
            with contextlib.suppress(psutil.AccessDenied, psutil.ZombieProcess, OSError):
                named = self._by_id.get(process.environ().get(LEASE_VARIABLE, ""))
                if named is not None and named.holder.uid == process.uids().real:
                    return [named]
            above: psutil.Process | None = process
            for _ in range(64):  # any user can start a process at the end of a long chain
                if above is None:
                    break
                if own := [lease for lease in self._by_pid.get(above.pid, ()) if is_alive(lease.holder)]:
                    return own
                above = above.parent()
        except psutil.Error:
            pass  # it has ended meanwhile
        return []


def _by_holder(leases: Sequence[Lease]) -> dict[int, list[Lease]]:
    found: dict[int, list[Lease]] = {}
    for lease in leases:
        found.setdefault(lease.holder.pid, []).append(lease)
    return found


class ForeignLoadTracker:
    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._loads: dict[str, ForeignLoad] = {}
        self._leases: Sequence[Lease] = ()
        self._unknown: set[tuple[str, int]] = set()

    def update(
        self, snapshot: Snapshot, leases: Sequence[Lease], now: float, bound: float | None
    ) -> Mapping[str, ForeignLoad]:
        """Return the foreign load of each device after this snapshot. `now` is monotonic time."""
        if snapshot is self._snapshot:
            return self._loads
        live = {lease.id for lease in leases}
        # Also leases that ended since the previous snapshot.
        counted_leases = (*leases, *(each for each in self._leases if each.id not in live))
        loads: dict[str, ForeignLoad] = {}
        unknown: set[tuple[str, int]] = set()
        for device in snapshot.devices:
            before = self._loads.get(device.id, NO_FOREIGN_LOAD)
            is_idle = (device.utilization_percent or 0.0) <= IDLE_PERCENT and before.percent <= IDLE_PERCENT
            # Not on an idle device: the search costs time.
            found = [] if is_idle else list(find_foreign_processes(device, leases))
            unknown |= {(device.id, each.process.pid) for each in found if each.user is None}
            # An unknown process is in another container, and then was in the previous snapshot as well, or has ended.
            ended = set() if self._snapshot is None else unknown - self._unknown
            counted = [each for each in found if (device.id, each.process.pid) not in ended]
            loads[device.id] = NO_FOREIGN_LOAD
            if counted or may_have_unlisted_processes(device):
                shares = [share for lease in counted_leases if (share := lease.on(device.id)) is not None]
                reading = read_foreign_load(device, counted, shares)
                loads[device.id] = follow_foreign_load(before, reading, counted, now, bound)
        self._loads, self._unknown, self._leases, self._snapshot = loads, unknown, leases, snapshot
        return loads
