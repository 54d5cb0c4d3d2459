"""Measures what live attempts use, sample by sample; adjusts leases to what was measured; explains lack of memory."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.control.learn_estimates import RunningPeaks, fingerprints_of
from gpuyard.control.live_jobs import Live
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Job, MemoryLack, OutcomeKind, Usage
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Claim, Holder, Lease, Share
from gpuyard.core.memory.expected_peak import ExpectedPeak
from gpuyard.core.memory.neighbours import Neighbours, assumed_load, note_neighbours
from gpuyard.core.memory.newcomer import Newcomer
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind, killed_by_kernel
from gpuyard.core.memory.usage_curve import add_sample
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.scheduling.wait_reasons import describe_holder
from gpuyard.core.snapshot import Device, Sample, Snapshot
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import Ended, LeaseLedger, WantedClaim

# Used by the driver itself and by idle foreign processes.
_NOTHING_MB = 128.0
# A device with less free memory than this counts as full.
_FULL_MB, _FULL_SHARE = 512.0, 0.02
_NO_PID = -1
_NEVER_RESTS = 0.1
_SHOWN_S = 1.0  # a running job whose memory was flat for this long says what to expect of others of its program
_LEAST_CPU_S = 1.0  # of a shorter run, most CPU time is that of its start
_CRASHED = (134, 135, 139)  # SIGABRT, SIGBUS, SIGSEGV: programs that do not check their allocations end like this


# Running jobs of a program: their groups and expected peaks, and the means of these.
_RunningLike = tuple[Sequence[tuple[int | None, ExpectedPeak]], tuple[float, ...]]
_NOT_RUNNING: _RunningLike = ((), ())


class _Evidence(Struct):
    """What was known about a newcomer when its lease was last adjusted, and what followed: nothing else would follow
    until `until`, while its usage, the estimates and the leased shares are the same."""

    usage: Usage | None
    version: int
    until: float
    adjusted: tuple[Sequence[Share], float] | None = None  # the shares for a sureness
    shown: tuple[str, int | None, ExpectedPeak] | None = None  # its program, group and expected peak


class UsageTracker:
    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, me: Holder) -> None:
        self._transitions = transitions
        self._leases = leases
        self._me = me
        self._last: Sample | None = None
        self._running: dict[str, _RunningLike] | None = None
        self._sizes_mb: dict[str, float] | None = None
        self._shares: dict[str, tuple[Share, ...]] = {}  # of newcomers, by lease, as they were adjusted last
        self._devices: dict[str, Device] = {}
        self._evidence: dict[int, _Evidence] = {}
        self.held_mb: dict[int, dict[str, float | None]] = {}  # what each job held in the last reading of its devices

    def note(self, sample: Sample, now: float, ended: Container[int] = ()) -> None:
        """Update the usage of all live attempts; each sample counts once. `ended` are the jobs whose programs were gone
        when it was taken."""
        if sample is self._last:
            return
        self._last, self._running, self._sizes_mb = sample, None, None
        # A suspending job may allocate more until it is paused, and has to get all of that back.
        unseen = (JobState.SUSPENDED, JobState.RESUMING)
        live = [each for each in self._transitions.live.values() if each.job.state not in unseen]
        devices = {device.id: device for device in sample.snapshot.devices}
        fresh = {device_id for device_id, device in devices.items() if self._devices.get(device_id) is not device}
        self._devices = devices
        self.held_mb = {job_id: held for job_id, held in self.held_mb.items() if job_id in self._transitions.live}
        sharers: dict[str, list[Live]] = {}
        for each in live:
            for device_id in each.attempt.devices if each.job.id not in ended else ():
                sharers.setdefault(device_id, []).append(each)
        # A device that is the identical object was not read again: it adds nothing.
        measures_ram = not sample.reread
        used = ((each, each.attempt.devices) for each in live)
        live = [each for each, ids in used if (measures_ram and not ids) or not fresh.isdisjoint(ids)]
        mine = [self._lease_of(each.attempt) for each in live if each.attempt.lease_id is not None]
        measured = self._measure(sample.snapshot, mine) if mine else {}
        by_process = self._leases.measure_loads(sample.snapshot, tuple(mine)) if mine and not sample.reread else {}
        loads: dict[int, float] = {}
        for each in live:
            attempt = each.attempt
            ram_mb = sample.ram_mb.get((attempt.job_id, attempt.number))
            memory = {device_id: measured.get((attempt.lease_id or "", device_id)) for device_id in attempt.devices}
            beside = self._note_neighbours(each, sharers, loads, now) if attempt.devices else None
            if ram_mb is None and all(used is None for used in memory.values()):
                if attempt.usage is not None:  # its program has ended, and was beside others until now
                    self._transitions.note_usage(attempt.job_id, replace(attempt.usage, beside=beside))
                continue
            self.held_mb[attempt.job_id] = memory
            own = [by_process.get((attempt.lease_id or "", device_id)) for device_id, used in memory.items() if used]
            load = _largest(own) if own and None not in own else _own_load(each, sharers, devices, memory)
            if sample.reread:  # the load was not read again
                load = None if attempt.usage is None else attempt.usage.load_now
            # Zero on all devices is no peak: the memory is not used yet, or cannot be measured.
            peaks = memory if any(memory.values()) else {}
            usage = add_sample(attempt.usage or Usage(), attempt.ran_s(now), peaks, ram_mb=ram_mb, load_percent=load)
            usage = _with_cpus(usage, sample.cpu_s.get((attempt.job_id, attempt.number)), attempt.ran_s(now))
            if attempt.devices and all(_is_unused(devices.get(device_id)) for device_id in attempt.devices):
                usage = replace(usage, idle_looks=usage.idle_looks + 1)
            elif _is_since(sample.snapshot, attempt) and _has_foreign(attempt, devices, measured):
                usage = replace(usage, saw_foreign=True)
            self._transitions.note_usage(attempt.job_id, replace(usage, beside=beside))

    def _note_neighbours(
        self, live: Live, sharers: Mapping[str, Sequence[Live]], loads: dict[int, float], now: float
    ) -> Neighbours:
        """Add what other jobs do on its devices; of several devices, the busiest counts. `loads` caches their loads."""
        most_percent, most_jobs = 0.0, 0
        for device_id in live.attempt.devices:
            others = [each for each in sharers.get(device_id, ()) if each is not live]
            for each in others:
                if each.job.id not in loads:
                    loads[each.job.id] = self._load(each, now)
            most_percent = max(most_percent, sum(loads[each.job.id] for each in others))
            most_jobs = max(most_jobs, len(others))
        before = None if live.attempt.usage is None else live.attempt.usage.beside
        return note_neighbours(before, live.attempt.ran_s(now), most_percent, float(most_jobs))

    def _load(self, live: Live, now: float) -> float:
        measured = None if live.attempt.usage is None else live.attempt.usage.load_percent
        return assumed_load(self._transitions.estimates.load_percent(live.job), measured, live.attempt.ran_s(now))

    def _lease_of(self, attempt: Attempt) -> Lease:
        """Return the lease without its holder process: a process that is just ending no longer shows its lease, and as
        a descendant of the daemon it could be counted for any job."""
        shares = tuple(Share(device_id=device_id) for device_id in attempt.devices)
        holder = replace(self._me, pid=_NO_PID)
        return Lease(id=attempt.lease_id or "", holder=holder, shares=shares, since=attempt.since)

    def _measure(self, snapshot: Snapshot, mine: Sequence[Lease]) -> Mapping[tuple[str, str], float | None]:
        """Return the memory of each lease's processes. If the driver hides them, it depends on all other leases."""
        measured = self._leases.measure(snapshot, tuple(mine))
        hidden = {device.id for device in snapshot.devices if device.hides_processes}
        if not any(lease.on(device_id) for lease in mine for device_id in hidden):
            return measured
        by_growth = self._leases.measure(snapshot, self._all_leases())
        return {**measured, **{key: used for key, used in by_growth.items() if key[1] in hidden}}

    # Jobs without an estimate (newcomers)

    def adjust(self, leases: Sequence[Lease], now: float, sureness: float) -> Iterator[WantedClaim]:
        """Yield amendments for leases that reserve more or less than is expected of their jobs now."""
        if self._last is None:
            return
        held = {lease.id: lease.shares for lease in leases}
        self._shares = {}
        newcomers = list(self._newcomers())
        self._evidence = {live.job.id: self._evidence_of(live, now) for live in newcomers}
        for live in newcomers:
            lease_id = live.attempt.lease_id or ""
            before = held.get(lease_id, ())
            shares = self._shares[lease_id] = self._adjusted(live, before, now, sureness)
            if shares != before:
                self._transitions.set_reserved(live.job.id, Claim(shares=shares))
                yield WantedClaim(claim=Claim(shares=shares), amends=live.attempt.lease_id)

    def has_adjustments(self, now: float, sureness: float) -> bool:
        """Return whether `adjust` would change a lease: then the ledger has to be read."""
        for live in self._newcomers():
            before = self._shares.get(live.attempt.lease_id or "")
            if before is None or self._adjusted(live, before, now, sureness) != before:
                return True
        return False

    def _adjusted(self, live: Live, before: tuple[Share, ...], now: float, sureness: float) -> tuple[Share, ...]:
        usage, evidence = live.attempt.usage, self._evidence_of(live, now)
        uses_memory = usage is not None and bool(usage.peaks_mb)
        if uses_memory and evidence.adjusted == (before, sureness):
            return before
        running = self._running_beside(live, evidence, now)
        shares = self._newcomer(live, now, running).adjusted_shares(before, self._sizes(), sureness)
        evidence.adjusted = shares, sureness
        return shares

    def _running_beside(self, live: Live, evidence: _Evidence, now: float) -> RunningPeaks:
        """Return what running jobs like this one have shown, without itself."""
        means_mb, batch = self.running_like(live.job, now)
        if evidence.shown is not None:
            means_mb = _without_one(means_mb, evidence.shown[2].mean_mb)
        return means_mb, batch

    def _evidence_of(self, live: Live, now: float) -> _Evidence:
        """Return what is known about the newcomer: the same object as last time while nothing has changed."""
        usage, version = live.attempt.usage, self._transitions.estimates.version
        found = self._evidence.get(live.job.id)
        if found is None or found.usage is not usage or found.version != version or now >= found.until:
            newcomer = self._newcomer(live, now)
            found = _Evidence(usage, version, newcomer.changes_at)
            if newcomer.flat_s >= _SHOWN_S:
                peaks = newcomer.usage.peaks_mb
                device_id = max(peaks, key=peaks.__getitem__)
                device = self._devices.get(device_id)
                peak = newcomer.expected(device_id, (capacity(device) if device is not None else None) or 0.0)
                found.shown = fingerprints_of(live.job)[1], live.job.group, peak
            self._evidence[live.job.id] = found
        return found

    def evidence_due(self) -> dict[int, float]:
        """Return for each newcomer, by job id, when a sample will say more about it if its memory stays as it is."""
        known = ((live.job.id, self._evidence.get(live.job.id)) for live in self._newcomers())
        return {job_id: evidence.until for job_id, evidence in known if evidence is not None}

    def _newcomer(self, live: Live, now: float, running: RunningPeaks = ((), None)) -> Newcomer:
        return Newcomer(live.attempt, self._transitions.estimates.known_runs(live.job, *running), now)

    def running_like(self, job: Job, now: float) -> RunningPeaks:
        """Return what to expect of a job from running jobs that have shown what they use: the expected peaks of those
        of its program, and the largest of those of its batch."""
        if self._running is None:
            self._running = self._peaks_of_running(now)
        found, means_mb = self._running.get(fingerprints_of(job)[1], _NOT_RUNNING)
        batch = [peak for group, peak in found if group == job.group] if job.spec.pace is not None else []
        return means_mb, max(batch, default=None, key=lambda peak: peak.mean_mb)

    def _peaks_of_running(self, now: float) -> dict[str, _RunningLike]:
        """Return the groups and expected peaks of running jobs without an estimate, and their means, by the program."""
        found: dict[str, list[tuple[int | None, ExpectedPeak]]] = {}
        for live in self._newcomers():
            evidence = self._evidence_of(live, now)
            if evidence.shown is not None:
                program, group, peak = evidence.shown
                found.setdefault(program, []).append((group, peak))
        return {program: (peaks, tuple(peak.mean_mb for _, peak in peaks)) for program, peaks in found.items()}

    def _sizes(self) -> dict[str, float]:
        if self._sizes_mb is None:
            devices = self._last.snapshot.devices if self._last is not None else ()
            self._sizes_mb = {device.id: size for device in devices if (size := capacity(device)) is not None}
        return self._sizes_mb

    def _newcomers(self) -> Iterator[Live]:
        """Yield the running jobs without an estimate."""
        return (live for live in self._transitions.live.unpredicted.values() if live.job.state is JobState.RUNNING)

    # Lack of memory

    def lack(self, live: Live, ended: Ended) -> MemoryLack | None:
        """Return what memory the attempt lacked; None if it did not run out of memory or was asked to stop."""
        if live.attempt.stopping is not None or ended.outcome.kind is not OutcomeKind.FAILED:
            return None
        shortage = ended.shortage or self._infer_shortage(live.attempt, ended.outcome.status)
        had_devices = bool(live.attempt.devices) or (live.attempt.engine and live.job.spec.need.devices)
        if shortage is None or (shortage.where is ShortageKind.DEVICE and not had_devices):
            return None
        others = self._others(live.attempt) if shortage.where is ShortageKind.DEVICE else ()
        return MemoryLack(shortage=shortage, others=tuple(others))

    def _infer_shortage(self, attempt: Attempt, status: int | None) -> Shortage | None:
        """Infer a shortage that the program did not report: killed while RAM was full, or crashed on a full device."""
        if self._last is None or attempt.usage is None or attempt.engine:
            return None
        snapshot = self._last.snapshot
        killed = killed_by_kernel(status, None, None, attempt.usage.ram_mb, snapshot.host.memory_total_mb)
        if killed is not None or status not in _CRASHED:
            return killed
        for device in filter(None, map(snapshot.device, attempt.devices)):
            free, total = device.memory_free_mb, device.memory_total_mb
            if free is not None and total is not None and free < max(_FULL_MB, _FULL_SHARE * total):
                return Shortage(
                    where=ShortageKind.DEVICE,
                    says="it crashed while its GPU was full",
                    free_mb=free,
                    total_mb=total,
                    held_mb=attempt.usage.peaks_mb.get(device.id),
                )
        return None

    def _others(self, attempt: Attempt) -> Iterator[tuple[str, float | None]]:
        """Yield the other holders of memory on its devices in the last sample, and how much each held."""
        if self._last is None:
            return
        snapshot, leases = self._last.snapshot, self._all_leases()
        measured = self._leases.measure(snapshot, leases)
        for device in filter(None, map(snapshot.device, attempt.devices)):
            here = [lease for lease in leases if lease.on(device.id) is not None and lease.id != attempt.lease_id]
            yield from ((describe_holder(lease.holder), measured.get((lease.id, device.id))) for lease in here)
            seen = sum(measured.get((lease.id, device.id)) or 0.0 for lease in here)
            own = 0.0 if attempt.usage is None else attempt.usage.peaks_mb.get(device.id, 0.0)
            foreign = (device.memory_used_mb or 0.0) - seen - own
            if foreign > _NOTHING_MB:
                yield "processes without a lease", foreign

    def _all_leases(self) -> tuple[Lease, ...]:
        try:
            return self._leases.read()[0]
        except EnvironmentFault:
            return ()


