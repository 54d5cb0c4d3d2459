"""Ends of attempts: collected from the engines, kept until they are recorded, and what follows from each.

The driver reports a fault of a GPU at about the time at which its program fails, so the latest sample may be too old to
show it. The end of a failed program is therefore recorded when a newer sample has arrived, or after 2 s without one.
"""

import os
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from gpuyard.model import retry
from gpuyard.model.job import Attempt, Job, MemoryLack, Outcome, OutcomeKind, Usage
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.model.out_of_memory import Shortage, ShortageKind, killed_by_kernel
from gpuyard.model.retry import Verdict, died_with_the_machine
from gpuyard.model.stopping import signal_name
from gpuyard.policy.device_health import device_issues, first_faults
from gpuyard.policy.sizing import grow, hopeless_reason
from gpuyard.policy.wait_reasons import describe_holder
from gpuyard.ports import Ended, LeaseLedger
from gpuyard.queue.launch_jobs import OOM_COUNT_VARIABLE
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.measure_usage import NOTHING_MB
from gpuyard.queue.step_parts import QueueParts
from gpuyard.system.command_mentions import mentions

WAIT_FOR_SAMPLE_S = 2.0


class DeviceHealthWatch:
    def __init__(self, leases: LeaseLedger) -> None:
        self._leases = leases

    def fault_of(self, attempt: Attempt, sample: Sample | None) -> str | None:
        """Return the fault that the driver reports of a GPU of the attempt, or None."""
        if sample is None or attempt.engine:
            return None
        faults = first_faults(device_issues(sample.snapshot, self._leases.health_marks()))
        return next((faults[device_id].text for device_id in attempt.devices if device_id in faults), None)

    def needs_newer_sample(self, live: Live, ended: Ended, sample: Sample | None, now: float) -> bool:
        """Return whether only a sample that was taken after the end can show that a GPU failed."""
        attempt = live.attempt
        if sample is None or ended.at is None or abs(now - ended.at) >= WAIT_FOR_SAMPLE_S:
            return False
        if ended.outcome.kind is not OutcomeKind.FAILED or attempt.stopping is not None or attempt.engine:
            return False
        taken_at = sample.snapshot.taken_at
        if taken_at is None or taken_at >= ended.at or self.fault_of(attempt, sample) is not None:
            return False
        return any(device.health is not None for device in sample.snapshot.devices if device.id in attempt.devices)


