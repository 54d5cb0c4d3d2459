"""The memory, RAM and CPUs that a job asks for: declared, learned, or more after it ran out; and the jobs that would
fit on no device, however often they are tried.

- A declared amount wins, then a learned one. A job with devices whose RAM is unknown is charged an expected amount.
- A job without devices reserves learned RAM and CPUs only from LEAST_RAM_MB or LEAST_CPUS on: small jobs take no lease,
  which would cost them more than a millisecond each.
- A learned or expected amount never keeps a job from running: it is at most what this machine can give.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Growth, Job, MemoryLack, Usage
from gpuyard.model.job_spec import TagSharing
from gpuyard.model.lease import FixedMemory, HostShare, Need, PartOfDevice, UncertainMemory, WholeDevice
from gpuyard.model.machine_snapshot import Device
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.model.units import format_size
from gpuyard.policy import numbers
from gpuyard.policy.device_state import capacity
from gpuyard.policy.estimates import ExpectedPeak, Profile, assumed_peak, is_consistent, memory_estimate, narrowed
from gpuyard.policy.machine import check_suitable, kind_of, tiny_mb

# The factors by which memory grows after the first and the second time that a job ran out.
_GROWTH = (1.25, 1.6)


class KnownRuns(Struct, frozen=True, kw_only=True):
    """What is known about runs like that of a job."""

    exact: Profile | None = None  # of the same command
    program: Profile | None = None
    framework: Profile | None = None  # of first runs of programs with the same framework
    machine: Profile | None = None  # of first runs of any program
    running_mb: tuple[float, ...] = ()  # expected peaks of running jobs of the program
    batch: ExpectedPeak | None = None  # the same of running jobs of the same batch


class FirstRuns(Struct, frozen=True, kw_only=True):
    """How jobs without an estimate share devices: not at all at first, or with this `sureness` (`Packing`)."""

    share: bool = True
    sureness: float = numbers.SURENESS


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
    if not found.listed:  # memory can be measured only while one job is on the device, beside a desktop
        part_mb = max(found.least_mb, numbers.FIRST_RUN_PART * found.free[min(need.devices, len(found.free)) - 1])
        return _alone(need, sizes) if _takes_all(part_mb, need, sizes) else replace(need, memory=WholeDevice(part_mb))
    # Relative to the smallest device, so that an unknown program can run there too.
    expected = expected_before(known, found.listed[-1])
    # It runs on the devices that have what is expected, or on the largest ones. Alone on a device it needs no more than
    # a part of it: an expectation never keeps a job from running beside a desktop.
    enough_mb = min(expected.mean_mb, found.sizes[min(need.devices, len(found.sizes)) - 1])
    large = [(device_id, size) for device_id, size in found.devices if size >= enough_mb]
    required_mb = min(expected.at_most_mb(first_runs.sureness), numbers.FIRST_RUN_PART * min(size for _, size in large))
    only = need.only if len(large) == len(found.devices) else tuple(device_id for device_id, _ in large)
    return replace(need, only=only, memory=UncertainMemory(required_mb, enough_mb, expected.spread_mb))


def expected_before(known: KnownRuns, device_mb: float) -> ExpectedPeak:
    """Return what to expect of a job on a device of this size before it has used memory: more than was not enough."""
    if known.batch is not None:
        return known.batch
    of_any = assumed_peak(device_mb)
    for group in (known.machine, known.framework):
        of_any = narrowed(of_any, group.peaks_mb, numbers.MACHINE_WEIGHT) if group is not None else of_any
    peaks_mb = known.program.peaks_mb if known.program is not None else ()
    expected = narrowed(of_any, (*peaks_mb, *known.running_mb), numbers.PROGRAM_WEIGHT)
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
        if len(devices) != len(self.devices):
            return False
        for one, other in zip(devices, self.devices, strict=True):
            is_same = one.id == other.id and one.name == other.name and capacity(one) == capacity(other)
            if one is not other and (not is_same or one.hides_processes or other.hides_processes):
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


def _largest_first(figures: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(figures, reverse=True))


def _alone(need: Need, sizes: DeviceSizes) -> Need:
    found = sizes.suitable(need)
    if len(found.sizes) < need.devices:
        return replace(need, memory=WholeDevice())
    least = found.sizes[need.devices - 1]
    only = tuple(device_id for device_id, size in found.devices if size >= least)
    return replace(need, memory=WholeDevice(), only=only)


def predicted_mb(exact: Profile | None, program: Profile | None) -> float | None:
    """Return the estimate of the most specific profile that has one."""
    known = (memory_estimate(each) for each in (exact, program) if each is not None and is_consistent(each))
    return next((found for found in known if found is not None), None)


def grow(
    job: Job, attempt: Attempt, shortage: Shortage, devices: Sequence[Device], host_mb: float | None = None
) -> Growth | None:
    """Return what the job gets next time, on a machine with `host_mb` of RAM; None after MOST_RERUNS reruns."""
    growth = job.growth
    if growth.count >= numbers.MOST_RERUNS:
        return None
    growth = replace(growth, count=growth.count + 1)
    if shortage.where is ShortageKind.HOST:
        measured = attempt.usage.ram_mb if attempt.usage is not None else None
        before = job.growth.ram_mb or job.spec.need.ram_mb
        known = max((figure for figure in (measured, before) if figure is not None), default=None)
        most = math.inf if host_mb is None else host_mb * numbers.MOST_RAM_PART
        return replace(growth, ram_mb=None if known is None else min(most, known * numbers.RAM_GROWTH))
    lacked = lacked_mb(attempt, shortage)
    # Without a reservation it had a whole device already.
    if growth.count == numbers.MOST_RERUNS or lacked is None or attempt.reserved_mb is None:
        return replace(growth, is_alone=True)
    was_sized = growth.memory_mb is not None or attempt.predicted_mb is not None
    was_sized = was_sized or job.spec.need.required_mb is not None
    memory_mb = max(lacked, attempt.reserved_mb if was_sized else 0.0) * _GROWTH[growth.count - 1]
    if _takes_all(memory_mb, job.spec.need, DeviceSizes(devices)):
        return replace(growth, is_alone=True)
    return replace(growth, memory_mb=memory_mb)


def ram_limit_mb(job: Job) -> float | None:
    """Return how much RAM the next attempt may take where limits are enforced; None without a declaration."""
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
    if declared_mb > 2.0 * peak + 1024.0:
        return f"{figures} at most: leave --vram out, and the need is learned"
    return f"{figures}: other jobs may run out of memory; raise --vram" if peak > declared_mb * 1.05 else None


def _takes_all(memory_mb: float, need: Need, sizes: DeviceSizes) -> bool:
    """Return whether this much is free only on devices that are nearly empty, if at all."""
    usable = sizes.suitable(need).usable
    return bool(usable) and (len(usable) < need.devices or memory_mb > usable[need.devices - 1])


def hopeless_reason(need: Need, attempt: Attempt, lack: MemoryLack, devices: Sequence[Device]) -> str | None:
    """Return why the job would run out again on each of these devices, faulty ones included, or None."""
    suitable = [device for device in devices if check_suitable(need, device) is None]
    sizes = {device.id: size for device in suitable if device.healthy and (size := capacity(device)) is not None}
    if len(sizes) < len(suitable) or not sizes or lack.shortage.where is not ShortageKind.DEVICE:
        return None
    needed, most_mb = needed_mb(attempt, lack.shortage), max(sizes.values())
    if needed is not None and needed > most_mb:
        return f"out of memory: needed at least {format_size(needed)}; the largest GPU has {format_size(most_mb)}"
    had_largest = bool(attempt.devices) and all(sizes.get(each, 0.0) >= most_mb for each in attempt.devices)
    # Less than 128 MB that others held is negligible.
    was_alone = not any(held is None or held > 128.0 for _, held in lack.others)
    had = attempt.usage.peak_mb if attempt.usage is not None else None
    if lack.shortage.held_mb is not None:
        had = lack.shortage.held_mb + (lack.shortage.free_mb or 0.0)
    had_nearly_all = attempt.reserved_mb is None or (had or 0.0) >= numbers.NEARLY_ALL * most_mb
    if had_largest and was_alone and had_nearly_all:
        return f"out of memory even alone on the largest GPU ({format_size(most_mb)})"
    return None


def needed_mb(attempt: Attempt, shortage: Shortage) -> float | None:
    """Return the least that it is known to have needed on one device: what it held, and asked for beyond that."""
    usage, held = attempt.usage, shortage.held_mb
    peak = usage.peak_mb if usage is not None else None
    # What the last sample says: not of several devices, as the curve is their sum, nor of a framework that asks for
    # memory of a pool that it took before, as the device shows the pool.
    is_shown = len(attempt.devices) == 1 and shortage.framework not in ("JAX", "TensorFlow")
    if held is None and usage is not None and usage.curve and is_shown:
        held = usage.curve[-1][1]
    wanted = None if shortage.asked_mb is None else (held or 0.0) + shortage.asked_mb
    return max((each for each in (peak, wanted) if each is not None), default=None)


# RAM and CPUs of the host


def size_host(
    need: Need, known: KnownRuns, grantable_mb: float | None, declared_mb: float | None = None
) -> HostShare | None:
    """Return what the next run reserves. `declared_mb` is the user's: the need has more after a shortage of RAM."""
    declared = share = need.host or HostShare()
    if declared.ram_mb is None:
        learned = learned_ram_mb(known.exact, known.program)
        if need.devices or (learned or 0.0) >= numbers.LEAST_RAM_MB:
            ram_mb = expected_ram_before(known, grantable_mb) if learned is None else learned
            ram_mb = min(math.inf if grantable_mb is None else grantable_mb, ram_mb)
            share = replace(share, ram_mb=ram_mb, is_ram_expected=learned is None) if ram_mb > 0 else share
    elif grantable_mb is not None:
        share = replace(share, ram_mb=min(declared.ram_mb, max(grantable_mb, declared_mb or 0.0)))
    if declared.cpus is None:
        cpus = learned_cpus(known.exact, known.program)
        is_enough = need.devices or share.ram_mb is not None or (cpus or 0.0) >= numbers.LEAST_CPUS
        share = replace(share, cpus=cpus, are_cpus_learned=True) if cpus and is_enough else share
    return share if share != HostShare() else None


