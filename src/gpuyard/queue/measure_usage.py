"""Measures what live attempts use, sample by sample: memory, load, RAM and energy; and keeps their progress.

Readings of progress come from outside: a thread reads output and files (`daemon/monitor/job_progress_watch.py`). An end
is recorded after the rest of what its attempt has written was read, with what that says.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model import energy
from gpuyard.model.job import Attempt, Usage
from gpuyard.model.job_progress import JobProgress, ProgressReading, add_reading
from gpuyard.model.lease import Holder, Lease, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Sample, Snapshot
from gpuyard.policy.preallocation import JUMP_PART, find_preallocation, has_jumped
from gpuyard.policy.usage_curve import add_sample
from gpuyard.ports import LeaseLedger
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

# Used by the driver itself and by idle foreign processes.
NOTHING_MB = 128.0
# A suspending job may allocate more until it is paused, and has to get all of that back.
_UNSEEN = (JobState.SUSPENDED, JobState.RESUMING)


class UsageTracker:
    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, me: Holder) -> None:
        self._transitions, self._leases = transitions, leases
        self._no_process = replace(me, pid=-1)
        self.last: Sample | None = None
        self._devices: tuple[Device, ...] = ()
        self.held_mb: dict[int, dict[str, float | None]] = {}  # what each job held in the last reading of its devices
        self.loads: Mapping[tuple[str, str], float | None] = {}  # how busy each lease keeps each device, where known

    def note(self, sample: Sample, now: float, ended: Container[int] = ()) -> None:
        """Update the usage of all live attempts but of those jobs that had `ended`; each sample counts once."""
        if sample is self.last:
            return
        self.last = sample
        jobs, devices = self._transitions.live, {device.id: device for device in sample.snapshot.devices}
        # A device that is the identical object was not read again: it adds nothing.
        known, self._devices = {device.id: device for device in self._devices}, sample.snapshot.devices
        fresh = [device.id for device in self._devices if known.get(device.id) is not device]
        for gone in self.held_mb.keys() - jobs.keys():
            del self.held_mb[gone]
        read = {job_id: each for device_id in fresh for job_id, each in jobs.on_device.get(device_id, {}).items()}
        if not sample.reread:  # RAM is measured
            read |= jobs.without_devices
        live = [each for each in read.values() if each.job.state not in _UNSEEN]
        sharers = {
            device_id: [
                each
                for each in jobs.on_device[device_id].values()
                if each.job.id not in ended and each.job.state not in _UNSEEN
            ]
            for device_id in {device_id for each in live for device_id in each.attempt.devices}
        }
        # Without holder processes: one that is just ending no longer shows its lease, and as a descendant of the daemon
        # it could be counted for any job.
        mine = [
            Lease(
                id=each.attempt.lease_id,
                holder=self._no_process,
                shares=tuple(Share(device_id=device_id) for device_id in each.attempt.devices),
                since=each.attempt.since,
            )
            for each in live
            if each.attempt.lease_id is not None
        ]
        measured = self._measure(sample.snapshot, mine) if mine else {}
        by_process = self._leases.measure_loads(sample.snapshot, tuple(mine)) if mine and not sample.reread else {}
        self.loads = by_process if not sample.reread else self.loads
        for each in live:
            attempt = each.attempt
            key, ran_s = (attempt.job_id, attempt.number), attempt.ran_s(now)
            ram_mb, cpu_s = sample.ram_mb.get(key), sample.cpu_s.get(key)
            memory = {device_id: measured.get((attempt.lease_id or "", device_id)) for device_id in attempt.devices}
            if ram_mb is None and all(used is None for used in memory.values()):
                continue
            self.held_mb[attempt.job_id] = memory
            own = [by_process.get((attempt.lease_id or "", device_id)) for device_id, used in memory.items() if used]
            loads = [load for load in own if load is not None]
            load = max(loads) if own and len(loads) == len(own) else _own_load(each, sharers, devices, memory)
            if sample.reread:  # the load was not read again
                load = None if attempt.usage is None else attempt.usage.load_now
            # Zero on all devices is no peak: the memory is not used yet, or cannot be measured.
            peaks = memory if any(memory.values()) else {}
            usage = add_sample(attempt.usage or Usage(), ran_s, peaks, ram_mb=ram_mb, load_percent=load)
            # In a sample with devices that were read again, the CPU time is that of an earlier one; and most of that of
            # the first second is that of the start.
            if not sample.reread and cpu_s is not None and ran_s >= 1.0:
                usage = replace(usage, cpus_used=round(cpu_s / ran_s, 2))
            self._transitions.note_usage(attempt.job_id, _with_presence(usage, sample.snapshot, attempt, measured))

    def _measure(self, snapshot: Snapshot, mine: Sequence[Lease]) -> Mapping[tuple[str, str], float | None]:
        """Return the memory of each lease's processes. If the driver hides them, it depends on all other leases."""
        measured = self._leases.measure(snapshot, tuple(mine))
        hidden = snapshot.hiding
        if not any(lease.on(device_id) for lease in mine for device_id in hidden):
            return measured
        by_growth = self._leases.measure(snapshot, self.all_leases())
        return {**measured, **{key: used for key, used in by_growth.items() if key[1] in hidden}}

    def all_leases(self) -> tuple[Lease, ...]:
        """Return the leases of all users; none if the ledger cannot be read."""
        try:
            return self._leases.read()[0]
        except EnvironmentFault:
            return ()


