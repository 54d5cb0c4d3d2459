"""How much a job is given: what was declared, else what was learned, else the rest of a device; and more after it ran
out.

- Declared values win. A job that declared nothing and of which nothing is known is given all that is free on a device,
  where that is a large part of it, and teaches. Nobody joins it until it has settled. One of a crew is given its share.
- Where no driver lists processes, a desktop cannot be told from a program, and waiting for it to leave may take for
  ever. There a first run needs a part of what is free.
- It has settled once it has been seen for a while without growing: then its lease is for what it uses with a wide
  margin, and never for more than before. A run of a batch settles sooner, so that the next one can start; it speaks for
  the others of its batch only after the whole time.
- A job that ran out of memory is given more each time, and at last a device alone, of the largest. What was learned
  never keeps a job from running at all: at worst it is alone.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import Attempt, Growth, Job, Usage
from gpuyard.core.lease import Need, Share
from gpuyard.core.memory.estimates import Profile, is_consistent, memory_estimate
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.scheduling.device_fit import check_suitable, tiny_mb
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.tag_sharing import TagSharing
from gpuyard.core.snapshot import Device
from gpuyard.core.units import format_size

MOST_RERUNS = 3
_GROWN = (1.25, 1.6)
_GROWN_RAM = 1.5
# Nobody is made to wait for more of the RAM than a machine in use ever has available.
_MOST_RAM = 0.75
# A program's memory is flat for so long before it counts as settled, and so much more than that is kept for it.
SETTLE_S = 60.0
_RUN_SETTLE_S = 10.0
_SETTLED_MARGIN, _SETTLED_LEAST_MB = 0.5, 1024.0
# Half of a card is enough for most programs' first run: to wait for an empty card costs far more than the few that run
# out there, and are run again.
FIRST_RUN_PART = 0.5
_NEARLY_ALL = 0.9
# A declaration that is off by so much is pointed out.
_FAR_OFF, _FAR_OFF_MB = 2.0, 1024.0


def size_need(  # noqa: PLR0913 - all that is known of it
    job: Job,
    exact: Profile | None,
    program: Profile | None,
    devices: "DeviceSizes | Sequence[Device]",
    first_run_part: float = FIRST_RUN_PART,
    *,
    sibling_mb: float | None = None,
) -> Need:
    """What it is to be given now; `devices` are those of the machine. A `first_run_part` of 1 is a device alone.
    `sibling_mb` is what others of its batch that still run are known to need."""
    cards = devices if isinstance(devices, DeviceSizes) else DeviceSizes(devices)
    need = replace(job.spec.need, load_percent=_known_load(exact, program))
    growth = job.growth
    if growth.ram_mb is not None:
        need = replace(need, min_host_memory_mb=max(growth.ram_mb, need.min_host_memory_mb or 0.0))
    if not need.devices:
        return need
    if growth.is_alone:
        return _alone(need, cards)
    memory_mb = growth.memory_mb
    if memory_mb is None and job.spec.learns_memory:
        memory_mb = predicted_mb(exact, program)
        memory_mb = sibling_mb if memory_mb is None else memory_mb
    if memory_mb is None and job.spec.learns_memory:
        if job.spec.crew is not None and _can_be_shared(need, job.spec.crew, cards):
            return replace(need, part=1.0 / job.spec.crew.most_per_device, is_exclusive=False)
        memory_mb = _first_run_mb(need, program, cards, first_run_part)
        need = replace(need, takes_rest=memory_mb is not None)
    if memory_mb is None:
        return need
    if _takes_all(memory_mb, need, cards):
        return _alone(need, cards)
    return replace(need, memory_mb=memory_mb, is_exclusive=need.is_exclusive and not job.spec.learns_memory)


def _can_be_shared(need: Need, crew: TagSharing, cards: "DeviceSizes") -> bool:
    sizes = cards.suiting(need).sizes
    return crew.most_per_device > 1 and bool(sizes) and sizes[-1] > 0


class SuitableSizes(Struct, frozen=True, kw_only=True):
    """Devices that would do for some need, with their sizes; these sizes, and what they could give as good as empty,
    from the largest down. `listed` are the sizes of those whose driver lists processes, `free` what is free on the
    others; `least_mb` is the least that a first run needs on these."""

    devices: tuple[tuple[str, float], ...]
    sizes: tuple[float, ...]
    roomy: tuple[float, ...]
    listed: tuple[float, ...]
    free: tuple[float, ...]
    least_mb: float


class DeviceSizes:
    """The devices of a machine, as far as sizes matter: looked through once for each kind of need."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self._found: dict[tuple[object, ...], SuitableSizes] = {}

    def suiting(self, need: Need) -> SuitableSizes:
        kind = (need.only, need.banned, need.vendor, need.model)
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = _suiting([each for each in self.devices if check_suitable(need, each) is None])
        return found


def _suiting(devices: Sequence[Device]) -> SuitableSizes:
    sized = tuple((device.id, capacity(device) or 0.0) for device in devices)
    sizes = _from_largest(size for _, size in sized)
    roomy = (math.inf if (size := capacity(each)) is None else size - tiny_mb(each) for each in devices)
    unlisted = [device for device in devices if device.hides_processes]
    return SuitableSizes(
        devices=sized,
        sizes=sizes,
        roomy=_from_largest(roomy),
        listed=_from_largest(capacity(device) or 0.0 for device in devices if not device.hides_processes),
        free=_from_largest(_free(device) for device in unlisted),
        least_mb=min(map(tiny_mb, unlisted), default=0.0),
    )


def _from_largest(figures: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(figures, reverse=True))


def _free(device: Device) -> float:
    return (capacity(device) or 0.0) - (device.memory_used_mb or 0.0)


