"""What each lease's processes hold on each device, as far as the driver tells."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuyard.core.lease import Lease
from gpuyard.core.scheduling.foreign_load import ForeignProcess
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.system.process_identity import is_alive

if TYPE_CHECKING:
    import psutil

LEASE_VARIABLE = "GPUYARD_LEASE"
Measured = dict[tuple[str, str], float | None]


def measure(snapshot: Snapshot, leases: Sequence[Lease]) -> Measured:
    """Memory by lease and device: zero for a lease that has not allocated yet, None if unknown.

    Where the driver lists no processes, a lease that is the only one on its device holds what the device's use has
    grown by since the lease was granted.
    """
    measured: Measured = {}
    for device in snapshot.devices:
        here = [lease for lease in leases if lease.on(device.id)]
        if here:
            measured.update(_measure_on(device, here))
    return measured


def owners(leases: Sequence[Lease]) -> Callable[[int], Lease | None]:
    """Finds the lease that a process belongs to: the one it was started with, its own, or an ancestor's."""
    found = _Owners(leases)
    return lambda pid: next(iter(found.of(pid)), None)


def find_strangers(device: Device, leases: Sequence[Lease]) -> Iterator[ForeignProcess]:
    """Yield the processes on the device that belong to no lease there.

    One that the system does not know has ended since the device was read, or is in another container: it is yielded
    without a user. One that has ended and was not waited for yet is left out.
    """
    import psutil

    found = _Owners([lease for lease in leases if lease.on(device.id)])
    for process in device.processes or ():
        if found.of(process.pid):
            continue
        try:
            seen = psutil.Process(process.pid)
            if seen.status() != psutil.STATUS_ZOMBIE:
                yield ForeignProcess(process=replace(process, name=process.name or seen.name()), user=seen.username())
        except psutil.Error:
            yield ForeignProcess(process=process)


def _measure_on(device: Device, leases: Sequence[Lease]) -> Measured:
    if device.hides_processes:
        return {(lease.id, device.id): _growth(device, leases) for lease in leases}
    found = _Owners(leases)
    sums: Measured = {(lease.id, device.id): 0.0 for lease in leases}
    for process in device.processes or ():
        for lease, memory in _divide(process.memory_mb, found.of(process.pid), device.id, sums):
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
    """A process may hold several leases on a device: each is filled up to what it reserved, the last takes the rest."""
    if memory_mb is None:
        yield from ((lease, None) for lease in leases)
        return
    for lease in leases:
        share, known = lease.on(device_id), sums[lease.id, device_id]
        reserved = share.memory_mb if share and share.memory_mb is not None else memory_mb
        part = memory_mb if lease is leases[-1] else min(memory_mb, max(0.0, reserved - (known or 0.0)))
        memory_mb -= part
        yield lease, part


class _Owners:
    """Climbs from a process to one that holds a lease. Both have to be the same user's: a process that names another
    user's lease, and a lease that names another user's process, are not believed."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self._by_id = {lease.id: lease for lease in leases}
        self._by_pid: dict[int, list[Lease]] = {}
        for lease in leases:
            self._by_pid.setdefault(lease.holder.pid, []).append(lease)

    def of(self, pid: int) -> list[Lease]:
        """Several where one process holds several."""
        import psutil

        try:
            process = psutil.Process(pid)
            named = self._by_id.get(_environment(process).get(LEASE_VARIABLE, ""))
            if named is not None and named.holder.uid == process.uids().real:
                return [named]
            return self._held_above(process)
        except psutil.Error:
            return []

    def _held_above(self, process: "psutil.Process | None") -> list[Lease]:
        while process is not None:
            own = [lease for lease in self._by_pid.get(process.pid, ()) if is_alive(lease.holder)]
            if own:
                return own
            process = process.parent()
        return []


def _environment(process: "psutil.Process") -> dict[str, str]:
    import psutil

    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}