def _with_presence(
    usage: Usage, snapshot: Snapshot, attempt: Attempt, measured: Mapping[tuple[str, str], float | None]
) -> Usage:
    """Note whether its devices have no process at all, or memory that belongs to no job, such as a container's."""
    devices = list(filter(None, map(snapshot.device, attempt.devices)))
    unused = [each for each in devices if each.processes == () and (each.memory_used_mb or 0.0) < NOTHING_MB]
    if attempt.devices and len(unused) == len(attempt.devices):
        return replace(usage, idle_looks=usage.idle_looks + 1)
    if snapshot.taken_at is not None and snapshot.taken_at < attempt.since:
        return usage  # the last job may still be in it
    for device in devices:
        known = sum((used or 0.0 for (_, device_id), used in measured.items() if device_id == device.id), 0.0)
        if (device.memory_used_mb or 0.0) - known > NOTHING_MB:
            return replace(usage, saw_foreign=True)
    return usage


def _own_load(
    live: Live, sharers: dict[str, list[Live]], devices: Mapping[str, Device], memory: dict[str, float | None]
) -> float | None:
    """Return how busy the job keeps its devices by itself, where the driver says only how busy they are; None beside
    foreign processes, or a job that never leaves the device idle. The parts of the time for which jobs leave a device
    idle multiply. Jobs of unknown load are assumed to be alike."""
    loads = []
    for device_id, used in memory.items():
        device = devices.get(device_id)
        if device is None or device.utilization_percent is None or not used:
            return None
        others = [each.attempt.usage for each in sharers.get(device_id, ()) if each is not live]
        ours = used + sum((each.peaks_mb.get(device_id, 0.0) for each in others if each is not None), 0.0)
        if (device.memory_used_mb or 0.0) - ours > max(NOTHING_MB, 0.05 * (device.memory_total_mb or 0.0)):
            return None
        known = [each.load_percent for each in others if each is not None and each.load_percent is not None]
        resting = math.prod(1.0 - min(1.0, load / 100.0) for load in known)
        if resting < 0.1:  # another one never leaves it idle
            return None
        idle = min(1.0, max(0.0, 1.0 - device.utilization_percent / 100.0) / resting)
        loads.append(100.0 * (1.0 - float(idle ** (1.0 / (1 + len(others) - len(known))))))
    return max(loads, default=None)


