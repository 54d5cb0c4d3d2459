"""How the memory of a device is divided up: what this queue's jobs have of it, other leases, strangers, and the rest.

The parts always add up to the device's capacity. What is used comes first, as it was measured; what is reserved beyond
that is shown as far as there is room for it: an exclusive lease is charged the whole device, and a stranger's memory on
that device is the stranger's all the same.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct

from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare, charged_mb
from gpuyard.core.snapshot import Device


class MemoryPart(Struct, frozen=True, kw_only=True):
    """What some leases have of a device: charged in all, and used of that as far as anybody can tell."""

    charged_mb: float | None = None
    used_mb: float | None = None


class Breakdown(Struct, frozen=True, kw_only=True):
    capacity_mb: float | None
    own: MemoryPart
    others: MemoryPart
    foreign_mb: float | None
    free_mb: float | None


def break_down(device: Device, promises: Sequence[PromisedShare], own: AbstractSet[str]) -> Breakdown:
    """`own` are the ids of the leases that are this queue's."""
    mine = [promise for promise in promises if promise.lease_id in own]
    others = [promise for promise in promises if promise.lease_id not in own]
    used = MemoryPart(used_mb=_used(mine)), MemoryPart(used_mb=_used(others))
    room = DeviceState(device, promises, None)
    size = room.capacity_mb
    if size is None or room.free_mb is None:
        return Breakdown(capacity_mb=None, own=used[0], others=used[1], foreign_mb=None, free_mb=None)
    charged = _charged(mine, size), _charged(others, size)
    left = size
    mine_used, left = _take(left, used[0].used_mb or 0.0)
    others_used, left = _take(left, used[1].used_mb or 0.0)
    foreign, left = _take(left, size - room.free_mb - sum(charged))
    mine_kept, left = _take(left, charged[0] - mine_used)
    others_kept, left = _take(left, charged[1] - others_used)
    return Breakdown(
        capacity_mb=size,
        own=MemoryPart(charged_mb=mine_used + mine_kept, used_mb=used[0].used_mb),
        others=MemoryPart(charged_mb=others_used + others_kept, used_mb=used[1].used_mb),
        foreign_mb=foreign,
        free_mb=left,
    )


def _take(left: float, wanted: float) -> tuple[float, float]:
    taken = min(left, max(0.0, wanted))
    return taken, left - taken


def _used(promises: Iterable[PromisedShare]) -> float | None:
    """Unknown where the driver hides it of any of them."""
    total = 0.0
    for promise in promises:
        if promise.measured_mb is None:
            return None
        total += promise.measured_mb
    return total


def _charged(promises: Iterable[PromisedShare], size: float) -> float:
    return sum((charged_mb(promise, size) for promise in promises), 0.0)
