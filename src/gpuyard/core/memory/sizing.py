"""How much memory a job gets: the declared amount, else the learned one, else the rest of a device; more after it ran
out of memory.

- A declared amount wins. A first run, without an estimate, gets all free memory of a device where that is a large
  part of it, and teaches how much it needs. No job joins it until its memory has settled. A first run whose tag shares
  devices gets its part of a device.
- Where the driver lists no processes, a desktop looks like any other program, and may never end. There a first run
  needs only a part of the free memory.
- Memory has settled once it has been observed for a while without growth: then the lease shrinks to the use with a wide
  margin, and never grows. A run of a batch settles sooner, so that the next one can start; its figure is used for other
  runs of the batch only after the full time.
- A job that ran out of memory gets more each time, and at last one of the largest devices alone. A learned amount never
  keeps a job from running at all: at worst it runs alone.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Growth, Job, Usage
from gpuyard.core.lease import FixedMemory, Need, PartOfDevice, RestOfDevice, Share, WholeDevice
from gpuyard.core.memory.estimates import Profile, is_consistent, memory_estimate
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.scheduling.device_fit import check_suitable, kind_of, tiny_mb
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.tag_sharing import TagSharing
from gpuyard.core.snapshot import Device
from gpuyard.core.units import format_size

MOST_RERUNS = 3
# The factors by which memory grows after the first and the second time that a job ran out.
_GROWTH = (1.25, 1.6)
_RAM_GROWTH = 1.5
# No job waits for more than this part of the RAM: a machine in use never has more available.
_MOST_RAM = 0.75
# How long memory must be flat before it counts as settled, and the margin that the lease keeps then.
SETTLE_S = 60.0
_RUN_SETTLE_S = 10.0
_SETTLED_MARGIN, _SETTLED_LEAST_MB = 0.5, 1024.0
# Half of a card is enough for the first run of most programs: waiting for an empty card would cost far more than the
# few that run out of memory there and run again.
FIRST_RUN_PART = 0.5
_NEARLY_ALL = 0.9
# A declared amount this far above the use is pointed out.
_FAR_OFF, _FAR_OFF_MB = 2.0, 1024.0


def size_need(  # noqa: PLR0913 - all that is known about the job
    job: Job,
    exact: Profile | None,
    program: Profile | None,
    devices: "DeviceSizes | Sequence[Device]",
    first_run_part: float = FIRST_RUN_PART,
    *,
    sibling_mb: float | None = None,
) -> Need:
    """Return the need of the job's next run, with its memory decided.

    devices: those of the machine.
    first_run_part: the part of a device that must be free for a first run; 1 is a whole device.
    sibling_mb: the memory that running jobs of the same batch are known to need.
    """
    sizes = devices if isinstance(devices, DeviceSizes) else DeviceSizes(devices)
    loads = (each.load_percent for each in (exact, program) if each is not None)
    need = replace(job.spec.need, load_percent=next((load for load in loads if load is not None), None))
    growth = job.growth
    if growth.ram_mb is not None:
        need = replace(need, min_host_memory_mb=max(growth.ram_mb, need.min_host_memory_mb or 0.0))
    if not need.devices:
        return need
    if growth.is_alone:
        return _alone(need, sizes)
    memory_mb = growth.memory_mb
    if memory_mb is None and job.spec.learns_memory:
        memory_mb = predicted_mb(exact, program)
        memory_mb = sibling_mb if memory_mb is None else memory_mb
        if memory_mb is None:
            return _first_run(need, job.spec.tag_sharing, program, sizes, first_run_part)
    if memory_mb is None:
        return need
    if _takes_all(memory_mb, need, sizes):
        return _alone(need, sizes)
    is_whole = isinstance(need.memory, WholeDevice)
    return replace(need, memory=WholeDevice(memory_mb) if is_whole else FixedMemory(memory_mb))


def _first_run(
    need: Need, sharing: TagSharing | None, program: Profile | None, sizes: "DeviceSizes", part: float
) -> Need:
    found = sizes.suitable(need).sizes
    if sharing is not None and sharing.most_per_device > 1 and found and found[-1] > 0:
        return replace(need, memory=PartOfDevice(1.0 / sharing.most_per_device))
    least_mb = _first_run_mb(need, program, sizes, part)
    if least_mb is None:
        return replace(need, memory=WholeDevice())
    return _alone(need, sizes) if _takes_all(least_mb, need, sizes) else replace(need, memory=RestOfDevice(least_mb))


class SuitableSizes(Struct, frozen=True, kw_only=True):
    """The sizes of the devices that suit a need. Tuples of sizes are sorted, the largest first."""

    devices: tuple[tuple[str, float], ...]  # ids with their sizes
    sizes: tuple[float, ...]
    usable: tuple[float, ...]  # what each device offers when it is nearly empty
    listed: tuple[float, ...]  # sizes of the devices whose driver lists processes
    free: tuple[float, ...]  # free memory of the other devices; `least_mb` is the least that a first run needs there
    least_mb: float


class DeviceSizes:
    """The sizes of a machine's devices, computed once for each kind of need."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self._found: dict[tuple[object, ...], SuitableSizes] = {}

    def suitable(self, need: Need) -> SuitableSizes:
        kind = kind_of(need)
        found = self._found.get(kind)
        if found is None:
            devices = [each for each in self.devices if check_suitable(need, each) is None]
            sized = tuple((device.id, capacity(device) or 0.0) for device in devices)
            usable = (math.inf if (size := capacity(each)) is None else size - tiny_mb(each) for each in devices)
            unlisted = [device for device in devices if device.hides_processes]
            found = self._found[kind] = SuitableSizes(
                devices=sized,
                sizes=_largest_first(size for _, size in sized),
                usable=_largest_first(usable),
                listed=_largest_first(capacity(device) or 0.0 for device in devices if not device.hides_processes),
                free=_largest_first((capacity(device) or 0.0) - (device.memory_used_mb or 0.0) for device in unlisted),
                least_mb=min(map(tiny_mb, unlisted), default=0.0),
            )
        return found