def _is_unused(device: Device | None) -> bool:
    """Return whether no process at all is on the device, our own included."""
    return device is not None and device.processes == () and (device.memory_used_mb or 0.0) < _NOTHING_MB


def _is_since(snapshot: Snapshot, attempt: Attempt) -> bool:
    """Return whether the snapshot was taken since the attempt began: before, the last job may still be in it."""
    return snapshot.taken_at is None or snapshot.taken_at >= attempt.since


def _has_foreign(
    attempt: Attempt, devices: Mapping[str, Device], measured: Mapping[tuple[str, str], float | None]
) -> bool:
    """Return whether memory is in use on its devices that belongs to no job, such as that of a container's program."""
    for device in filter(None, map(devices.get, attempt.devices)):
        known = sum((used or 0.0 for (_, device_id), used in measured.items() if device_id == device.id), 0.0)
        if (device.memory_used_mb or 0.0) - known > _NOTHING_MB:
            return True
    return False


def _without_one(figures: tuple[float, ...], figure: float) -> tuple[float, ...]:
    place = figures.index(figure) if figure in figures else len(figures)
    return (*figures[:place], *figures[place + 1 :])


def _with_cpus(usage: Usage, cpu_s: float | None, ran_s: float) -> Usage:
    return usage if cpu_s is None or ran_s < _LEAST_CPU_S else replace(usage, cpus=round(cpu_s / ran_s, 2))


