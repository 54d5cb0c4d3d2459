"""The machine that work is placed on, the limits of sharing, and which devices suit a need, busy or not."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpuyard.model.lease import Lease, Need, Ticket
from gpuyard.model.machine_snapshot import Device, Snapshot
from gpuyard.policy.device_state import capacity
from gpuyard.policy.foreign_load import ForeignLoad
from gpuyard.policy.host_room import HostView
from gpuyard.policy.numbers import SURENESS, TINY_MB, TINY_PART, UNLISTED_PART
from gpuyard.policy.sharing import DepthLimit
from gpuyard.policy.wait_reasons import Reason, ReasonKind


class Packing(Struct, frozen=True, kw_only=True):
    """Limits for sharing a device. `None` is no limit."""

    max_jobs_per_device: int | None = None
    max_load_percent: float | None = None  # how busy all jobs and foreign processes together may keep a device
    max_foreign_load_percent: float | None = None  # the same for foreign processes alone, on a device that gets a job
    sureness: float = SURENESS  # standard deviations that stay free beyond what is expected of first runs
    min_gain_percent: float | None = None  # by how much a job must raise the work that is done on a device (`sharing`)
    depth: DepthLimit | None = None  # how many jobs share a device while others may become free (`sharing`)


def is_of_kind(need: Need, device: Device) -> bool:
    if need.vendor is not None and device.vendor is not need.vendor:
        return False
    if need.only_discrete and device.is_integrated:
        return False
    return need.model is None or need.model.lower() in (device.name or "").lower()


def kind_of(need: Need) -> tuple[object, ...]:
    """Return all of the need that says which devices suit it, busy or not."""
    return need.only, need.banned, need.vendor, need.model, need.only_discrete, need.is_resumed


def would_have_run_out(need: Need, reasons: Sequence[Reason], snapshot: Snapshot) -> bool:
    """Return whether a job waits for memory that is free now but promised to others. A scheduler that goes by free
    memory alone would start it, and one of the jobs would run out of memory. False where the job's memory is unknown,
    or where it waits for a whole device."""
    if not need.devices or need.required_mb is None or need.is_exclusive or not need.is_memory_known:
        return False
    promised = {each.device_id for each in reasons if each.kind in (ReasonKind.NO_ROOM, ReasonKind.LEASED)}
    shut = (ReasonKind.CLOSED, ReasonKind.UNHEALTHY)
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
        return ReasonKind.CLOSED
    return None if is_of_kind(need, device) else ReasonKind.NOT_ASKED_FOR


def tolerated_foreign_mb(device: Device) -> float:
    """Return how much memory foreign processes may hold on a device that one job gets exclusively."""
    part = UNLISTED_PART if device.hides_processes else TINY_PART
    return max(TINY_MB, part * (capacity(device) or 0.0))


def tiny_mb(device: Device) -> float:
    """Return how much memory is negligible on a device of its size."""
    return max(TINY_MB, TINY_PART * (capacity(device) or 0.0))


def exceeds(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


class Machine(Struct, frozen=True, kw_only=True):
    """The devices and the host, the leases on them, and what was measured of these."""

    now: float
    snapshot: Snapshot
    leases: tuple[Lease, ...] = ()
    measured: Mapping[tuple[str, str], float | None] = {}  # MB that its processes hold, by (lease id, device id)
    loads: Mapping[str, float | None] = {}  # the smoothed measured load of each device
    foreign: Mapping[str, ForeignLoad] = {}  # the foreign load of each device
    packing: Packing = Packing()
    lease_loads: Mapping[str, float] = {}  # measured load of leases whose shares do not know it
    closed: Mapping[str, Reason] = {}  # why nothing new starts on a device (`closed_devices`)
    ahead: tuple[Ticket, ...] = ()  # the tickets ahead of the request, in queue order
    host: HostView = HostView()  # limits and measured use of RAM and CPUs
