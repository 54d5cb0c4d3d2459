"""Running jobs as the planner sees them: their expected ends, their power and load, and the RAM and CPUs that their
leases reserve and that they use.

Another user's process cannot tell the jobs of a queue apart. So the queue writes into each lease what the job was last
measured to use, whenever that has changed noticeably.
"""

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpuyard.model.job_progress import time_left
from gpuyard.model.lease import Claim, HostShare, Lease
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.estimates import Estimate
from gpuyard.policy.host_room import HostUse, HostView
from gpuyard.policy.machine import Packing
from gpuyard.policy.numbers import MOST_PER_DEVICE
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.sharing import assumed_load, depth_limit
from gpuyard.policy.sizing import expected_ram_mb
from gpuyard.policy.world import PowerLimit, RunningJob
from gpuyard.ports import LeaseLedger, WantedClaim
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions


def running_jobs(transitions: JobTransitions) -> tuple[RunningJob, ...]:
    """Return the jobs with a live attempt."""
    return tuple([_running(live, transitions) for live in transitions.live.values()])


def _running(live: Live, transitions: JobTransitions) -> RunningJob:
    job, attempt = live.job, live.attempt
    start, expected = attempt.since + attempt.suspended_s, _run_time(live, transitions)
    return RunningJob(
        job_id=job.id,
        user=job.user,
        tag=job.spec.tag,
        devices=len(attempt.devices),
        started_at=attempt.since,
        suspended_s=attempt.suspended_s,
        group=job.group,
        lease_id=attempt.lease_id,
        priority=job.priority,
        is_leaving=job.state in (JobState.SUSPENDING, JobState.STOPPING),
        takes_slot=job.spec.pace is None and not attempt.engine,
        device_ids=attempt.devices,
        ends_after=None if expected.least_s is None else start + expected.least_s,
        ends_about=None if expected.likely_s is None else start + expected.likely_s,
    )


def _run_time(live: Live, transitions: JobTransitions) -> Estimate:
    """Return the run time within its limit: by its own progress if that says enough, else as earlier runs did."""
    learned, spec = transitions.estimates.estimate_of(live.job.id), live.job.spec
    progress = None if live.attempt.usage is None else live.attempt.usage.progress
    if progress is None:
        return learned
    left, fraction = time_left(progress, progress.at_s), progress.fraction
    # The first twentieth says less than earlier runs.
    if left is None or fraction is None or (fraction < 0.05 and learned.likely_s is not None):
        return learned
    limit = math.inf if spec.time_limit_s is None else spec.time_limit_s
    return Estimate(
        least_s=min(progress.at_s + left.least_s, limit),
        likely_s=min(progress.at_s + left.likely_s, limit),
        most_s=min(progress.at_s + left.most_s, limit + spec.grace_s),
    )


def power_limit(limit_w: float | None, transitions: JobTransitions) -> PowerLimit | None:
    """Return the limit with what jobs draw; None without a limit. A job in RAM draws nothing."""
    if limit_w is None:
        return None
    estimates, live = transitions.estimates, transitions.live.values()
    away = (JobState.SUSPENDED, JobState.RESUMING)
    running = [each for each in live if each.attempt.devices and each.job.state not in away]
    draws = {each.job.id: _draw_w(each, estimates.figure(each.job, "power_w")) for each in running}
    return PowerLimit(limit_w=limit_w, running_w=draws)


def _draw_w(live: Live, learned_w: float | None) -> float | None:
    """Return the power per GPU: the learned or the measured one, whichever is higher; None: unknown."""
    energy = None if live.attempt.usage is None else live.attempt.usage.energy
    if energy is None or energy.peak_w is None:
        return learned_w
    if learned_w is None:  # 30 s of measuring show what it draws
        return energy.peak_w if energy.seconds >= 30.0 * len(live.attempt.devices) else None
    return max(learned_w, energy.peak_w)


def lease_loads(transitions: JobTransitions, now: float) -> dict[str, float]:
    """Return the load of each running job by its lease, as far as it was measured."""
    return {
        attempt.lease_id: assumed_load(attempt.usage.load_percent, attempt.ran_s(now))
        for attempt in (live.attempt for live in transitions.live.values())
        if attempt.lease_id is not None and attempt.usage is not None
    }


