"""What speaks against a device for a piece of work: as a kind, found cheaply, and in words with its figures."""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import Need
from gpuyard.core.scheduling import wait_reasons
from gpuyard.core.scheduling.device_memory import DeviceRoom, PromisedShare, capacity
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.scheduling.wait_remedies import remedy_for
from gpuyard.core.snapshot import Device, Host

# A screen or an idle notebook on a card does not make it a taken one.
_TINY_MB, _TINY_SHARE = 1024.0, 0.05
# If the driver lists no processes, a desktop looks like a program: half of the memory may be in use.
_UNLISTED_SHARE = 0.5


class Packing(Struct, frozen=True, kw_only=True):
    """How tightly devices are shared. `None` is no bound.

    `max_load_percent` is how busy a device may be kept by all together, `max_foreign_load_percent` by processes without
    a lease alone.
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
        told = wait_reasons.over(ReasonKind.HOST_TOO_BUSY, host.cpu_percent, need.max_cpu_percent)
        yield replace(told, remedy=remedy_for(told.kind))
    available = host.memory_available_mb
    if need.min_host_memory_mb is not None and available is not None and available < need.min_host_memory_mb:
        text = f"{available:.0f} MB of RAM available < {need.min_host_memory_mb:.0f} MB"
        yield replace(wait_reasons.plain(ReasonKind.HOST_TOO_FULL, text), remedy=remedy_for(ReasonKind.HOST_TOO_FULL))


def unsuitable(need: Need, device: Device) -> ReasonKind | None:
    if need.only is not None and device.id not in need.only:
        return ReasonKind.NOT_ASKED_FOR
    if device.id in need.banned:
        return ReasonKind.BANNED
    return None if is_of_kind(need, device) else ReasonKind.NOT_ASKED_FOR


def taken(need: Need, room: DeviceRoom) -> ReasonKind | None:
    """An exclusive lease goes beside nobody, and nobody beside it."""
    if not room.promises or not (need.is_exclusive or room.is_alone):
        return None
    return ReasonKind.AWAITED if all(each.is_kept for each in _in_the_way(need, room)) else ReasonKind.LEASED


def unsound(need: Need, device: Device) -> ReasonKind | None:
    if need.ignores_health:
        return None
    return _beyond_bounds(need, device) if device.healthy else ReasonKind.UNHEALTHY


def _in_the_way(need: Need, room: DeviceRoom) -> list[PromisedShare]:
    return [each for each in room.promises if need.is_exclusive or each.share.is_exclusive]


def _beyond_bounds(need: Need, device: Device) -> ReasonKind | None:
    if not need.bounds_load:
        return None
    return next((kind for kind, seen, bound in _bounds(need, device) if _exceeds(seen, bound)), None)


def _bounds(need: Need, device: Device) -> tuple[tuple[ReasonKind, float | None, float | None], ...]:
    return (
        (ReasonKind.TOO_BUSY, device.utilization_percent, need.max_utilization_percent),
        (ReasonKind.TOO_HUNGRY, device.power_draw_w, need.max_power_w),
        (ReasonKind.TOO_FULL, device.memory_used_mb, need.max_memory_used_mb),
    )


def crowded(need: Need, room: DeviceRoom, packing: Packing) -> ReasonKind | None:
    if _lacks_memory(need, room):
        return ReasonKind.NO_ROOM
    if room.foreign.is_over and need.max_utilization_percent is None and not need.ignores_foreign_load:
        return ReasonKind.FOREIGN_LOAD
    if need.is_exclusive:
        return _occupied(room.device) if need.memory_mb is None else None
    return _overloaded(need, room, packing)


def _lacks_memory(need: Need, room: DeviceRoom) -> bool:
    """Return whether the device has too little free memory. One of unknown size cannot be shared."""
    if room.free_mb is None:
        return not need.is_exclusive
    return need.memory_mb is not None and room.free_mb < need.memory_mb


def _overloaded(need: Need, room: DeviceRoom, packing: Packing) -> ReasonKind | None:
    if packing.max_jobs_per_device is not None and room.takers >= packing.max_jobs_per_device:
        return ReasonKind.TOO_MANY
    # The only job on a device may exceed the bound by itself: elsewhere it would do so, too.
    added = need.load_percent or 0.0 if room.takers else 0.0
    is_loaded = _exceeds(room.load_percent + added, packing.max_load_percent)
    return ReasonKind.LOADED if is_loaded and not need.ignores_load else None


def _occupied(device: Device) -> ReasonKind | None:
    """Refuse a device that is not nearly empty to work that has not said what it needs."""
    return ReasonKind.OCCUPIED if _exceeds(device.memory_used_mb, allowed_strangers(device)) else None


def allowed_strangers(device: Device) -> float:
    """Return how much others may hold of a device that is given to one job alone."""
    part = _UNLISTED_SHARE if device.hides_processes else _TINY_SHARE
    return max(_TINY_MB, part * (capacity(device) or 0.0))


def tiny_mb(device: Device) -> float:
    """Return how much memory is next to nothing on a device of its size."""
    return max(_TINY_MB, _TINY_SHARE * (capacity(device) or 0.0))


def _exceeds(value: float | None, bound: float | None) -> bool:
    return value is not None and bound is not None and value > bound


# In words


def reason_for(kind: ReasonKind, need: Need, room: DeviceRoom, packing: Packing) -> Reason:
    return replace(_told(kind, need, room, packing), remedy=remedy_for(kind, need, room))


def _told(kind: ReasonKind, need: Need, room: DeviceRoom, packing: Packing) -> Reason:  # noqa: PLR0911 - one for each
    device = room.device
    holders = tuple(each.holder for each in room.promises)
    match kind:
        case ReasonKind.NOT_ASKED_FOR | ReasonKind.BANNED | ReasonKind.UNHEALTHY:
            return wait_reasons.plain(kind, _unsuitable_in_words(kind, need, device), device.id)
        case ReasonKind.AWAITED:
            return wait_reasons.awaited(device.id, tuple(each.holder for each in _in_the_way(need, room)))
        case ReasonKind.LEASED:
            taken = tuple(each.holder for each in _in_the_way(need, room) if not each.is_kept)
            return wait_reasons.leased(device.id, taken)
        case ReasonKind.NO_ROOM if room.free_mb is None:
            return wait_reasons.plain(kind, "its memory is unknown, so it cannot be shared", device.id)
        case ReasonKind.NO_ROOM:
            return wait_reasons.no_room(device.id, room.free_mb or 0.0, need.memory_mb or 0.0, holders)
        case ReasonKind.TOO_MANY:
            return wait_reasons.too_many(device.id, packing.max_jobs_per_device or 0, holders)
        case ReasonKind.LOADED:
            most = packing.max_load_percent or 0.0
            return wait_reasons.loaded(device.id, room.load_percent, need.load_percent, most, holders)
        case ReasonKind.FOREIGN_LOAD:
            return wait_reasons.foreign_load(device.id, room.foreign, packing.max_foreign_load_percent or 0.0)
        case ReasonKind.OCCUPIED:
            return wait_reasons.occupied(device.id, device.memory_used_mb or 0.0, allowed_strangers(device))
    return _over(kind, need, device)


def _unsuitable_in_words(kind: ReasonKind, need: Need, device: Device) -> str:
    if kind is ReasonKind.BANNED:
        return "banned"
    if kind is ReasonKind.UNHEALTHY:
        return f"unhealthy: {device.fault}"
    is_listed = need.only is None or device.id in need.only
    return "of another make than asked for" if is_listed else "not among those asked for"


def _over(kind: ReasonKind, need: Need, device: Device) -> Reason:
    seen, bound = next((seen, bound) for each, seen, bound in _bounds(need, device) if each is kind)
    return wait_reasons.over(kind, seen, bound, device.id)