def _largest_first(figures: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(figures, reverse=True))


def _alone(need: Need, sizes: DeviceSizes) -> Need:
    """Return the need for whole devices, of the largest that it may use."""
    found = sizes.suitable(need)
    if len(found.sizes) < need.devices:
        return replace(need, memory=WholeDevice())
    least = found.sizes[need.devices - 1]
    only = tuple(device_id for device_id, size in found.devices if size >= least)
    return replace(need, memory=WholeDevice(), only=only)


def _first_run_mb(need: Need, program: Profile | None, sizes: DeviceSizes, part: float) -> float | None:
    """Return the memory that must be free for a first run; None for a whole device, as where a size is unknown. It is
    `part` of the largest device, as far as the smallest has that much, or of the free memory where no driver lists
    processes. Where runs of the program differ, it is at least the estimate from the largest of them."""
    found = sizes.suitable(need)
    if part >= 1.0 or not found.sizes or not found.sizes[-1]:
        return None
    known = (None if program is None else memory_estimate(program)) or 0.0
    if found.listed:
        return max(known, min(part * found.listed[0], _NEARLY_ALL * found.listed[-1]))
    return max(known, found.least_mb, part * found.free[min(need.devices, len(found.free)) - 1])


def predicted_mb(exact: Profile | None, program: Profile | None) -> float | None:
    """Return the estimate of the most specific profile that has one."""
    for profile in (exact, program):
        if profile is not None and is_consistent(profile):
            found = memory_estimate(profile)
            if found is not None:
                return found
    return None


def grow(
    job: Job, attempt: Attempt, shortage: Shortage, devices: Sequence[Device], host_mb: float | None = None
) -> Growth | None:
    """Return what the job gets next time, on a machine with `host_mb` of RAM; None after MOST_RERUNS reruns."""
    growth = job.growth
    if growth.count >= MOST_RERUNS:
        return None
    growth = replace(growth, count=growth.count + 1)
    if shortage.where is ShortageKind.HOST:
        measured = attempt.usage.ram_mb if attempt.usage is not None else None
        before = job.growth.ram_mb or job.spec.need.min_host_memory_mb
        known = max((figure for figure in (measured, before) if figure is not None), default=None)
        most = math.inf if host_mb is None else host_mb * _MOST_RAM
        return replace(growth, ram_mb=None if known is None else min(most, known * _RAM_GROWTH))
    lacked = lacked_mb(attempt, shortage)
    # Without a reservation it had a whole device already.
    if growth.count == MOST_RERUNS or lacked is None or attempt.reserved_mb is None:
        return replace(growth, is_alone=True)
    was_sized = growth.memory_mb is not None or attempt.predicted_mb is not None
    was_sized = was_sized or job.spec.need.required_mb is not None
    memory_mb = max(lacked, attempt.reserved_mb if was_sized else 0.0) * _GROWTH[growth.count - 1]
    if _takes_all(memory_mb, job.spec.need, DeviceSizes(devices)):
        return replace(growth, is_alone=True)
    return replace(growth, memory_mb=memory_mb)