class ProgressTracker:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        # Reads what an attempt that is over has written, and calls `note_rest` if it says something. Returns False if
        # that takes a while: then it calls it in any case, and wakes the loop.
        self.read_rest: Callable[[Attempt], bool] = lambda _: True
        self._rest: dict[tuple[int, int], ProgressReading | None] = {}
        self._unread: set[tuple[int, int]] = set()

    def note(self, job_id: int, number: int, reading: ProgressReading, now: float) -> None:
        """Add a reading of a live attempt. One of an attempt that is over changes nothing."""
        live = self._transitions.live.get(job_id)
        if live is not None and live.attempt.number == number:
            usage = live.attempt.usage or Usage()
            progress = add_reading(usage.progress or JobProgress(), reading, live.attempt.ran_s(now))
            self._transitions.note_usage(job_id, replace(usage, progress=progress))

    def is_read(self, attempt: Attempt) -> bool:
        """Return whether all was read that an attempt which is over has written. If not, a step follows when it was."""
        key = attempt.job_id, attempt.number
        if key not in self._rest:
            self._rest[key] = None  # a bug in reading keeps no end from being recorded
            if not self.read_rest(attempt):
                self._unread.add(key)
        return key not in self._unread

    def note_rest(self, key: tuple[int, int], reading: ProgressReading | None) -> None:
        """Keep the last reading of an attempt (job and number) until its end is recorded. None: it says nothing."""
        if key in self._rest:
            self._rest[key] = self._rest[key] or reading
            self._unread.discard(key)

    def add_rest(self, live: Live, ended_at: float) -> None:
        reading = self._rest.get((live.job.id, live.attempt.number))
        if reading is not None:
            self.note(live.job.id, live.attempt.number, reading, ended_at)

    def forget(self, recorded: Collection[tuple[int, int]]) -> None:
        for key in recorded:
            self._rest.pop(key, None)


EVENT = "preallocates"


class PreallocationWatch:
    """Watches running jobs for programs that preallocate, and records once what lets others share the device.
    `loaded_libraries` returns the shared libraries of a process, one path per line."""

    def __init__(self, transitions: JobTransitions, loaded_libraries: Callable[[int], str]) -> None:
        self._transitions, self._loaded_libraries = transitions, loaded_libraries
        self._judged: set[tuple[int, int]] = set()
        self._last: Sample | None = None

    def note(self, sample: Sample, now: float) -> None:
        """Judge each attempt once, when it holds most of its devices; each sample counts once."""
        if sample is self._last:
            return
        self._last = sample
        live = self._transitions.live
        if len(self._judged) > 2 * len(live) + 64:
            self._judged &= {(each.attempt.job_id, each.attempt.number) for each in live.values()}
        for each in [each for on_device in live.on_device.values() for each in on_device.values()]:
            usage, key = each.attempt.usage, (each.attempt.job_id, each.attempt.number)
            # With `preallocates`, an earlier daemon has judged it.
            if usage is None or not usage.peaks_mb or usage.preallocates or key in self._judged:
                continue
            devices = list(filter(None, map(sample.snapshot.device, each.attempt.devices)))
            total_mb = sum(device.memory_total_mb or 0.0 for device in devices)
            if not total_mb or sum(usage.peaks_mb.values()) < JUMP_PART * total_mb:
                continue
            self._judged.add(key)
            if has_jumped(usage.curve, total_mb):
                self._judge(each, devices, now)

    def _judge(self, live: Live, devices: list[Device], now: float) -> None:
        job, usage = live.job, live.attempt.usage
        assert usage is not None
        # A process with half of a device is the one that has jumped. The pids on a simulated device may be invented.
        large = {
            process.pid
            for device in devices
            for process in device.processes or ()
            if not device.is_simulated and (process.memory_mb or 0.0) >= 0.5 * (device.memory_total_mb or 0.0)
        }
        libraries = map(self._loaded_libraries, sorted(large))
        traces = "\n".join([f"{job.spec.framework}/" if job.spec.framework else "", *libraries])
        least_mb = min(device.memory_total_mb or 0.0 for device in devices)
        found = find_preallocation(job.argv, job.spec.environment, traces, usage.peak_mb, least_mb)
        if found is not None:
            framework, advice = found
            self._transitions.note_usage(job.id, replace(usage, preallocates=framework))
            self._transitions.store.add_event(job.id, now, EVENT, advice)