def _alone(need: Need, cards: DeviceSizes) -> Need:
    return replace(need, memory_mb=None, is_exclusive=True, takes_rest=False, only=_largest(need, cards))


def _first_run_mb(need: Need, program: Profile | None, cards: DeviceSizes, part: float) -> float | None:
    """The part of the largest, as far as the smallest has that much, or of what is free where no driver lists
    processes; of a program whose runs were unlike each other, it may be like the largest of these. `None` is a device
    alone, as where a size is unknown."""
    suiting = cards.suiting(need)
    if part >= 1.0 or not suiting.sizes or not suiting.sizes[-1]:
        return None
    known = None if program is None else memory_estimate(program)
    if suiting.listed:
        return max(known or 0.0, min(part * suiting.listed[0], _NEARLY_ALL * suiting.listed[-1]))
    return max(known or 0.0, suiting.least_mb, part * suiting.free[min(need.devices, len(suiting.free)) - 1])


def predicted_mb(exact: Profile | None, program: Profile | None) -> float | None:
    for profile in (exact, program):
        if profile is not None and is_consistent(profile):
            found = memory_estimate(profile)
            if found is not None:
                return found
    return None


def grow(
    job: Job, attempt: Attempt, shortage: Shortage, devices: Sequence[Device], host_mb: float | None = None
) -> Growth | None:
    """What it is given the next time, of a machine with `host_mb` of RAM; `None` where it was given all there is."""
    growth = job.growth
    if growth.count >= MOST_RERUNS:
        return None
    count = growth.count + 1
    if shortage.where is ShortageKind.HOST:
        seen = attempt.usage.ram_mb if attempt.usage is not None else None
        before = growth.ram_mb or job.spec.need.min_host_memory_mb
        known = max((figure for figure in (seen, before) if figure is not None), default=None)
        most = math.inf if host_mb is None else host_mb * _MOST_RAM
        return replace(growth, count=count, ram_mb=None if known is None else min(most, known * _GROWN_RAM))
    if count == MOST_RERUNS:
        return replace(growth, count=count, is_alone=True)
    lacked = lacked_mb(attempt, shortage)
    if lacked is None or attempt.reserved_mb is None:  # nobody knows, or it had a device alone
        return replace(growth, count=count, is_alone=True)
    is_sized = attempt.predicted_mb is not None or job.spec.need.memory_mb is not None or growth.memory_mb is not None
    memory_mb = max(lacked, attempt.reserved_mb if is_sized else 0.0) * _GROWN[count - 1]
    if _takes_all(memory_mb, job.spec.need, DeviceSizes(devices)):
        return replace(growth, count=count, is_alone=True)
    return replace(growth, count=count, memory_mb=memory_mb)


def lacked_mb(attempt: Attempt, shortage: Shortage) -> float | None:
    """The least that would have been enough, as far as anybody can tell."""
    peak = attempt.usage.peak_mb if attempt.usage is not None else None
    held = max((figure for figure in (peak, shortage.held_mb) if figure is not None), default=None)
    wanted = None if held is None and shortage.asked_mb is None else (held or 0.0) + (shortage.asked_mb or 0.0)
    # What a first run reserved was all there was, and says nothing.
    return wanted if wanted is not None or attempt.predicted_mb is None else attempt.reserved_mb


def settled_shares(
    attempt: Attempt, shares: Sequence[Share], devices: Sequence[Device], now: float, settle_s: float
) -> tuple[Share, ...] | None:
    """What its lease is for from now on; `None` where it has not been seen for long enough, grows still, or would leave
    nothing to others."""
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
    """For how long its memory has to be flat."""
    return settle_s if job.spec.pace is None else min(settle_s, _RUN_SETTLE_S)


def steady_estimate_mb(attempt: Attempt, now: float, settle_s: float) -> float | None:
    """What others of its batch need, as a run shows that has not ended, once it has been flat for `settle_s`."""
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
        enough = min(enough, share.memory_mb)  # whoever joined it was promised the rest
    load = share.load_percent if usage.load_percent is None else usage.load_percent
    return replace(share, memory_mb=enough, load_percent=load, is_exclusive=False)


def declaration_advice(declared_mb: float | None, usage: Usage | None) -> str | None:
    """What to tell somebody who declared far more or less than was used."""
    peak = None if usage is None else usage.peak_mb
    if declared_mb is None or not peak:
        return None
    said = f"--vram said {format_size(declared_mb)}, and it used {format_size(peak)}"
    if declared_mb > _FAR_OFF * peak + _FAR_OFF_MB:
        return f"{said} at most: leave it out, and it is learned"
    return f"{said}: others may run out of memory by it" if peak > declared_mb * 1.05 else None


def largest_mb(devices: Sequence[Device]) -> float | None:
    return max((size for device in devices if (size := capacity(device)) is not None), default=None)


def _takes_all(memory_mb: float, need: Need, cards: DeviceSizes) -> bool:
    """Whether so much can be had only of devices that are as good as empty, if at all."""
    roomy = cards.suiting(need).roomy
    return bool(roomy) and (len(roomy) < need.devices or memory_mb > roomy[need.devices - 1])


def _largest(need: Need, cards: DeviceSizes) -> tuple[str, ...] | None:
    """As many as it needs of the largest that it may use."""
    suiting = cards.suiting(need)
    if len(suiting.sizes) < need.devices:
        return need.only
    least = suiting.sizes[need.devices - 1]
    return tuple(device_id for device_id, size in suiting.devices if size >= least)


def _with_margin(peak_mb: float) -> float:
    return peak_mb + max(_SETTLED_LEAST_MB, peak_mb * _SETTLED_MARGIN)


def _known_load(exact: Profile | None, program: Profile | None) -> float | None:
    return next((each.load_percent for each in (exact, program) if each and each.load_percent is not None), None)