class AttemptEnds:
    def __init__(self, parts: QueueParts) -> None:
        self._parts = parts
        self._transitions = parts.transitions
        self._progress = parts.progress_tracker
        self._health = DeviceHealthWatch(parts.leases)
        self._unrecorded: dict[tuple[int, int], Ended] = {}
        self._waiting: set[tuple[int, int]] = set()  # of these: recorded once a newer sample shows their GPUs
        self._unread: set[tuple[int, int]] = set()  # of these: recorded once their output was read
        self._set_aside: dict[int, Verdict] = {}  # by job, for those that did not begin

    def collect(self, now: float) -> None:
        ends = self._parts.engines.ended(self._is_cut_off, has_unrecorded=bool(self._unrecorded))
        self._unrecorded |= {(ended.job_id, ended.attempt): ended for ended in ends}
        for ended in ends:
            if ended.limit is not None:  # it kept the attempt from starting
                verdict = self._parts.start_pauses.note_limit(ended.job_id, ended.limit, now)
                self._set_aside |= {} if verdict is None else {ended.job_id: verdict}

    def collected(self) -> set[int]:
        """Return the jobs of which attempts have ended that are not recorded yet."""
        return {job_id for job_id, _ in self._unrecorded}

    def ended_before(self, sample: Sample) -> set[int]:
        """Return the jobs whose attempts had ended when the sample was taken, and are not recorded yet."""
        taken_at = sample.snapshot.taken_at
        ends = self._unrecorded.items() if taken_at is not None else ()
        return {job_id for (job_id, _), ended in ends if ended.at is not None and ended.at <= (taken_at or 0.0)}

    def end_times(self, now: float) -> dict[int, float]:
        """Return when attempts with devices ended whose ends can be recorded, by job."""
        return {live.job.id: _end_time(live, ended, now) for live, ended in self._live_ends() if live.attempt.devices}

    def forget_recorded(self) -> None:
        kept = self._waiting | self._unread
        self._progress.forget(self._unrecorded.keys() - kept)
        self._unrecorded = {key: ended for key, ended in self._unrecorded.items() if key in kept}
        self._set_aside.clear()

    def sample_due(self) -> float | None:
        """Return when the ends that wait for a newer sample are recorded without it; None if none waits."""
        times = [self._unrecorded[key].at for key in self._waiting]
        return min((at + WAIT_FOR_SAMPLE_S for at in times if at is not None), default=None)

    def record(self, now: float, sample: Sample | None = None) -> bool:
        """Record the collected ends; return whether a lease has ended. Record what has begun in slices before."""
        has_ended_lease = False
        self._waiting, self._unread = set(), set()
        for live, ended in list(self._live_ends()):
            key = live.job.id, live.attempt.number
            if self._health.needs_newer_sample(live, ended, sample, now):
                self._waiting.add(key)
            if ended.outcome.kind is not OutcomeKind.NEVER_STARTED and not self._progress.is_read(live.attempt):
                self._unread.add(key)
        known = (self._transitions.live, self._transitions.upcoming) if self._unrecorded else ()
        holders = Counter(live.attempt.lease_id for lives in known for live in lives.values())
        for live, ended in self._live_ends():
            holders[live.attempt.lease_id] -= 1
            has_ended_lease |= live.attempt.lease_id is not None and not holders[live.attempt.lease_id]
            if ended.usage is not None:
                before = live.attempt.usage or Usage()
                self._transitions.note_usage(live.job.id, replace(ended.usage, progress=before.progress))
            self._progress.add_rest(live, _end_time(live, ended, now))
            if not died_with_the_machine(live.attempt, self._parts.me.boot_id):
                self._record_end(live, ended, sample, now)
            elif retry.ended_before_reboot(ended.outcome):
                self._transitions.end(live.job.id, ended.outcome, now)
            else:
                verdict = retry.after_reboot(live.job) if live.job.state is not JobState.STOPPING else None
                self._transitions.end(live.job.id, retry.REBOOTED, now, verdict=verdict)
        return has_ended_lease

    def _live_ends(self) -> Iterator[tuple[Live, Ended]]:
        """Yield the ends that can be recorded: that wait neither for a sample nor for their output."""
        held = self._waiting | self._unread
        for (job_id, number), ended in self._unrecorded.items():
            live = self._transitions.recorded(job_id)
            # Otherwise an earlier daemon recorded it, and died before it could forget it.
            if live is not None and live.attempt.number == number and (job_id, number) not in held:
                yield live, ended

    def _is_cut_off(self, job_id: int, number: int, kind: OutcomeKind) -> bool:
        """Whether an attempt may have left processes. Not after a reboot: its pids may belong to others now."""
        live = self._transitions.recorded(job_id)  # one of a slice may have begun without a word that has arrived yet
        if live is None or live.attempt.number != number or died_with_the_machine(live.attempt, self._parts.me.boot_id):
            return False
        return live.attempt.stopping is not None or kind is OutcomeKind.LOST

    def _record_end(self, live: Live, ended: Ended, sample: Sample | None, now: float) -> None:
        job_id, attempt, outcome, warning = live.job.id, live.attempt, ended.outcome, live.job.spec.warning
        if ended.warned_at is not None and warning is not None:
            text = f"signal {signal_name(warning.signum)} on {attempt.engine}"
            self._transitions.note_warning(job_id, min(now, max(attempt.since, ended.warned_at)), text)
        live = self._transitions.live.get(job_id, live)
        ended_at = _end_time(live, ended, now)
        lack = find_lack(self._parts, live, ended)
        verdict: Verdict | None = None
        if lack is not None:
            outcome, verdict = _after_shortage(live, lack, outcome.status, sample)
        else:
            verdict = self._parts.cluster_dispatch.verdict(live, ended, now)
            if verdict is None and attempt.stopping is None:
                outcome, verdict = self._judge_device(live, ended, sample)
            if attempt.stopping is None:
                verdict = verdict or self._set_aside.get(job_id)
                if outcome.kind is OutcomeKind.CANCELLED:  # cancelled at the site
                    self._transitions.stop(job_id, OutcomeKind.CANCELLED, ended_at)
        self._transitions.end(
            job_id, outcome, ended_at, verdict=verdict, pid=ended.pid, lack=lack,
            unbrought=ended.unbrought,
        )  # fmt: skip

    def _judge_device(self, live: Live, ended: Ended, sample: Sample | None) -> tuple[Outcome, Verdict | None]:
        """Return the outcome of a failed program, and a verdict if its GPU is to blame. Its log and the last sample are
        weaker evidence than a fault that the driver reports: a program may hide its GPU from itself."""
        outcome = ended.outcome
        if outcome.kind is not OutcomeKind.FAILED or not live.job.spec.need.devices:
            return outcome, None
        reported = self._health.fault_of(live.attempt, sample)
        fault = reported or ended.device_fault
        if fault is None and sample is not None:
            devices = filter(None, map(sample.snapshot.device, live.attempt.devices))
            fault = next((device.fault for device in devices if device.fault is not None), None)
        if fault is None:
            return outcome, None
        why = outcome.reason or outcome.kind
        outcome = replace(outcome, reason=f"GPU fault: {why}" if fault in why else f"{why}; GPU fault: {fault}")
        if reported is None:
            return outcome, retry.judge(live.job, outcome, is_device_fault=True)
        outcomes = [each.outcome for each in self._transitions.store.attempts(live.job.id)]
        before = sum(each is not None and each.kind is OutcomeKind.DEVICE_FAULT for each in outcomes)
        return retry.after_device_fault(live.job, outcome, before)