def _largest(figures: Iterable[float | None]) -> float | None:
    return max((figure for figure in figures if figure is not None), default=None)


def _own_load(
    live: Live, sharers: dict[str, list[Live]], devices: Mapping[str, Device], memory: dict[str, float | None]
) -> float | None:
    """Return how busy the job keeps its devices by itself, where the driver says only how busy they are; None beside
    foreign processes.

    Jobs that share a device each leave it idle for a part of the time, and these parts multiply. Jobs of unknown load
    are assumed to be alike. Beside a job that never leaves the device idle, the load cannot be determined.
    """
    loads = []
    for device_id, used in memory.items():
        device = devices.get(device_id)
        if device is None or device.utilization_percent is None or not used:
            return None
        others = [each.attempt.usage for each in sharers.get(device_id, ()) if each is not live]
        ours = used + sum((each.peaks_mb.get(device_id, 0.0) for each in others if each is not None), 0.0)
        if (device.memory_used_mb or 0.0) - ours > max(_NOTHING_MB, 0.05 * (device.memory_total_mb or 0.0)):
            return None
        known = [each.load_percent for each in others if each is not None and each.load_percent is not None]
        resting = math.prod(1.0 - min(1.0, load / 100.0) for load in known)
        if resting < _NEVER_RESTS:
            return None
        idle = min(1.0, max(0.0, 1.0 - device.utilization_percent / 100.0) / resting)
        loads.append(100.0 * (1.0 - float(idle ** (1.0 / (1 + len(others) - len(known))))))
    return max(loads, default=None)
