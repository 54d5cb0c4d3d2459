"""How the memory of a device divides into this queue's jobs, other leases, foreign processes, and free memory.

The parts always add up to the device's capacity. Measured use comes first; reservations beyond it are shown as far as
memory is left for them. So an exclusive lease, which is charged the whole device, does not hide the memory of a foreign
process on it. The margin that stays free because first runs may take more than expected counts as reserved by them.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare, charged_mb
from gpuyard.core.snapshot import Device


class MemoryParts(Struct, frozen=True, kw_only=True):
    """Own, others', foreign and free memory add up to the capacity; `*_used_mb` is the part of a charge that is
    used."""

    capacity_mb: float | None
    own_mb: float | None
    own_used_mb: float | None
    others_mb: float | None
    others_used_mb: float | None
    foreign_mb: float | None
    free_mb: float | None


def break_down(device: Device, promises: Sequence[PromisedShare], own: AbstractSet[str]) -> MemoryParts:
    """Return the parts of a device's memory; None is unknown. `own` has the ids of this queue's leases."""
    mine = [promise for promise in promises if promise.lease_id in own]
    others = [promise for promise in promises if promise.lease_id not in own]
    mine_mb, others_mb = _used(mine), _used(others)
    state = DeviceState(device, promises, None)
    parts = MemoryParts(
        capacity_mb=None,
        own_mb=None,
        own_used_mb=mine_mb,
        others_mb=None,
        others_used_mb=others_mb,
        foreign_mb=None,
        free_mb=None,
    )
    size = state.capacity_mb
    if size is None or state.free_mb is None:
        return parts
    charged = [sum((charged_mb(promise, size) for promise in part), _margin_of(part, state)) for part in (mine, others)]
    left = size
    mine_used, left = _take(left, mine_mb or 0.0)
    others_used, left = _take(left, others_mb or 0.0)
    foreign, left = _take(left, state.foreign_mb)
    mine_reserved, left = _take(left, charged[0] - mine_used)
    others_reserved, left = _take(left, charged[1] - others_used)
    own_mb, others_mb = mine_used + mine_reserved, others_used + others_reserved
    return replace(parts, capacity_mb=size, own_mb=own_mb, others_mb=others_mb, foreign_mb=foreign, free_mb=left)


def _take(left: float, wanted: float) -> tuple[float, float]:
    taken = min(left, max(0.0, wanted))
    return taken, left - taken


def _margin_of(part: Sequence[PromisedShare], state: DeviceState) -> float:
    """Return the part of the device's margin that is due to the spread of these shares."""
    spread = sum(promise.share.spread_mb for promise in part)
    return state.margin_mb * spread / state.spreads if spread else 0.0


def _used(promises: Sequence[PromisedShare]) -> float | None:
    """Return the measured use of all; None where the driver hides that of any."""
    known = [promise.measured_mb for promise in promises if promise.measured_mb is not None]
    return sum(known, 0.0) if len(known) == len(promises) else None
