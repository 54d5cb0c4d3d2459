"""Free memory and load of a device, from what its leases reserve and what was measured.

Free memory of a device is its capacity, less the memory of foreign processes, less for each lease the larger of its
reservation and its measured use. So a lease that has not allocated yet is charged its reservation, and a lease that has
grown is charged what it uses. Beside leases of uncertain need a margin stays free (`expected_peak.margin_mb`).

Where the driver lists no processes, foreign processes are charged what they held when the leases were granted, and all
use beyond that and beyond what the leases reserved.

Load follows the same rule: the larger of the measured load, and the sum of the known loads of the leases and of the
foreign processes.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Holder, Need, Share
from gpuyard.core.memory.expected_peak import margin_mb
from gpuyard.core.scheduling.foreign_load import NO_FOREIGN_LOAD, ForeignLoad
from gpuyard.core.scheduling.numbers import IDLE_PERCENT, SURENESS, UNKNOWN_PERCENT
from gpuyard.core.snapshot import Device

# Behind any load that jobs can cause: a device that is the last choice (`Device.is_last_choice`).
LAST_CHOICE_PERCENT = 1e9


class PromisedShare(Struct, frozen=True, kw_only=True):
    """A share that is leased (with its `lease_id`), claimed by this plan, or reserved for a request ahead."""

    share: Share
    holder: Holder
    measured_mb: float | None = None
    is_reservation: bool = False
    lease_id: str | None = None


class DeviceState:
    """A device and its promised shares, with their sums. Never changes after construction.

    load_percent: how busy the device is known to be; shares of unknown load count as 0.
    expected_percent: how busy it may become; shares of unknown load count as 100%.
    lease_count: promised shares without reservations.
    members: remembered by `sharing` for each caution.
    memory_text: where its memory went, remembered by `memory_text`.
    """

    __slots__ = (
        "capacity_mb",
        "device",
        "expected_percent",
        "foreign",
        "foreign_mb",
        "free_mb",
        "is_exclusive",
        "is_loaded",
        "lease_count",
        "load_percent",
        "margin_mb",
        "measured_percent",
        "members",
        "memory_text",
        "promises",
        "spreads",
        "squares",
        "sureness",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        promises: Sequence[PromisedShare],
        measured_percent: float | None,
        foreign: ForeignLoad = NO_FOREIGN_LOAD,
        sureness: float = SURENESS,
    ) -> None:
        self.device = device
        self.sureness = sureness
        self.measured_percent = measured_percent
        self.foreign = foreign
        self.capacity_mb = capacity(device)
        self.promises = promises
        self.memory_text: str | None = None
        self.members: dict[float, Sequence[tuple[float, float]]] = {}
        self.is_exclusive = False
        self.lease_count = 0
        known = expected = self.spreads = self.squares = 0.0
        for each in promises:
            share = each.share
            self.is_exclusive = self.is_exclusive or share.is_exclusive
            self.lease_count += not each.is_reservation
            known += share.load_percent or 0.0
            expected += UNKNOWN_PERCENT if share.load_percent is None else share.load_percent
            if share.spread_mb:
                self.spreads += share.spread_mb
                self.squares += share.spread_mb * share.spread_mb
        foreign_percent = foreign.percent if foreign.percent > IDLE_PERCENT else 0.0
        # On a device without leases, the measured load may come from a job that has just ended.
        measured = (measured_percent or 0.0) if promises else 0.0
        self.load_percent = max(known + foreign_percent, measured)
        self.expected_percent = max(expected + foreign_percent, measured)
        self.is_loaded = bool(promises) or foreign_percent > 0.0
        self.margin_mb = margin_mb(self.spreads, self.squares, sureness) if self.spreads else 0.0
        size = self.capacity_mb
        self.foreign_mb = self._find_foreign_mb()
        charged = sum([charged_mb(promise, size) for promise in promises]) if size is not None else 0.0
        self.free_mb = None if size is None else size - self.foreign_mb - self.margin_mb - charged

    @property
    def is_awaited(self) -> bool:
        """Whether a request ahead has reserved a share of the device."""
        return self.lease_count < len(self.promises)

    @property
    def charged_mb(self) -> float | None:
        """Memory that foreign processes hold or that is promised."""
        return None if self.capacity_mb is None or self.free_mb is None else self.capacity_mb - self.free_mb

    def needed_mb(self, need: Need) -> float | None:
        """Return the memory that the need asks for, in view of the uncertain needs on this device; None if it does not
        say."""
        need = need.on(self.device.id) if need.memory_on else need
        reserved, spread = need.reserved_mb, need.spread_mb
        # Alone on a device, a job gets all of it, however much it may come to need.
        if reserved is None or not spread or not self.promises:
            return need.required_mb
        after = margin_mb(self.spreads + spread, self.squares + spread * spread, self.sureness)
        return reserved + after - self.margin_mb

    @property
    def unreserved_mb(self) -> float:
        """Memory that the promised shares do not reserve, whatever is measured; 0 if the size is unknown."""
        size = self.capacity_mb or 0.0
        return size - self.margin_mb - sum(reserved_mb(promise, size) for promise in self.promises)

    def with_promise(self, promise: PromisedShare) -> "DeviceState":
        promises = [*self.promises, promise]
        return DeviceState(self.device, promises, self.measured_percent, self.foreign, self.sureness)

    def without(self, lease_ids: frozenset[str] | None = None) -> "DeviceState":
        """Return the state after these leases, or all, have ended. The measured load of today says nothing about it."""
        left = [each for each in self.promises if lease_ids is not None and each.lease_id not in lease_ids]
        return self if len(left) == len(self.promises) else self._with_only(left)

    def _with_only(self, left: list[PromisedShare]) -> "DeviceState":
        foreign = self.foreign_mb
        used = foreign + min(self._leased_use_mb(left), (self.device.memory_used_mb or 0.0) - foreign)
        device = replace(
            self.device,
            memory_used_mb=used,
            memory_free_mb=None if self.capacity_mb is None else self.capacity_mb - used,
            utilization_percent=None,
            power_draw_w=None,
        )
        return DeviceState(device, left, None, self.foreign, self.sureness)

    def _find_foreign_mb(self) -> float:
        """Return the memory of foreign processes: all use, less what leases were measured to use or may use
        unmeasured."""
        used = self.device.memory_used_mb or 0.0
        unexplained = max(0.0, used - self._leased_use_mb(self.promises))
        if not self.device.hides_processes:
            return unexplained
        before = max((each.share.foreign_mb or 0.0 for each in self.promises), default=0.0)
        return max(unexplained, min(before, used))

    def _leased_use_mb(self, promises: Iterable[PromisedShare]) -> float:
        size = self.capacity_mb or 0.0
        total = 0.0
        for each in promises:
            if each.measured_mb is not None:
                total += each.measured_mb
            elif not each.is_reservation:
                total += charged_mb(each, size)
        return total


def charged_mb(promise: PromisedShare, capacity_mb: float) -> float:
    """Return the larger of the reserved and the measured memory."""
    return max(reserved_mb(promise, capacity_mb), promise.measured_mb or 0.0)


def reserved_mb(promise: PromisedShare, capacity_mb: float) -> float:
    """Return the reserved memory. An exclusive share reserves the whole device."""
    reserved = promise.share.memory_mb
    return capacity_mb if promise.share.is_exclusive or reserved is None else reserved


def capacity(device: Device) -> float | None:
    """Return used plus free memory, as a driver keeps a part of the total for itself."""
    if device.memory_used_mb is not None and device.memory_free_mb is not None:
        return device.memory_used_mb + device.memory_free_mb
    return device.memory_total_mb