_until = attrgetter("until")

Loads = Mapping[tuple[str, str], float | None]


class _Card(Struct, kw_only=True):
    """The last reading of a card, what its holders and other processes did then, and who has left it since."""

    device: Device
    reading: energy.CardReading
    idle_w: float | None
    foreign_percent: float = 0.0
    uses: dict[int, float | None] = {}
    left: list[energy.CardHolder] = field(default_factory=list)  # in the order of their ends


class EnergyMeter:
    """Measures energy by the rules of `model/energy.py`; `total` is that of all attempts since the daemon started.

    The last reading of a card is up to a second old when an attempt ends. Until then the card is assumed to draw what
    it drew at that reading. A part of a card (a MIG instance) has no power of its own: its attempts share the card.
    """

    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._last: Sample | None = None
        self._cards: dict[str, _Card] = {}
        self.total = energy.EnergyUse()

    def note(self, sample: Sample, loads: Loads, ended_at: Mapping[int, float]) -> None:
        """Charge what the cards used since the last sample. `ended_at`: by job, ends that are not recorded yet."""
        at = sample.snapshot.taken_at
        if sample is self._last or sample.reread or at is None:
            return
        self._last = sample
        devices = sample.snapshot.devices
        metered = [each for each in devices if each.energy_j is not None or each.power_draw_w is not None]
        # Samples may follow each other within milliseconds, and a counter moves about ten times a second.
        known = [(device, self._cards.get(device.id)) for device in metered]
        read = [one for one, was in known if not was or (one is not was.device and at - was.reading.at >= 0.2)]
        holders = self._holders(sample.snapshot) if read else {}
        parts: dict[int, energy.EnergyUse] = {}
        for device in read:
            before = self._cards.get(device.id)
            here = holders.get(device.id, {})
            uses = {key: _use(device, ids, live, loads, is_alone=len(here) == 1) for key, (live, ids) in here.items()}
            powers = (None if before is None else before.idle_w, device.power_draw_w)
            card = _Card(
                device=device,
                reading=energy.CardReading(at=at, counter_j=device.energy_j, power_w=device.power_draw_w),
                idle_w=min((each for each in powers if each is not None), default=None),
                foreign_percent=_foreign(device, uses),
                uses=uses,
            )
            self._cards[device.id] = card
            if before is not None and (here or before.left):
                until = {key: min(at, ended_at.get(key, at)) for key in here}  # it may have begun, or ended, after `at`
                held = [_holder(key, live, uses[key], before, until[key]) for key, (live, _) in here.items()]
                _add_parts(parts, before, card, held)
        for key, part in parts.items():
            self._charge(key, part)

    def settle(self, ended_at: Mapping[int, float]) -> None:
        """Charge attempts that end now for the time since the last reading of their cards."""
        if not ended_at or self._last is None or not self._cards:
            return
        holders = self._holders(self._last.snapshot)
        for card_id, here in holders.items():
            card = self._cards.get(card_id)
            ending = here.keys() & ended_at.keys()
            if card is None or card.reading.power_w is None or not ending:
                continue
            until = {key: ended_at.get(key, max(ended_at.values())) for key in here}
            held = {key: _holder(key, live, card.uses.get(key), card, until[key]) for key, (live, _) in here.items()}
            for key in ending:
                self._settle_on(card, held[key], [each for each in held.values() if each.until > each.since])

    def _settle_on(self, card: _Card, ending: energy.CardHolder, held: list[energy.CardHolder]) -> None:
        since, until = ending.since, ending.until  # what others did before it began is no matter to it
        if not 0.0 < until - card.reading.at <= energy.LONGEST_GAP_S or until <= since:
            return
        left = card.left[bisect_right(card.left, since, key=_until) :]  # very many may have come and gone
        beside = (each for each in (*held, *left) if each.until > since)
        cut = [replace(each, since=max(each.since, since), until=min(each.until, until)) for each in beside]
        parts, _ = energy.share_energy(
            (card.reading.power_w or 0.0) * (until - since),
            since,
            until,
            [each for each in cut if each.until > each.since],
            idle_w=card.idle_w,
            foreign_percent=card.foreign_percent,
            is_integrated=card.reading.counter_j is None,
        )
        if ending.key in parts:
            self._charge(ending.key, parts[ending.key])
        insort(card.left, replace(ending, key=-ending.key), key=_until)  # a next attempt of the job may follow at once

    def _charge(self, key: int, part: energy.EnergyUse) -> None:
        self.total = energy.add_energy(self.total, part)
        live = self._transitions.live.get(key)
        if live is not None:
            usage = live.attempt.usage or Usage()
            self._transitions.note_usage(key, replace(usage, energy=energy.add_energy(usage.energy, part)))

    def _holders(self, snapshot: Snapshot) -> dict[str, dict[int, tuple[Live, list[str]]]]:
        """Return the attempts on each card by job, with their devices there: the card, or parts of it."""
        cards = {device.id: device.parent or device.id for device in snapshot.devices}
        found: dict[str, dict[int, tuple[Live, list[str]]]] = {}
        for key, live in self._transitions.live.items():
            if live.attempt.started is None or live.job.state in (JobState.SUSPENDED, JobState.RESUMING):  # in RAM
                continue
            for device_id in live.attempt.devices:
                if device_id in cards:
                    found.setdefault(cards[device_id], {}).setdefault(key, (live, []))[1].append(device_id)
        return found


