"""Whether a device fits a need. Checks return the kind of the first reason against it, or None; `reason_for` adds text.

The checks are separate from the text because they run for every waiting job.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Holder, Need
from gpuyard.core.scheduling import wait_reasons
from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare, capacity
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.scheduling.wait_remedies import remedy_for
from gpuyard.core.snapshot import Device, Host

# A device on which a desktop or an idle notebook holds no more than this still counts as empty.
_TINY_MB, _TINY_PART = 1024.0, 0.05
# Where the driver lists no processes, a desktop looks like any other program: half of the memory may be in use.
_UNLISTED_PART = 0.5


class Packing(Struct, frozen=True, kw_only=True):
    """Limits for sharing a device. `None` is no limit.

    max_load_percent: how busy all jobs and foreign processes together may keep a device.
    max_foreign_load_percent: how busy foreign processes alone may keep a device that gets another job.
    """

    max_jobs_per_device: int | None = None
    max_load_percent: float | None = None
    max_foreign_load_percent: float | None = None


def is_of_kind(need: Need, device: Device) -> bool:
    if need.vendor is not None and device.vendor is not need.vendor:
        return False
    return need.model is None or need.model.lower() in (device.name or "").lower()


def host_refusals(need: Need, host: Host) -> Iterator[Reason]:
    if _exceeds(host.cpu_percent, need.max_cpu_percent):
        reason = wait_reasons.over(ReasonKind.HOST_TOO_BUSY, host.cpu_percent, need.max_cpu_percent)
        yield replace(reason, remedy=remedy_for(reason.kind))
    available = host.memory_available_mb
    if need.min_host_memory_mb is not None and available is not None and available < need.min_host_memory_mb:
        text = f"{available:.0f} MB of RAM available < {need.min_host_memory_mb:.0f} MB"
        kind = ReasonKind.HOST_TOO_FULL
        yield Reason(kind, text, remedy=remedy_for(kind))


def check_suitable(need: Need, device: Device) -> ReasonKind | None:
    """Check what never changes: the requested devices, bans, vendor and model."""
    if need.only is not None and device.id not in need.only:
        return ReasonKind.NOT_ASKED_FOR
    if device.id in need.banned:
        return ReasonKind.BANNED
    return None if is_of_kind(need, device) else ReasonKind.NOT_ASKED_FOR


def check_leases(need: Need, state: DeviceState) -> ReasonKind | None:
    """Check that an exclusive lease shares its device with no other."""
    if not state.promises or not (need.is_exclusive or state.is_exclusive):
        return None
    is_reserved = all(each.is_reservation for each in _conflicts(need, state))
    return ReasonKind.AWAITED if is_reserved else ReasonKind.LEASED


def check_state(need: Need, device: Device) -> ReasonKind | None:
    """Check the device's health and the need's own limits of load, power and memory."""
    if need.ignores_health:
        return None
    if not device.healthy:
        return ReasonKind.UNHEALTHY
    if not need.limits_device_load:
        return None
    return next((kind for kind, figure, limit in _limits(need, device) if _exceeds(figure, limit)), None)


def check_capacity(need: Need, state: DeviceState, packing: Packing) -> ReasonKind | None:
    """Check free memory, foreign processes and the limits of sharing."""
    if _lacks_memory(need, state):
        return ReasonKind.NO_ROOM
    if state.foreign.is_over and need.max_utilization_percent is None and not need.ignores_foreign_load:
        return ReasonKind.FOREIGN_LOAD
    if not need.is_exclusive:
        return _check_packing(need, state, packing)
    # Work that has not said how much memory it needs gets a device that is nearly empty.
    is_occupied = need.required_mb is None and _exceeds(state.device.memory_used_mb, tolerated_foreign_mb(state.device))
    return ReasonKind.OCCUPIED if is_occupied else None


def _conflicts(need: Need, state: DeviceState) -> list[PromisedShare]:
    return [each for each in state.promises if need.is_exclusive or each.share.is_exclusive]


def _limits(need: Need, device: Device) -> tuple[tuple[ReasonKind, float | None, float | None], ...]:
    return (
        (ReasonKind.TOO_BUSY, device.utilization_percent, need.max_utilization_percent),
        (ReasonKind.TOO_HUNGRY, device.power_draw_w, need.max_power_w),
        (ReasonKind.TOO_FULL, device.memory_used_mb, need.max_memory_used_mb),
    )


def _lacks_memory(need: Need, state: DeviceState) -> bool:
    """Return whether the device has too little free memory. A device of unknown size cannot be shared."""
    if state.free_mb is None:
        return not need.is_exclusive
    return need.required_mb is not None and state.free_mb < need.required_mb


def _check_packing(need: Need, state: DeviceState, packing: Packing) -> ReasonKind | None:
    if packing.max_jobs_per_device is not None and state.lease_count >= packing.max_jobs_per_device:
        return ReasonKind.TOO_MANY
    # The only job on a device may exceed the limit by itself: it would do so on any device.
    added = need.load_percent or 0.0 if state.lease_count else 0.0
    is_loaded = _exceeds(state.load_percent + added, packing.max_load_percent)
    return ReasonKind.LOADED if is_loaded and not need.ignores_load else None


def tolerated_foreign_mb(device: Device) -> float:
    """Return how much memory foreign processes may hold on a device that one job gets exclusively."""
    part = _UNLISTED_PART if device.hides_processes else _TINY_PART
    return max(_TINY_MB, part * (capacity(device) or 0.0))


def tiny_mb(device: Device) -> float:
    """Return how much memory is negligible on a device of its size."""
    return max(_TINY_MB, _TINY_PART * (capacity(device) or 0.0))


def _exceeds(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def reason_for(kind: ReasonKind, need: Need, state: DeviceState, packing: Packing) -> Reason:
    """Return the reason with its text, figures and remedy."""
    return replace(_describe(kind, need, state, packing), remedy=remedy_for(kind, need, state))


def _describe(  # noqa: C901, PLR0911 - one case for each kind
    kind: ReasonKind, need: Need, state: DeviceState, packing: Packing
) -> Reason:
    device = state.device
    holders = _holders(state.promises)
    match kind:
        case ReasonKind.BANNED:
            return Reason(kind, "banned", device.id)
        case ReasonKind.UNHEALTHY:
            return Reason(kind, f"unhealthy: {device.fault}", device.id)
        case ReasonKind.NOT_ASKED_FOR:
            is_listed = need.only is None or device.id in need.only
            text = "another vendor or model than requested" if is_listed else "not among the requested GPUs"
            return Reason(kind, text, device.id)
        case ReasonKind.AWAITED:
            return wait_reasons.awaited(device.id, _holders(_conflicts(need, state)))
        case ReasonKind.LEASED:
            leases = [each for each in _conflicts(need, state) if not each.is_reservation]
            return wait_reasons.leased(device.id, _holders(leases))
        case ReasonKind.NO_ROOM if state.free_mb is None:
            return Reason(kind, "its memory is unknown, so it cannot be shared", device.id)
        case ReasonKind.NO_ROOM:
            return wait_reasons.no_room(device.id, state.free_mb or 0.0, need.required_mb or 0.0, holders)
        case ReasonKind.TOO_MANY:
            return wait_reasons.too_many(device.id, packing.max_jobs_per_device or 0, holders)
        case ReasonKind.LOADED:
            most = packing.max_load_percent or 0.0
            return wait_reasons.loaded(device.id, state.load_percent, need.load_percent, most, holders)
        case ReasonKind.FOREIGN_LOAD:
            return wait_reasons.foreign_load(device.id, state.foreign, packing.max_foreign_load_percent or 0.0)
        case ReasonKind.OCCUPIED:
            return wait_reasons.occupied(device.id, device.memory_used_mb or 0.0, tolerated_foreign_mb(device))
    figure, limit = next((figure, limit) for each, figure, limit in _limits(need, device) if each is kind)
    return wait_reasons.over(kind, figure, limit, device.id)


def _holders(promises: Iterable[PromisedShare]) -> tuple[Holder, ...]:
    return tuple(each.holder for each in promises)
