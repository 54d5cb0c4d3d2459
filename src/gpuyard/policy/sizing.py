"""The memory that a job asks for: by its declaration, by what was learned, more after it ran out; and the jobs that
would fit on no device, however often they are tried.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Growth, Job, MemoryLack, Usage
from gpuyard.model.job_spec import TagSharing
from gpuyard.model.lease import FixedMemory, HostShare, Need, PartOfDevice, UncertainMemory, WholeDevice
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.model.units import format_size
from gpuyard.policy.device_state import capacity
from gpuyard.policy.estimates import (
    ExpectedPeak,
    Profile,
    assumed_peak,
    is_consistent,
    memory_estimate,
    peak_of_any,
    peak_of_program,
)
from gpuyard.policy.machine import check_suitable, kind_of, tiny_mb
from gpuyard.policy.numbers import FIRST_RUN_PART, MOST_RAM_PART, MOST_RERUNS, NEARLY_ALL, RAM_GROWTH, SURENESS

# The factors by which memory grows after the first and the second time that a job ran out.
_GROWTH = (1.25, 1.6)
# A declared amount this far above the use is pointed out.
_FAR_OFF, _FAR_OFF_MB = 2.0, 1024.0


class KnownRuns(Struct, frozen=True, kw_only=True):
    """What is known about runs like that of a job.

    exact, program, framework, machine: profiles of the same command, of the program, of first runs of programs with the
        same framework, and of any program.
    running_mb: expected peaks of running jobs of the program. batch: the same of running jobs of the same batch.
    """

    exact: Profile | None = None
    program: Profile | None = None
    framework: Profile | None = None
    machine: Profile | None = None
    running_mb: tuple[float, ...] = ()
    batch: ExpectedPeak | None = None


class FirstRuns(Struct, frozen=True, kw_only=True):
    """How jobs without an estimate share devices: not at all at first, or with this `sureness` (`Packing`)."""

    share: bool = True
    sureness: float = SURENESS


SHARED = FirstRuns()


def size_need(
    job: Job, known: KnownRuns, devices: "DeviceSizes | Sequence[Device]", first_runs: FirstRuns = SHARED
) -> Need:
    """Return the need of the job's next run, with its memory decided. `devices` are those of the machine."""
    sizes = devices if isinstance(devices, DeviceSizes) else DeviceSizes(devices)
    loads = (each.load_percent for each in (known.exact, known.program) if each is not None)
    need = replace(job.spec.need, load_percent=next((load for load in loads if load is not None), None))
    growth = job.growth
    if growth.ram_mb is not None:
        share = need.host or HostShare()
        need = replace(need, host=replace(share, ram_mb=max(growth.ram_mb, share.ram_mb or 0.0)))
    if not need.devices:
        return need
    if growth.is_alone:
        return _alone(need, sizes)
    memory_mb = growth.memory_mb
    if memory_mb is None and job.spec.learns_memory:
        memory_mb = predicted_mb(known.exact, known.program)
        if memory_mb is None:
            return _first_run(need, job.spec.tag_sharing, known, sizes, first_runs)
    if memory_mb is None:
        return need
    if _takes_all(memory_mb, need, sizes):
        return _alone(need, sizes)
    is_whole = isinstance(need.memory, WholeDevice)
    return replace(need, memory=WholeDevice(memory_mb) if is_whole else FixedMemory(memory_mb))


def _first_run(
    need: Need, sharing: TagSharing | None, known: KnownRuns, sizes: "DeviceSizes", first_runs: FirstRuns
) -> Need:
    found = sizes.suitable(need)
    if sharing is not None and sharing.most_per_device > 1 and found.sizes and found.sizes[-1] > 0:
        return replace(need, memory=PartOfDevice(1.0 / sharing.most_per_device))
    if not first_runs.share or not found.sizes or not found.sizes[-1]:
        return replace(need, memory=WholeDevice())
    if not found.listed:  # memory can be measured only while one job is on the device
        part_mb = _part_of_free_mb(found, need.devices)
        return _alone(need, sizes) if _takes_all(part_mb, need, sizes) else replace(need, memory=WholeDevice(part_mb))
    # Relative to the smallest device, so that an unknown program can run there too.
    return _share_by_expectation(need, expected_before(known, found.listed[-1]), found, first_runs.sureness)


def _share_by_expectation(need: Need, expected: ExpectedPeak, found: "SuitableSizes", sureness: float) -> Need:
    """Return the need on the devices that have what is expected, or on the largest ones. Alone on a device it needs no
    more than a part of it: an expectation never keeps a job from running beside a desktop."""
    enough_mb = min(expected.mean_mb, found.sizes[min(need.devices, len(found.sizes)) - 1])
    large = [(device_id, size) for device_id, size in found.devices if size >= enough_mb]
    required_mb = min(expected.at_most_mb(sureness), FIRST_RUN_PART * min(size for _, size in large))
    only = need.only if len(large) == len(found.devices) else tuple(device_id for device_id, _ in large)
    return replace(need, only=only, memory=UncertainMemory(required_mb, enough_mb, expected.spread_mb))


