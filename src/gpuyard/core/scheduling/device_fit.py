"""Whether a device fits a need. Checks return the kind of the first reason against it, or None; `reason_for` adds text.

The checks are separate from the text because they run for every waiting job.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.lease import FixedMemory, Need, UncertainMemory
from gpuyard.core.printable_text import printable
from gpuyard.core.scheduling.device_memory import SURENESS, DeviceState, PromisedShare, capacity
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.scheduling.memory_text import describe_memory
from gpuyard.core.scheduling.sharing import DepthLimit, durations_with, gains, is_too_deep, throughputs
from gpuyard.core.scheduling.wait_reasons import (
    REMEDIES,
    START_WITH,
    VRAM_OPTION,
    Reason,
    ReasonKind,
    awaited,
    first_runs_brief,
    list_holders,
    over,
)
from gpuyard.core.snapshot import Device, Host, Snapshot
from gpuyard.core.units import format_size

# A device on which a desktop or an idle notebook holds no more than this still counts as empty.
_TINY_MB, _TINY_PART = 1024.0, 0.05
# Where the driver lists no processes, a desktop looks like any other program: half of the memory may be in use.
_UNLISTED_PART = 0.5
# A text names at most this many foreign processes.
_NAMED_PROCESSES = 3
_LONGEST_NAME = 60


class Packing(Struct, frozen=True, kw_only=True):
    """Limits for sharing a device. `None` is no limit.

    sureness: how many standard deviations beyond what is expected of jobs without an estimate stay free.
    min_gain_percent: by how much a job must raise the work that is done on a device that it shares (`sharing`).
    depth: how many jobs share a device while others may become free (`sharing`).
    """

    max_jobs_per_device: int | None = None
    max_load_percent: float | None = None  # how busy all jobs and foreign processes together may keep a device
    max_foreign_load_percent: float | None = None  # the same for foreign processes alone, on a device that gets a job
    sureness: float = SURENESS
    min_gain_percent: float | None = None
    depth: DepthLimit | None = None


def is_of_kind(need: Need, device: Device) -> bool:
    if need.vendor is not None and device.vendor is not need.vendor:
        return False
    if need.only_discrete and device.is_integrated:
        return False
    return need.model is None or need.model.lower() in (device.name or "").lower()


def kind_of(need: Need) -> tuple[object, ...]:
    """Return all of the need that says which devices suit it, busy or not."""
    return need.only, need.banned, need.vendor, need.model, need.only_discrete, need.is_resumed


def host_refusals(need: Need, host: Host) -> Iterator[Reason]:
    if _exceeds(host.cpu_percent, need.max_cpu_percent):
        reason = over(ReasonKind.HOST_TOO_BUSY, host.cpu_percent, need.max_cpu_percent)
        yield replace(reason, remedy=REMEDIES[reason.kind])
    available = host.memory_available_mb
    if need.min_host_memory_mb is not None and available is not None and available < need.min_host_memory_mb:
        text = f"{available:.0f} MB of RAM available < {need.min_host_memory_mb:.0f} MB"
        yield Reason(ReasonKind.HOST_TOO_FULL, text, remedy=REMEDIES[ReasonKind.HOST_TOO_FULL])


def would_have_run_out(need: Need, reasons: Sequence[Reason], snapshot: Snapshot) -> bool:
    """Return whether a job waits for memory that is free now but promised to others. A scheduler that goes by free
    memory alone would start it, and one of the jobs would run out of memory. False where the job's memory is unknown,
    or where it waits for a whole device."""
    if not need.devices or need.required_mb is None or need.is_exclusive or not need.is_memory_known:
        return False
    promised = {each.device_id for each in reasons if each.kind in (ReasonKind.NO_ROOM, ReasonKind.LEASED)}
    shut = (ReasonKind.BANNED, ReasonKind.DRAINED, ReasonKind.UNHEALTHY)
    closed = {each.device_id for each in reasons if each.kind in shut}
    large_enough = [
        device.id
        for device in snapshot.usable_devices()
        if device.memory_free_mb is not None and device.memory_free_mb >= need.required_mb
        if device.id not in closed and check_suitable(need, device) is None
    ]
    # The planner gives no reasons where leases fill every device.
    return len(large_enough) >= need.devices and not (reasons and promised.isdisjoint(large_enough))


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
    """Check free memory, foreign processes, reservations and the limits of sharing. A device of unknown size cannot be
    shared, and work of unknown memory takes no part of a device that is reserved for a request ahead."""
    if state.free_mb is None:
        lacks_memory = not need.is_exclusive
    else:
        needed_mb = state.needed_mb(need)
        lacks_memory = needed_mb is not None and state.free_mb < needed_mb
    if lacks_memory:
        return ReasonKind.NO_ROOM
    if state.foreign.is_over and need.max_utilization_percent is None and not need.ignores_foreign_load:
        return ReasonKind.FOREIGN_LOAD
    if need.is_exclusive:
        # Work that has not said how much memory it needs gets a device that is nearly empty.
        is_open = need.required_mb is None
        is_occupied = is_open and _exceeds(state.device.memory_used_mb, tolerated_foreign_mb(state.device))
        return ReasonKind.OCCUPIED if is_occupied else None
    # What it may yet take is not known, so it could delay the request that has reserved a share of this device.
    if not need.is_memory_known and state.is_awaited:
        return ReasonKind.AWAITED
    if packing.max_jobs_per_device is not None and state.lease_count >= packing.max_jobs_per_device:
        return ReasonKind.TOO_MANY
    return None if need.ignores_load else _check_load(need, state, packing)


def _check_load(need: Need, state: DeviceState, packing: Packing) -> ReasonKind | None:
    """Check how much the job and the others on the device would slow each other."""
    # The only job on a device may exceed the limit by itself: it would do so on any device.
    added = need.load_percent or 0.0 if state.lease_count else 0.0
    if _exceeds(state.load_percent + added, packing.max_load_percent):
        return ReasonKind.LOADED
    if need.is_resumed or not state.lease_count:
        return None
    least, depth = packing.min_gain_percent, packing.depth
    if least is not None and not gains(need, state, depth, least):
        return ReasonKind.NO_GAIN
    return ReasonKind.TOO_DEEP if depth is not None and is_too_deep(need, state, depth) else None


def _conflicts(need: Need, state: DeviceState) -> list[PromisedShare]:
    return [each for each in state.promises if need.is_exclusive or each.share.is_exclusive]


def _limits(need: Need, device: Device) -> tuple[tuple[ReasonKind, float | None, float | None], ...]:
    max_power_w = None if need.ignores_idle_power and _is_idle(device) else need.max_power_w
    return (
        (ReasonKind.TOO_BUSY, device.utilization_percent, need.max_utilization_percent),
        (ReasonKind.TOO_HUNGRY, device.power_draw_w, max_power_w),
        (ReasonKind.TOO_FULL, device.known_used_mb, need.max_memory_used_mb),
    )


def _is_idle(device: Device) -> bool:
    is_busy = device.utilization_percent != 0.0 or device.processes
    return not (is_busy or _exceeds(device.memory_used_mb, tiny_mb(device)))


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
    need = need.on(state.device.id)
    remedy = _memory_remedy(need, state, packing) if kind is ReasonKind.NO_ROOM else REMEDIES.get(kind, "")
    return replace(_describe(kind, need, state, packing), remedy=remedy)


def _describe(  # noqa: C901, PLR0911, PLR0912 - one case for each kind
    kind: ReasonKind, need: Need, state: DeviceState, packing: Packing
) -> Reason:
    device, free_mb = state.device, state.free_mb
    holders = tuple(each.holder for each in state.promises)
    match kind:
        case ReasonKind.BANNED:
            return Reason(kind, "banned", device.id)
        case ReasonKind.UNHEALTHY:
            return Reason(kind, f"unhealthy: {device.fault}", device.id)
        case ReasonKind.NOT_ASKED_FOR:
            return Reason(kind, _describe_mismatch(need, device), device.id)
        case ReasonKind.AWAITED:
            if need.is_exclusive or state.is_exclusive:
                return awaited(device.id, tuple(each.holder for each in _conflicts(need, state)))
            ahead = tuple(each.holder for each in state.promises if each.is_reservation)
            return awaited(device.id, ahead, "; how much memory this job needs is not known yet")
        case ReasonKind.LEASED:
            holders = tuple(each.holder for each in _conflicts(need, state) if not each.is_reservation)
            return Reason(kind, f"held by {list_holders(holders)}", device.id, holders=holders, is_leased=True)
        case ReasonKind.NO_ROOM if free_mb is None:
            return Reason(kind, "its memory is unknown, so it cannot be shared", device.id)
        case ReasonKind.NO_ROOM:
            assert free_mb is not None
            needed_mb = state.needed_mb(need) or 0.0
            where = describe_memory(state)
            text = (
                f"{format_size(max(0.0, free_mb))} free, {format_size(needed_mb)} needed{': ' if where else ''}{where}"
            )
            is_leased = state.unreserved_mb < needed_mb
            brief = _brief_of_first_runs(need, state, free_mb)
            return Reason(kind, text, device.id, free_mb, needed_mb, holders, is_leased=is_leased, brief=brief)
        case ReasonKind.TOO_MANY:
            limit = packing.max_jobs_per_device or 0
            text = f"limit reached: {limit} jobs may share it (max_jobs_per_device)"
            return Reason(kind, text, device.id, float(limit), float(limit), holders)
        case ReasonKind.LOADED:
            more = f"; this job would add about {need.load_percent:.0f}%" if need.load_percent else ""
            text = f"{state.load_percent:.0f}% busy, load limit {packing.max_load_percent or 0.0:.0f}%{more}"
            return Reason(kind, text, device.id, state.load_percent, need.load_percent, holders)
        case ReasonKind.NO_GAIN | ReasonKind.TOO_DEEP:
            return _describe_sharing(kind, need, state, packing)
        case ReasonKind.FOREIGN_LOAD:
            most = packing.max_foreign_load_percent or 0.0
            text = f"{_describe_foreign_load(state.foreign)}; the limit is {most:.0f}%"
            return Reason(kind, text, device.id, state.foreign.percent, most)
        case ReasonKind.OCCUPIED:
            used, allowed = device.memory_used_mb or 0.0, tolerated_foreign_mb(device)
            text = f"processes outside gpuyard hold {format_size(used)} of it, over {format_size(allowed)}"
            return Reason(kind, text, device.id, used, allowed)
    figure, figure_limit = next((figure, limit) for each, figure, limit in _limits(need, device) if each is kind)
    return over(kind, figure, figure_limit, device.id)


def _brief_of_first_runs(need: Need, state: DeviceState, free_mb: float) -> str:
    """Return which first runs keep the job from starting, if the memory that is kept for them would suffice."""
    first_runs = [each.holder for each in state.promises if each.share.spread_mb and not each.is_reservation]
    asked_mb = need.required_mb if need.reserved_mb is None else need.reserved_mb
    suffices = asked_mb is not None and free_mb + state.margin_mb >= asked_mb
    return first_runs_brief(first_runs) if first_runs and suffices else ""


def _describe_sharing(kind: ReasonKind, need: Need, state: DeviceState, packing: Packing) -> Reason:
    """Return the figures of `sharing` in words."""
    holders, depth = tuple(each.holder for each in state.promises), packing.depth
    if kind is ReasonKind.TOO_DEEP and depth is not None:
        durations, most = durations_with(need, state, depth), depth.durations
        text = (
            f"a free GPU is expected sooner: {state.lease_count + 1} jobs on this one would take about {durations:.2f} "
            f"times as long as one alone, all jobs on {depth.devices} GPUs {most:.2f} times"
        )
        return Reason(kind, text, state.device.id, most, durations, holders)
    (before, after), least = throughputs(need, state, depth), packing.min_gain_percent or 0.0
    jobs = "1 job does" if state.lease_count == 1 else f"{state.lease_count} jobs share it and do"
    gain = f"; at least {least:g}% more is needed" if least and after > before else ""
    text = f"{jobs} {before:.2f} times the work of one; this job would make it {after:.2f} times{gain}"
    return Reason(kind, text, state.device.id, after, before * (1.0 + least / 100.0), holders)


def _describe_mismatch(need: Need, device: Device) -> str:
    if need.only is not None and device.id not in need.only:
        return "not among the requested GPUs"
    if need.vendor is not None and device.vendor is not need.vendor:
        return f"of another vendor: this job gets {need.vendor} GPUs"
    if need.only_discrete and device.is_integrated:
        return "integrated graphics, which a job gets only if it names them"
    return "another model than requested"


def _describe_foreign_load(load: ForeignLoad) -> str:
    names = []
    for foreign in load.processes[:_NAMED_PROCESSES]:
        user = f", user {foreign.user}" if foreign.user else ""
        name = printable(foreign.process.name or "process", _LONGEST_NAME)
        names.append(f"{name} (pid {foreign.process.pid}{user})")
    if len(load.processes) > len(names):
        names.append(f"{len(load.processes) - len(names)} more")
    who = ", ".join(names) or "processes outside gpuyard"
    return f"{who} keep{'s' if len(load.processes) == 1 else ''} it {load.percent:.0f}% busy without a lease"


def _memory_remedy(need: Need, state: DeviceState, packing: Packing) -> str:
    if state.free_mb is None:
        return "without --vram it gets the whole GPU"
    once_leases_end = state.without().free_mb or 0.0
    if need.required_mb is None or once_leases_end >= need.required_mb:
        gigabytes = int(state.free_mb // 1024)
        smaller = replace(need, memory=FixedMemory(gigabytes * 1024.0))
        would_fit = gigabytes > 0 and need.devices == 1 and isinstance(need.memory, UncertainMemory)
        if would_fit and check_capacity(smaller, state, packing) is None:
            return START_WITH.format(gigabytes)
        return ""
    left = f"programs outside gpuyard leave {format_size(max(0.0, once_leases_end))}"
    if isinstance(need.memory, UncertainMemory):
        left += f", and a job without an estimate asks for {format_size(need.required_mb)}"
    return f"{left}: with {VRAM_OPTION} it asks for less"
