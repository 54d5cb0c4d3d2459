"""RAM and CPUs of the jobs of this queue: what their leases reserve, use, and say about it to other users.

Another user's process cannot tell the jobs of a queue apart. So the queue writes into each lease what the job was last
measured to use, whenever that has changed noticeably.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpuyard.model.lease import Claim, HostShare, Lease
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.host_room import HostUse, HostView
from gpuyard.policy.numbers import SHOWN_AFTER_S
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.sizing import expected_ram_mb
from gpuyard.ports import LeaseLedger, WantedClaim
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions

# A change of less than this is not written: 10% of what was written, or this much.
_CHANGED_PART, _CHANGED_MB, _CHANGED_CPUS = 0.1, 256.0, 0.5
_KEPT = 64


class HostUsage:
    def __init__(self, transitions: JobTransitions, leases: LeaseLedger, machine: str | None = None) -> None:
        self._transitions = transitions
        self._leases = leases
        self._machine = machine
        self._measured_with: Sample | None = None
        # By lease that needs no change: its share, and the RAM and CPUs that its job used then.
        self._judged: dict[str, tuple[HostShare, float, float | None]] = {}

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
        is_new = sample is not self._measured_with
        self._measured_with = sample
        used = dict(self._leases.measure_host(reserving, again=is_new))
        for lease_id, live in self._transitions.live.by_lease.items():
            used[lease_id] = _use_of(live, sample)
        return HostView(limits=rules.host.limits, used=used, machine=self._machine)

    def publish(self, leases: Sequence[Lease], sample: Sample, now: float) -> Iterator[WantedClaim]:
        """Yield amendments for leases of our jobs that use noticeably more or less than they say."""
        leased = self._transitions.live.by_lease
        if len(self._judged) > 2 * len(leased) + _KEPT:
            self._judged = {lease_id: judged for lease_id, judged in self._judged.items() if lease_id in leased}
        for lease in leases:
            live, host = leased.get(lease.id), lease.host
            if live is None or host is None:
                continue
            attempt, usage = live.attempt, live.attempt.usage
            used_mb = sample.ram_mb.get((attempt.job_id, attempt.number), 0.0)
            judged = host, used_mb, None if usage is None else usage.cpus_used
            if self._judged.get(lease.id) == judged:
                continue
            ran_s = attempt.ran_s(now)
            share = _updated(*judged, ran_s)
            if share is not None:
                yield WantedClaim(claim=Claim(shares=lease.shares, host=share), amends=lease.id)
            elif ran_s >= SHOWN_AFTER_S:
                self._judged[lease.id] = judged


def _use_of(live: Live, sample: Sample) -> HostUse:
    usage = live.attempt.usage
    used_mb = sample.ram_mb.get((live.attempt.job_id, live.attempt.number), 0.0)
    return HostUse(ram_mb=used_mb, cpus=None if usage is None else usage.cpus_used)


def _updated(share: HostShare, used_mb: float, cpus: float | None, ran_s: float) -> HostShare | None:
    """Return the share by what the job uses now; None if that hardly differs."""
    ram_mb = share.ram_mb
    if share.is_ram_expected and ram_mb is not None:
        ram_mb = round(expected_ram_mb(ram_mb, used_mb, ran_s), 1)
    used_mb = round(used_mb, 1)
    has_other_cpus = abs((cpus or 0.0) - (share.used_cpus or 0.0)) > _CHANGED_CPUS
    if has_other_cpus or _differs(ram_mb, share.ram_mb) or _differs(used_mb, share.used_mb):
        return replace(share, ram_mb=ram_mb, used_mb=used_mb, used_cpus=cpus)
    return None


def _differs(now_mb: float | None, before_mb: float | None) -> bool:
    change_mb = abs((now_mb or 0.0) - (before_mb or 0.0))
    return change_mb > _CHANGED_MB and change_mb > _CHANGED_PART * (before_mb or 0.0)