def packing_now(transitions: JobTransitions, packing: Packing, queues: Sequence[LaneQueue], devices: int) -> Packing:
    """Return the limits of sharing with the present number of jobs for the usable devices."""
    least = packing.min_gain_percent
    if least is None or least <= -100.0 or devices < 2:  # with -100, memory alone decides which jobs share a device
        return packing
    jobs, most = sum(len(each.attempt.devices) for each in transitions.live.values()), MOST_PER_DEVICE * devices
    waiting = (queue.lane for queue in queues if not queue.lane.resumes and not queue.lane.engine)
    queued = transitions.store.count_queued([lane.id for lane in waiting if lane.need.devices], most)
    return replace(packing, depth=depth_limit(jobs + queued, devices))


class HostUsage:
    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, machine: str | None = None) -> None:
        self._transitions, self._leases, self._machine = transitions, leases, machine
        self._measured_with: Sample | None = None

    def sized(self, queues: Sequence[LaneQueue]) -> list[LaneQueue]:
        """Return the queues, with lanes that size each job where its RAM may be learned or expected."""
        learns = self._transitions.estimates.knows_host_use
        return [
            LaneQueue(lane=replace(each.lane, sizes_each=True), jobs=each.jobs)
            if not each.lane.sizes_each and each.lane.need.ram_mb is None and (each.lane.need.devices or learns)
            else each
            for each in queues
        ]

    def view(self, leases: Sequence[Lease], sample: Sample, rules: Rules) -> HostView:
        reserving = [lease for lease in leases if lease.host is not None]
        if not reserving:
            return HostView(limits=rules.host.limits, machine=self._machine)
        used = dict(self._leases.measure_host(reserving, again=sample is not self._measured_with))
        self._measured_with = sample
        for lease_id, live in self._transitions.live.by_lease.items():
            used_mb, cpus = _measured(live, sample)
            used[lease_id] = HostUse(ram_mb=used_mb, cpus=cpus)
        return HostView(limits=rules.host.limits, used=used, machine=self._machine)

    def publish(self, leases: Sequence[Lease], sample: Sample, now: float) -> Iterator[WantedClaim]:
        """Yield amendments for leases of our jobs that use noticeably more or less than they say."""
        leased = self._transitions.live.by_lease
        for lease in leases:
            live = leased.get(lease.id)
            if live is not None and lease.host is not None:
                share = _updated(lease.host, *_measured(live, sample), live.attempt.ran_s(now))
                if share is not None:
                    yield WantedClaim(claim=Claim(shares=lease.shares, host=share), amends=lease.id)


def _measured(live: Live, sample: Sample) -> tuple[float, float | None]:
    """Return the RAM and the CPUs that a job uses."""
    usage = live.attempt.usage
    used_mb = sample.ram_mb.get((live.attempt.job_id, live.attempt.number), 0.0)
    return used_mb, None if usage is None else usage.cpus_used


def _updated(share: HostShare, used_mb: float, cpus: float | None, ran_s: float) -> HostShare | None:
    """Return the share by what the job uses now; None if that hardly differs."""

    def differs(now_mb: float | None, before_mb: float | None) -> bool:
        change_mb = abs((now_mb or 0.0) - (before_mb or 0.0))
        return change_mb > 256.0 and change_mb > 0.1 * (before_mb or 0.0)

    ram_mb = share.ram_mb
    if share.is_ram_expected and ram_mb is not None:
        ram_mb = round(expected_ram_mb(ram_mb, used_mb, ran_s), 1)
    used_mb = round(used_mb, 1)
    has_other_cpus = abs((cpus or 0.0) - (share.used_cpus or 0.0)) > 0.5
    if has_other_cpus or differs(ram_mb, share.ram_mb) or differs(used_mb, share.used_mb):
        return replace(share, ram_mb=ram_mb, used_mb=used_mb, used_cpus=cpus)
    return None
