"""Free memory and load of a device; and where its memory is, in words.

Free memory is the capacity, less the memory of foreign processes, less for each lease the larger of its reservation and
its measured use. Beside leases of uncertain need a margin stays free (`margin_mb`). Where the driver lists no
processes, foreign ones are charged what they held when the leases were granted, and all use beyond what is reserved.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.lease import Holder, Need, Share
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.units import format_size
from gpuyard.policy.foreign_load import NO_FOREIGN_LOAD, ForeignLoad
from gpuyard.policy.numbers import ALIKE_JOBS, IDLE_PERCENT, SURENESS, UNKNOWN_PERCENT
from gpuyard.policy.wait_reasons import list_holders


class PromisedShare(Struct, frozen=True, kw_only=True):
    """A share that is leased (with its `lease_id`), claimed by this plan, or reserved for a request ahead."""

    share: Share
    holder: Holder
    measured_mb: float | None = None
    is_reservation: bool = False
    lease_id: str | None = None


def margin_mb(spreads: float, squares: float, sureness: float) -> float:
    """Return what must stay free beside the means of several jobs, given the sum and the sum of squares of spreads."""
    return sureness * math.sqrt((1.0 - ALIKE_JOBS) * squares + ALIKE_JOBS * spreads * spreads)


class DeviceState:
    """A device and its promised shares, with their sums. Never changes after construction. In `load_percent` shares of
    unknown load count as 0, in `expected_percent` as 100%; `lease_count` is without reservations."""

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
        self.memory_text: str | None = None  # remembered by `describe_memory`
        self.members: dict[float, Sequence[tuple[float, float]]] = {}  # remembered by `sharing` for each caution
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
        size, used = self.capacity_mb, device.memory_used_mb or 0.0
        # Of foreign processes is all use, less what leases were measured to use or may use unmeasured.
        self.foreign_mb = max(0.0, used - self._leased_use_mb(promises))
        if device.hides_processes:
            before = max((each.share.foreign_mb or 0.0 for each in promises), default=0.0)
            self.foreign_mb = max(self.foreign_mb, min(before, used))
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
        """Return the memory that the need asks for beside the uncertain needs here; None if it does not say."""
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
        if len(left) == len(self.promises):
            return self
        used = self.foreign_mb
        used += min(self._leased_use_mb(left), (self.device.memory_used_mb or 0.0) - used)
        free = None if self.capacity_mb is None else self.capacity_mb - used
        figures = {"memory_used_mb": used, "memory_free_mb": free, "utilization_percent": None, "power_draw_w": None}
        return DeviceState(replace(self.device, **figures), left, None, self.foreign, self.sureness)

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


def describe_memory(state: DeviceState) -> str:
    """Return where the memory is that is not free: `6 GB used by job 3, 2 GB kept for job 9, ahead in the queue`."""
    if state.memory_text is None:
        state.memory_text = "" if state.capacity_mb is None else ", ".join(_parts(state, state.capacity_mb))
    return state.memory_text


def _parts(state: DeviceState, capacity_mb: float) -> Iterator[str]:
    leases = [
        (each.holder, each.measured_mb or 0.0, charged_mb(each, capacity_mb))
        for each in state.promises
        if not each.is_reservation
    ]
    users = [holder for holder, used, _ in leases if used >= 1.0]
    if users:
        yield f"{format_size(sum(used for _, used, _ in leases if used >= 1.0))} used by {list_holders(users)}"
    if state.foreign_mb >= 1.0:
        yield f"{format_size(state.foreign_mb)} used by processes outside gpuyard"
    # What leases reserve beyond their use: all of it where the driver hides what is used.
    kept = [(holder, charged - used) for holder, used, charged in leases if charged - used >= 1.0]
    if kept:
        holders = [holder for holder, _ in kept]
        whom = list_holders(holders) if holders != users else "it" if len(kept) == 1 else "them"
        more = "more " if holders == users else ""
        yield f"{format_size(sum(beyond for _, beyond in kept))} {more}kept for {whom}"
    ahead = [each for each in state.promises if each.is_reservation]
    if ahead:
        reserved, names = (
            sum(charged_mb(each, capacity_mb) for each in ahead),
            list_holders([each.holder for each in ahead]),
        )
        yield f"{format_size(reserved)} kept for {names}, ahead in the queue"
    if state.margin_mb >= 1.0:
        yield f"{format_size(state.margin_mb)} kept in case first runs take more"


def claimed_share(need: Need, state: DeviceState) -> Share:
    share = share_of(need, state.device)
    hides_use = state.device.hides_processes and state.device.memory_used_mb is not None
    return replace(share, foreign_mb=state.foreign_mb) if hides_use else share


def share_of(need: Need, device: Device) -> Share:
    need = need.on(device.id)
    return Share(
        device_id=device.id,
        memory_mb=need.reserved_mb,
        load_percent=need.load_percent,
        is_exclusive=need.is_exclusive,
        spread_mb=need.spread_mb,
    )


def lease_ids(state: DeviceState) -> list[str]:
    """Return the leases on the device, each once, in the order of their shares: decisions never depend on hashes."""
    return list(dict.fromkeys(each.lease_id for each in state.promises if each.lease_id is not None))


def has_free_part(state: DeviceState) -> bool:
    """Return whether the device is neither held exclusively nor full."""
    return not state.is_exclusive and (not state.promises or state.free_mb is None or state.free_mb > 0.0)


class MemoryParts(Struct, frozen=True, kw_only=True):
    """Own, others', foreign and free memory add up to the capacity; `*_used_mb` is the used part of a charge."""

    capacity_mb: float | None
    own_mb: float | None
    own_used_mb: float | None
    others_mb: float | None
    others_used_mb: float | None
    foreign_mb: float | None
    free_mb: float | None


def break_down(device: Device, promises: Sequence[PromisedShare], own: AbstractSet[str]) -> MemoryParts:
    """Return the parts of a device's memory; None is unknown. `own` has the ids of this queue's leases."""
    parts = [[each for each in promises if (each.lease_id in own) is is_own] for is_own in (True, False)]
    state = DeviceState(device, promises, None)
    size = left = state.capacity_mb or 0.0
    used: list[float | None] = []  # None where the driver hides the use of any
    charged: list[float] = []
    for part in parts:
        known = [each.measured_mb for each in part if each.measured_mb is not None]
        used.append(sum(known, 0.0) if len(known) == len(part) else None)
        spread = sum(each.share.spread_mb for each in part)  # the margin is due to it
        margin = state.margin_mb * spread / state.spreads if spread else 0.0
        charged.append(sum((charged_mb(each, size) for each in part), margin))

    def take(wanted: float) -> float:
        nonlocal left
        taken = min(left, max(0.0, wanted))
        left -= taken
        return taken

    mine_used, others_used, foreign = take(used[0] or 0.0), take(used[1] or 0.0), take(state.foreign_mb)
    mine, others = mine_used + take(charged[0] - mine_used), others_used + take(charged[1] - others_used)
    is_known = state.capacity_mb is not None
    return MemoryParts(
        capacity_mb=state.capacity_mb,
        own_mb=mine if is_known else None,
        own_used_mb=used[0],
        others_mb=others if is_known else None,
        others_used_mb=used[1],
        foreign_mb=foreign if is_known else None,
        free_mb=left if is_known else None,
    )