def learned_ram_mb(exact: Profile | None, program: Profile | None) -> float | None:
    """Return the RAM of the next run by the most specific profile that says it, with its margin; None if unknown."""
    for profile in (each for each in (exact, program) if each is not None):
        peaks = profile.ram_peaks_mb
        is_alike = len(peaks) > 1 and max(peaks) <= numbers.ALIKE_FACTOR * min(peaks)
        if peaks and (profile.is_exact or is_alike):
            # The part of the peak that is always added, and the part that shrinks with more runs.
            lasting, first = (0.05, 0.10) if profile.is_exact else (0.10, 0.25)
            margin = max(64.0, max(peaks) * (lasting + first / math.sqrt(len(peaks))))
            return _round_up(max(peaks) + margin, numbers.RAM_STEP_MB)
    return None


def learned_cpus(exact: Profile | None, program: Profile | None) -> float | None:
    """Return the CPUs that earlier runs kept busy, in halves; None if unknown."""
    uses = next((each.cpu_uses for each in (exact, program) if each is not None and each.cpu_uses), None)
    return None if uses is None else _round_up(statistics.median(uses), numbers.CPU_STEP)


def expected_ram_before(known: KnownRuns, grantable_mb: float | None) -> float:
    """Return what to expect of a job of unknown RAM before it has run."""
    for profile in (known.program, known.machine):
        if profile is not None and profile.ram_peaks_mb:
            return _round_up(statistics.median(profile.ram_peaks_mb), numbers.RAM_STEP_MB)
    return min(numbers.LEAST_RAM_MB, numbers.ASSUMED_RAM_PART * (math.inf if grantable_mb is None else grantable_mb))


def expected_ram_mb(expected_mb: float, used_mb: float, ran_s: float) -> float:
    """Return what to expect of a running job of unknown RAM: what was expected, until it has shown what it uses."""
    return max(expected_mb, used_mb) if ran_s < numbers.SHOWN_AFTER_S else used_mb * 1.25


def _round_up(figure: float, step: float) -> float:
    return math.ceil(figure / step) * step
