"""Follows how busy processes without a lease keep each device, from one look at the machine to the next."""

from collections.abc import Iterator, Mapping, Sequence

from gpuyard.core.lease import Lease, Share
from gpuyard.core.scheduling.foreign_load import (
    IDLE_PERCENT,
    NO_FOREIGN_LOAD,
    ForeignLoad,
    ForeignProcess,
    follow_foreign_load,
    may_have_foreign_processes,
    read_foreign_load,
)
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.leases.measured_usage import find_strangers


class ForeignLoads:
    def __init__(self) -> None:
        self._snapshot: Snapshot | None = None
        self._loads: dict[str, ForeignLoad] = {}
        self._leases: Sequence[Lease] = ()
        self._unknown: set[tuple[str, int]] = set()

    def follow(
        self, snapshot: Snapshot, leases: Sequence[Lease], now: float, bound: float | None
    ) -> Mapping[str, ForeignLoad]:
        """Return the foreign load of each device, with this look. `now` is of a clock that never goes back."""
        if snapshot is not self._snapshot:
            strangers = {device.id: self._strangers_on(device, leases) for device in snapshot.devices}
            self._loads = {
                device.id: self._followed(device, strangers[device.id], leases, now, bound)
                for device in snapshot.devices
            }
            self._unknown = {
                (device_id, stranger.process.pid)
                for device_id, found in strangers.items()
                for stranger in found
                if stranger.user is None
            }
            self._leases, self._snapshot = leases, snapshot
        return self._loads

    def _strangers_on(self, device: Device, leases: Sequence[Lease]) -> list[ForeignProcess]:
        """Return the strangers on a device that is not idle. To look for them on an idle one would be wasted."""
        before = self._loads.get(device.id, NO_FOREIGN_LOAD)
        is_idle = (device.utilization_percent or 0.0) <= IDLE_PERCENT and before.percent <= IDLE_PERCENT
        return [] if is_idle else list(find_strangers(device, leases))

    def _followed(
        self,
        device: Device,
        strangers: Sequence[ForeignProcess],
        leases: Sequence[Lease],
        now: float,
        bound: float | None,
    ) -> ForeignLoad:
        counted = [stranger for stranger in strangers if self._counts(device, stranger)]
        if not counted and not may_have_foreign_processes(device):
            return NO_FOREIGN_LOAD
        reading = read_foreign_load(device, counted, list(self._shares_on(device, leases)))
        return follow_foreign_load(self._loads.get(device.id, NO_FOREIGN_LOAD), reading, counted, now, bound)

    def _counts(self, device: Device, stranger: ForeignProcess) -> bool:
        """Return whether it is still there. The system may not know a process because it has just ended, or because it
        is in another container: then the look before listed it as well."""
        is_known = stranger.user is not None
        return is_known or self._snapshot is None or (device.id, stranger.process.pid) in self._unknown

    def _shares_on(self, device: Device, leases: Sequence[Lease]) -> Iterator[Share]:
        """Yield the shares of leases on the device, and of those that ended since the look before."""
        live = {lease.id for lease in leases}
        for lease in (*leases, *(each for each in self._leases if each.id not in live)):
            share = lease.on(device.id)
            if share is not None:
                yield share