def lacked_mb(attempt: Attempt, shortage: Shortage) -> float | None:
    """Return the least memory that would have been enough, as far as it is known."""
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    held = max((figure for figure in (peak, shortage.held_mb) if figure is not None), default=None)
    wanted = None if held is None and shortage.asked_mb is None else (held or 0.0) + (shortage.asked_mb or 0.0)
    # A first run reserves all free memory, which says nothing about its need.
    return wanted if wanted is not None or attempt.predicted_mb is None else attempt.reserved_mb


def settled_shares(
    attempt: Attempt, shares: Sequence[Share], devices: Sequence[Device], now: float, settle_s: float
) -> tuple[Share, ...] | None:
    """Return the shares that the lease shrinks to. None where the attempt was not observed for long enough, still
    grows, or would leave nothing to others."""
    usage = attempt.usage
    if usage is None or any(share.device_id not in usage.peaks_mb for share in shares):
        return None
    if not _is_flat(attempt, usage, now, settle_s):
        return None
    settled = tuple(_settled(share, usage) for share in shares)
    sizes = {device.id: capacity(device) or 0.0 for device in devices}
    fits = all((share.memory_mb or 0.0) < sizes.get(share.device_id, 0.0) for share in settled)
    return settled if fits else None


def settle_time(job: Job, settle_s: float) -> float:
    """Return for how long the job's memory must be flat."""
    return settle_s if job.spec.pace is None else min(settle_s, _RUN_SETTLE_S)


def steady_estimate_mb(attempt: Attempt, now: float, settle_s: float) -> float | None:
    """Return the memory that other runs of a batch need, from a run that has been flat for `settle_s`; else None."""
    usage = attempt.usage
    if usage is None or usage.peak_mb is None or not _is_flat(attempt, usage, now, settle_s):
        return None
    return _with_margin(usage.peak_mb)


def _is_flat(attempt: Attempt, usage: Usage, now: float, settle_s: float) -> bool:
    ran_s = attempt.ran_s(now)
    return ran_s >= settle_s and ran_s - usage.grew_at_s >= max(settle_s, ran_s / 2)


def _settled(share: Share, usage: Usage) -> Share:
    enough = _with_margin(usage.peaks_mb[share.device_id])
    if not share.is_exclusive and share.memory_mb is not None:
        enough = min(enough, share.memory_mb)  # the rest may be promised to other leases
    load = share.load_percent if usage.load_percent is None else usage.load_percent
    return replace(share, memory_mb=enough, load_percent=load, is_exclusive=False)


def declaration_advice(declared_mb: float | None, usage: Usage | None) -> str | None:
    """Return advice for a user who declared far more memory, or less, than the job used; else None."""
    peak = None if usage is None else usage.peak_mb
    if declared_mb is None or not peak:
        return None
    figures = f"--vram was {format_size(declared_mb)}, but the job used {format_size(peak)}"
    if declared_mb > _FAR_OFF * peak + _FAR_OFF_MB:
        return f"{figures} at most: leave --vram out, and the need is learned"
    return f"{figures}: other jobs may run out of memory; raise --vram" if peak > declared_mb * 1.05 else None


def largest_mb(devices: Sequence[Device]) -> float | None:
    return max((size for device in devices if (size := capacity(device)) is not None), default=None)


def _takes_all(memory_mb: float, need: Need, sizes: DeviceSizes) -> bool:
    """Return whether this much is free only on devices that are nearly empty, if at all."""
    usable = sizes.suitable(need).usable
    return bool(usable) and (len(usable) < need.devices or memory_mb > usable[need.devices - 1])


def _with_margin(peak_mb: float) -> float:
    return peak_mb + max(_SETTLED_LEAST_MB, peak_mb * _SETTLED_MARGIN)
