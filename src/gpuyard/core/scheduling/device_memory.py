"""How much room a device has: reserve and measure.

Free memory on a device is its capacity, less what strangers hold, less for each lease the larger of what it reserved
and what it was measured to use. A lease that has not allocated yet is charged what it reserved; one that grew, what it
uses; a stranger, what it holds. Where the driver lists no processes, strangers hold what they held when the leases were
granted, and whatever is in use beyond that and beyond what the leases reserved.

How busy it is goes by the same rule: the larger of what its leases are known to keep it busy with together with the
processes that have no lease, and what was seen.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Holder, Share
from gpuyard.core.scheduling.foreign_load import IDLE_PERCENT, NO_FOREIGN_LOAD, ForeignLoad
from gpuyard.core.snapshot import Device

# One of which nothing is known may keep a whole device busy.
UNKNOWN_PERCENT = 100.0


class PromisedShare(Struct, frozen=True, kw_only=True):
    """A share that is taken, or kept for somebody who is ahead; `lease_id` where it was granted."""

    share: Share
    holder: Holder
    measured_mb: float | None = None
    is_kept: bool = False
    lease_id: str | None = None


class DeviceRoom:
    """A device and what is promised of it, with the sums of that; it never changes."""

    __slots__ = (
        "capacity_mb", "device", "expected_percent", "foreign", "free_mb", "is_alone", "is_loaded", "load_percent",
        "promises", "seen_percent", "takers",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        promises: Sequence[PromisedShare],
        seen_percent: float | None,
        foreign: ForeignLoad = NO_FOREIGN_LOAD,
    ) -> None:
        self.device = device
        self.seen_percent = seen_percent
        self.foreign = foreign
        self.capacity_mb = capacity(device)
        self.promises = promises
        self._add_up()

    @property
    def charged_mb(self) -> float | None:
        """What strangers hold and what is promised."""
        return None if self.capacity_mb is None or self.free_mb is None else self.capacity_mb - self.free_mb

    def with_promise(self, promise: PromisedShare) -> "DeviceRoom":
        return DeviceRoom(self.device, [*self.promises, promise], self.seen_percent, self.foreign)

    def without(self, lease_ids: frozenset[str] | None = None) -> "DeviceRoom":
        """As it will be when these leases, or all, have ended: how busy they keep it says nothing about then."""
        left = [each for each in self.promises if lease_ids is not None and each.lease_id not in lease_ids]
        if len(left) == len(self.promises):
            return self
        foreign = self.foreign_mb
        used = foreign + min(self._ours(left), (self.device.memory_used_mb or 0.0) - foreign)
        device = replace(
            self.device,
            memory_used_mb=used,
            memory_free_mb=None if self.capacity_mb is None else self.capacity_mb - used,
            utilization_percent=None,
            power_draw_w=None,
        )
        return DeviceRoom(device, left, None, self.foreign)

    def _add_up(self) -> None:
        promises = self.promises
        self.is_alone = False
        self.takers = 0
        known = expected = 0.0
        for each in promises:
            share = each.share
            self.is_alone = self.is_alone or share.is_exclusive
            self.takers += not each.is_kept
            known += share.load_percent or 0.0
            expected += UNKNOWN_PERCENT if share.load_percent is None else share.load_percent
        foreign = self.foreign.percent if self.foreign.percent > IDLE_PERCENT else 0.0
        # What was seen on a device that only strangers use may have been the doing of somebody who has left.
        seen = (self.seen_percent or 0.0) if promises else 0.0
        self.load_percent = max(known + foreign, seen)
        self.expected_percent = max(expected + foreign, seen)
        self.is_loaded = bool(promises) or foreign > 0.0
        size = self.capacity_mb
        self.free_mb = (
            None if size is None else size - self.foreign_mb - sum(charge(promise, size) for promise in promises)
        )

    @property
    def foreign_mb(self) -> float:
        """What strangers hold: all that is used, less what leases were measured to use or may use unseen."""
        used = self.device.memory_used_mb or 0.0
        unexplained = max(0.0, used - self._ours(self.promises))
        if not self.device.hides_processes:
            return unexplained
        before = max((each.share.foreign_mb or 0.0 for each in self.promises), default=0.0)
        return max(unexplained, min(before, used))

    def _ours(self, promises: Iterable[PromisedShare]) -> float:
        size = self.capacity_mb or 0.0
        ours = 0.0
        for each in promises:
            if each.measured_mb is not None:
                ours += each.measured_mb
            elif not each.is_kept:
                ours += charge(each, size)
        return ours


def charge(promise: PromisedShare, capacity_mb: float) -> float:
    reserved = promise.share.memory_mb
    if promise.share.is_exclusive or reserved is None:
        reserved = capacity_mb
    return max(reserved, promise.measured_mb or 0.0)


def capacity(device: Device) -> float | None:
    """Used and free together: a driver keeps a part of the total for itself."""
    if device.memory_used_mb is not None and device.memory_free_mb is not None:
        return device.memory_used_mb + device.memory_free_mb
    return device.memory_total_mb
