"""Measure the device memory that the processes of each lease use, as far as the driver reports it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuyard.core.lease import Lease
from gpuyard.core.printable_text import printable
from gpuyard.core.scheduling.foreign_load import ForeignProcess
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.system.process_identity import is_alive

if TYPE_CHECKING:
    import psutil

LEASE_VARIABLE = "GPUYARD_LEASE"
# Any user can start a process at the end of a long chain: following it must not take long.
_MAX_ANCESTORS = 64
Measured = dict[tuple[str, str], float | None]


def measure(snapshot: Snapshot, leases: Sequence[Lease]) -> Measured:
    """Return the memory by lease and device: 0 if the lease has not allocated anything, None if unknown.

    If the driver lists no processes, a lease that is alone on its device is charged the growth of the device's used
    memory since the lease was granted.
    """
    measured: Measured = {}
    for device in snapshot.devices:
        here = [lease for lease in leases if lease.on(device.id)]
        if here:
            measured.update(_measure_on(device, here))
    return measured


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
    """Yield the processes on the device that belong to no lease there, except zombies.

    A process that this system does not know is yielded without a user: it has ended since the device was read, or is in
    another container.
    """
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


def _measure_on(device: Device, leases: Sequence[Lease]) -> Measured:
    if device.hides_processes:
        return {(lease.id, device.id): _growth(device, leases) for lease in leases}
    finder = LeaseFinder(leases)
    sums: Measured = {(lease.id, device.id): 0.0 for lease in leases}
    for process in device.processes or ():
        for lease, memory in _divide(process.memory_mb, finder.find(process.pid), device.id, sums):
            known = sums[lease.id, device.id]
            sums[lease.id, device.id] = None if known is None or memory is None else known + memory
    return sums


def _growth(device: Device, leases: Sequence[Lease]) -> float | None:
    share = leases[0].on(device.id)
    if len(leases) > 1 or device.memory_used_mb is None or share is None or share.foreign_mb is None:
        return None
    return max(0.0, device.memory_used_mb - share.foreign_mb)


def _divide(
    memory_mb: float | None, leases: Sequence[Lease], device_id: str, sums: Measured
) -> Iterator[tuple[Lease, float | None]]:
    """Divide a process's memory among its leases on a device: each gets up to its reservation, the last the rest."""
    if memory_mb is None:
        yield from ((lease, None) for lease in leases)
        return
    for lease in leases:
        share, known = lease.on(device_id), sums[lease.id, device_id]
        reserved = share.memory_mb if share and share.memory_mb is not None else memory_mb
        part = memory_mb if lease is leases[-1] else min(memory_mb, max(0.0, reserved - (known or 0.0)))
        memory_mb -= part
        yield lease, part


class LeaseFinder:
    """Finds the leases of a process through its environment and its ancestors.

    Process and lease must belong to the same user: users cannot hide memory behind the lease of another. The program of
    a container, which is no descendant of the lease's holder, counts to the lease that its environment names.
    """

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._by_id = {lease.id: lease for lease in leases}
        self._by_pid: dict[int, list[Lease]] = {}
        for lease in leases:
            self._by_pid.setdefault(lease.holder.pid, []).append(lease)

    def find(self, pid: int) -> list[Lease]:
        """Return the leases of the process; several if one process holds several."""
        import psutil

        try:
            process = psutil.Process(pid)
            named = self._by_id.get(_environment(process).get(LEASE_VARIABLE, ""))
            if named is not None and named.holder.uid == process.uids().real:
                return [named]
            above: psutil.Process | None = process
            for _ in range(_MAX_ANCESTORS):
                if above is None:
                    break
                if own := [lease for lease in self._by_pid.get(above.pid, ()) if is_alive(lease.holder)]:
                    return own
                above = above.parent()
        except psutil.Error:
            pass  # it has ended meanwhile
        return []


def _environment(process: "psutil.Process") -> dict[str, str]:
    import psutil

    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