def _holder(key: int, live: Live, use: float | None, card: _Card, until: float) -> energy.CardHolder:
    since = max(card.reading.at, live.attempt.since)
    return energy.CardHolder(key=key, since=since, until=max(since, until), use_percent=use)


def _add_parts(parts: dict[int, energy.EnergyUse], before: _Card, now: _Card, held: list[energy.CardHolder]) -> None:
    """Add each holder's part of a card's energy between two readings. Attempts that left meanwhile have paid theirs."""
    found = energy.energy_between(before.reading, now.reading)
    if found is None:
        return
    joules, is_integrated = found
    present = [each for each in held if each.until > each.since]
    shares, _ = energy.share_energy(
        joules, before.reading.at, now.reading.at, [*present, *before.left],
        idle_w=now.idle_w, foreign_percent=now.foreign_percent, is_integrated=is_integrated,
    )  # fmt: skip
    for each in present:
        share = shares[each.key]
        if share.seconds >= energy.SHORTEST_PEAK_S:
            share = replace(share, peak_w=share.joules / share.seconds)
        parts[each.key] = energy.add_energy(parts.get(each.key), share)


def _use(device: Device, ids: list[str], live: Live, loads: Loads, *, is_alone: bool) -> float | None:
    """Return how busy an attempt keeps a card; None: unknown."""
    known = [loads.get((live.attempt.lease_id or "", device_id)) for device_id in ids]
    found = [load for load in known if load is not None]
    if len(found) == len(known):
        return sum(found)
    return device.utilization_percent if is_alone or device.utilization_percent == 0.0 else None


def _foreign(device: Device, uses: Mapping[int, float | None]) -> float:
    """Return how busy processes keep a card that belong to no attempt; 0 where the driver does not say."""
    loads = [process.utilization_percent for process in device.processes or ()]
    known = [load for load in loads if load is not None]
    if not known or len(known) < len(loads) or None in uses.values():
        return 0.0
    rest = sum(known) - sum(use or 0.0 for use in uses.values())
    return rest if rest >= 1.0 else 0.0