def _end_time(live: Live, ended: Ended, now: float) -> float:
    """Return when an attempt ended: maybe while no daemon could record it."""
    return now if ended.at is None else min(now, max(live.attempt.since, ended.at))


def find_lack(parts: QueueParts, live: Live, ended: Ended) -> MemoryLack | None:
    """Return what memory the attempt lacked; None if it did not run out of memory or was asked to stop."""
    if live.attempt.stopping is not None or ended.outcome.kind is not OutcomeKind.FAILED:
        return None
    sample = parts.usage_tracker.last
    shortage = ended.shortage or _infer_shortage(sample, live.attempt, ended.outcome.status)
    had_devices = bool(live.attempt.devices) or (live.attempt.engine and live.job.spec.need.devices)
    if shortage is None or (shortage.where is ShortageKind.DEVICE and not had_devices):
        return None
    others = _others(parts, sample, live.attempt) if sample and shortage.where is ShortageKind.DEVICE else ()
    return MemoryLack(shortage=shortage, others=tuple(others))


def _infer_shortage(sample: Sample | None, attempt: Attempt, status: int | None) -> Shortage | None:
    """Infer a shortage that the program did not report: killed while RAM was full, or crashed on a full device."""
    if sample is None or attempt.usage is None or attempt.engine:
        return None
    snapshot = sample.snapshot
    killed = killed_by_kernel(status, None, None, attempt.usage.ram_mb, snapshot.host.memory_total_mb)
    # Programs that do not check their allocations end with SIGABRT, SIGBUS or SIGSEGV.
    if killed is not None or status not in {134, 135, 139}:
        return killed
    for device in filter(None, map(snapshot.device, attempt.devices)):
        free, total = device.memory_free_mb, device.memory_total_mb
        if free is not None and total is not None and free < max(512.0, 0.02 * total):  # full
            return Shortage(
                where=ShortageKind.DEVICE,
                says="it crashed while its GPU was full",
                free_mb=free,
                total_mb=total,
                held_mb=attempt.usage.peaks_mb.get(device.id),
            )
    return None


def _others(parts: QueueParts, sample: Sample, attempt: Attempt) -> Iterator[tuple[str, float | None]]:
    """Yield the other holders of memory on its devices in the last sample, and how much each held."""
    leases = parts.usage_tracker.all_leases()
    measured = parts.leases.measure(sample.snapshot, leases)
    for device in filter(None, map(sample.snapshot.device, attempt.devices)):
        here = [lease for lease in leases if lease.on(device.id) is not None and lease.id != attempt.lease_id]
        yield from ((describe_holder(lease.holder), measured.get((lease.id, device.id))) for lease in here)
        seen = sum(measured.get((lease.id, device.id)) or 0.0 for lease in here)
        own = 0.0 if attempt.usage is None else attempt.usage.peaks_mb.get(device.id, 0.0)
        foreign = (device.memory_used_mb or 0.0) - seen - own
        if foreign > NOTHING_MB:
            yield "processes without a lease", foreign


def _after_shortage(live: Live, lack: MemoryLack, status: int | None, sample: Sample | None) -> tuple[Outcome, Verdict]:
    """Return the outcome of an attempt that ran out of memory, and the verdict: more memory, and no retry used up; or
    failure where no GPU is large enough, unless the program may use less after it ran out."""
    says = lack.shortage.says
    reason = says if "out of memory" in says.lower() else f"out of memory: {says}"
    outcome = Outcome(kind=OutcomeKind.OUT_OF_MEMORY, status=status, reason=reason)
    snapshot = sample.snapshot if sample is not None and not live.attempt.engine else None
    devices = snapshot.usable_devices() if snapshot is not None else ()
    host_mb = snapshot.host.memory_total_mb if snapshot is not None else None
    growth = grow(live.job, live.attempt, lack.shortage, devices, host_mb)
    all_devices = snapshot.unsplit_devices() if snapshot is not None else ()
    hopeless = hopeless_reason(live.job.spec.need, live.attempt, lack, all_devices)
    if hopeless is None:
        return outcome, retry.judge_shortage(live.job, outcome, growth)
    may_use_less = growth is not None and _reads_oom_count(live.job)
    return outcome, retry.judge_shortage(live.job, outcome, growth if may_use_less else None, hopeless)


def _reads_oom_count(job: Job) -> bool:
    """Return whether the program reads how often it ran out of memory, or might: its files may be in an image, or on a
    disk that does not answer. In a container, the working folder has the same path as here."""
    spec = job.spec
    search_path = spec.environment.get("PATH", os.defpath) if spec.container is None else None
    return mentions(OOM_COUNT_VARIABLE, job.argv, spec.cwd, search_path) is not False