def _part_of_free_mb(found: "SuitableSizes", devices: int) -> float:
    """Return the memory that must be free beside a desktop where the driver lists no processes."""
    return max(found.least_mb, FIRST_RUN_PART * found.free[min(devices, len(found.free)) - 1])


def expected_before(known: KnownRuns, device_mb: float) -> ExpectedPeak:
    """Return what to expect of a job on a device of this size before it has used any memory. It needs more than what
    was not enough for the same command."""
    if known.batch is not None:
        return known.batch
    of_any = assumed_peak(device_mb)
    for group in (known.machine, known.framework):
        of_any = peak_of_any(group.peaks_mb, of_any) if group is not None else of_any
    peaks_mb = known.program.peaks_mb if known.program is not None else ()
    expected = peak_of_program((*peaks_mb, *known.running_mb), of_any)
    floor_mb = (known.exact.floor_mb if known.exact is not None else None) or 0.0
    return replace(expected, mean_mb=max(expected.mean_mb, floor_mb))


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

    def update(self, devices: Sequence[Device]) -> bool:
        """Take a new reading of the devices. Return False, and change nothing, if a size is another than before."""
        if len(devices) != len(self.devices) or not all(map(_is_alike, devices, self.devices)):
            return False
        self.devices = devices
        return True

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


def _is_alike(one: Device, other: Device) -> bool:
    """Return whether a device has the same size as before for every need."""
    if one is other:
        return True
    is_same = one.id == other.id and one.name == other.name and capacity(one) == capacity(other)
    return is_same and not (one.hides_processes or other.hides_processes)


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
        before = job.growth.ram_mb or job.spec.need.ram_mb
        known = max((figure for figure in (measured, before) if figure is not None), default=None)
        most = math.inf if host_mb is None else host_mb * MOST_RAM_PART
        return replace(growth, ram_mb=None if known is None else min(most, known * RAM_GROWTH))
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


def ram_limit_mb(job: Job) -> float | None:
    """Return how much RAM the next attempt may take where limits are enforced: what was declared, and more after it ran
    out of RAM; None without a declaration."""
    declared = job.spec.need.ram_mb
    return None if declared is None else max(declared, job.growth.ram_mb or 0.0)


def lacked_mb(attempt: Attempt, shortage: Shortage) -> float | None:
    """Return the least memory that would have been enough, as far as it is known."""
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    held = max((figure for figure in (peak, shortage.held_mb) if figure is not None), default=None)
    wanted = None if held is None and shortage.asked_mb is None else (held or 0.0) + (shortage.asked_mb or 0.0)
    # A first run reserves all free memory, which says nothing about its need.
    return wanted if wanted is not None or attempt.predicted_mb is None else attempt.reserved_mb


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


# They ask for memory of a pool that they took before: what the device shows is the pool.
_POOLED = ("JAX", "TensorFlow")
# Held by others, this is negligible.
_NOTHING_MB = 128.0


def hopeless_reason(need: Need, attempt: Attempt, lack: MemoryLack, devices: Sequence[Device]) -> str | None:
    """Return why the job would run out again on each of these devices; None if more memory may help. A device with a
    fault may work again, so it belongs to them."""
    suitable = [device for device in devices if check_suitable(need, device) is None]
    if any(not device.healthy or capacity(device) is None for device in suitable):
        return None
    most_mb = largest_mb(suitable)
    if lack.shortage.where is not ShortageKind.DEVICE or most_mb is None:
        return None
    needed = needed_mb(attempt, lack.shortage)
    if needed is not None and needed > most_mb:
        return f"out of memory: needed at least {format_size(needed)}; the largest GPU has {format_size(most_mb)}"
    if _had_all(attempt, lack, suitable, most_mb):
        return f"out of memory even alone on the largest GPU ({format_size(most_mb)})"
    return None


def needed_mb(attempt: Attempt, shortage: Shortage) -> float | None:
    """Return the least that it is known to have needed on one device: what it held at most, or what it held when it
    asked for more, together with that."""
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    held = shortage.held_mb
    if held is None and shortage.framework not in _POOLED:
        held = _last_measured_mb(attempt)
    wanted = None if shortage.asked_mb is None else (held or 0.0) + shortage.asked_mb
    return max((each for each in (peak, wanted) if each is not None), default=None)


def _last_measured_mb(attempt: Attempt) -> float | None:
    """Return what it held in the last sample; None if it had several devices, as the curve is their sum."""
    usage = attempt.usage
    return usage.curve[-1][1] if usage is not None and usage.curve and len(attempt.devices) == 1 else None


def _had_all(attempt: Attempt, lack: MemoryLack, suitable: Sequence[Device], most_mb: float) -> bool:
    """Return whether it had devices of the largest size to itself."""
    sizes = {device.id: capacity(device) for device in suitable}
    if not attempt.devices or any((sizes.get(device_id) or 0.0) < most_mb for device_id in attempt.devices):
        return False
    if any(held is None or held > _NOTHING_MB for _, held in lack.others):
        return False
    if attempt.reserved_mb is None:
        return True
    shortage = lack.shortage
    had = attempt.usage.peak_mb if attempt.usage is not None else None
    if shortage.held_mb is not None:
        had = shortage.held_mb + (shortage.free_mb or 0.0)
    return (had or 0.0) >= NEARLY_ALL * most_mb
