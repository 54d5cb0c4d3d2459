"""Track the load that processes outside gpuyard put on each device, over successive snapshots."""

from collections.abc import Iterator, Mapping, Sequence

from gpuyard.core.lease import Lease, Share
from gpuyard.core.scheduling.foreign_load import (
    NO_FOREIGN_LOAD,
    ForeignLoad,
    ForeignProcess,
    follow_foreign_load,
    may_have_unlisted_processes,
    read_foreign_load,
)
from gpuyard.core.scheduling.numbers import IDLE_PERCENT
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.leases.measured_usage import find_foreign_processes


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
        if snapshot is not self._snapshot:
            loads: dict[str, ForeignLoad] = {}
            unknown: set[tuple[str, int]] = set()
            for device in snapshot.devices:
                processes = self._processes_on(device, leases)
                loads[device.id] = self._updated(device, processes, leases, now, bound)
                unknown |= {(device.id, each.process.pid) for each in processes if each.user is None}
            self._loads, self._unknown, self._leases, self._snapshot = loads, unknown, leases, snapshot
        return self._loads

    def _processes_on(self, device: Device, leases: Sequence[Lease]) -> list[ForeignProcess]:
        """Return the foreign processes on a device, or none if it is idle: the search costs time."""
        before = self._loads.get(device.id, NO_FOREIGN_LOAD)
        is_idle = (device.utilization_percent or 0.0) <= IDLE_PERCENT and before.percent <= IDLE_PERCENT
        return [] if is_idle else list(find_foreign_processes(device, leases))

    def _updated(
        self,
        device: Device,
        processes: Sequence[ForeignProcess],
        leases: Sequence[Lease],
        now: float,
        bound: float | None,
    ) -> ForeignLoad:
        counted = [process for process in processes if self._counts(device, process)]
        if not counted and not may_have_unlisted_processes(device):
            return NO_FOREIGN_LOAD
        reading = read_foreign_load(device, counted, list(self._shares_on(device, leases)))
        return follow_foreign_load(self._loads.get(device.id, NO_FOREIGN_LOAD), reading, counted, now, bound)

    def _counts(self, device: Device, foreign: ForeignProcess) -> bool:
        """Return whether the process still runs.

        This system does not know a process that has just ended, or one in another container. The latter was in the
        previous snapshot as well.
        """
        is_known = foreign.user is not None
        return is_known or self._snapshot is None or (device.id, foreign.process.pid) in self._unknown

    def _shares_on(self, device: Device, leases: Sequence[Lease]) -> Iterator[Share]:
        """Yield the shares on the device of live leases and of leases that ended since the previous snapshot."""
        live = {lease.id for lease in leases}
        for lease in (*leases, *(each for each in self._leases if each.id not in live)):
            share = lease.on(device.id)
            if share is not None:
                yield share
