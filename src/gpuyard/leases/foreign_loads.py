"""Follows how busy processes without a lease keep each device, from one look at the machine to the next."""

from collections.abc import Iterator, Mapping, Sequence

from gpuyard.core.foreign_load import (
    IDLE_PERCENT,
    NO_FOREIGN_LOAD,
    ForeignLoad,
    follow_foreign_load,
    may_have_strangers,
    read_foreign_load,
)
from gpuyard.core.model import Device, Lease, Share, Snapshot
from gpuyard.leases.measure import find_strangers


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
            self._snapshot = snapshot
            before, unknown = self._unknown, set[tuple[str, int]]()
            self._loads = {
                device.id: self._of(device, leases, now, bound, before, unknown) for device in snapshot.devices
            }
            self._leases, self._unknown = leases, unknown
        return self._loads

    def _of(  # noqa: PLR0913, PLR0917 - one device of one look
        self,
        device: Device,
        leases: Sequence[Lease],
        now: float,
        bound: float | None,
        before: set[tuple[str, int]],
        unknown: set[tuple[str, int]],
    ) -> ForeignLoad:
        known = self._loads.get(device.id, NO_FOREIGN_LOAD)
        if (device.utilization_percent or 0.0) <= IDLE_PERCENT >= known.percent:
            return NO_FOREIGN_LOAD
        strangers = list(find_strangers(device, leases))
        unknown.update((device.id, each.process.pid) for each in strangers if each.user is None)
        # A process that the system does not know counts once two looks have listed it: it has not just ended.
        strangers = [each for each in strangers if each.user is not None or (device.id, each.process.pid) in before]
        if not strangers and not may_have_strangers(device):
            return NO_FOREIGN_LOAD
        reading = read_foreign_load(device, strangers, list(self._shares_on(device, leases)))
        return follow_foreign_load(known, reading, strangers, now, bound)

    def _shares_on(self, device: Device, leases: Sequence[Lease]) -> Iterator[Share]:
        """Yield the shares of leases on the device, and of those that ended since the look before."""
        live = {lease.id for lease in leases}
        for lease in (*leases, *(each for each in self._leases if each.id not in live)):
            share = lease.on(device.id)
            if share is not None:
                yield share
