"""Adjusts the leases of newcomers, running jobs without an estimate, to what is expected of them now.

What a newcomer has shown also counts for jobs of its program that wait or run beside it (ADR 61).
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from gpuyard.model.job import Job
from gpuyard.model.lease import Claim, Lease, Share
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.device_state import capacity
from gpuyard.policy.estimates import ExpectedPeak
from gpuyard.policy.usage_curve import Newcomer
from gpuyard.ports import WantedClaim
from gpuyard.queue.learn_estimates import RunningPeaks
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.measure_usage import UsageTracker
from gpuyard.queue.transitions import JobTransitions

_SHOWN_S = 1.0  # a running job whose memory was flat for this long says what to expect of others of its program


class _Evidence(Struct):
    """What a sample says about the newcomers: nothing else follows from it before `until`, while the live jobs and the
    estimates are the same."""

    sample: Sample | None
    versions: tuple[int, int]
    until: float
    sizes_mb: Mapping[str, float]  # of the devices
    newcomers: list[tuple[Live, Newcomer]]
    shown: dict[str, list[tuple[Job, ExpectedPeak]]]  # by program
    settled_for: float | None = None  # the sureness for which no lease needs to be adjusted


class LeaseAdjuster:
    def __init__(self, transitions: JobTransitions, usage_tracker: UsageTracker) -> None:
        self._transitions = transitions
        self._usage_tracker = usage_tracker
        self._shares: dict[str, tuple[Share, ...]] = {}  # of newcomers, by lease, as they were adjusted last
        self._known: _Evidence | None = None

    def adjust(self, leases: Sequence[Lease], now: float, sureness: float) -> Iterator[WantedClaim]:
        """Yield amendments for leases that reserve more or less than is expected of their jobs now."""
        if self._usage_tracker.last is None:
            return
        held = {lease.id: lease.shares for lease in leases}
        self._shares = {}
        for live, newcomer in list(self._evidence(now).newcomers):
            lease_id = live.attempt.lease_id or ""
            before = held.get(lease_id, ())
            shares = self._shares[lease_id] = self._adjusted(live, newcomer, before, now, sureness)
            if shares != before:
                self._transitions.set_reserved(live.job.id, Claim(shares=shares))
                yield WantedClaim(claim=Claim(shares=shares), amends=live.attempt.lease_id)

    def has_adjustments(self, now: float, sureness: float) -> bool:
        """Return whether `adjust` would change a lease: then the ledger has to be read."""
        if not self._transitions.live.unpredicted:
            return False
        evidence = self._evidence(now)
        if evidence.settled_for != sureness:
            for live, newcomer in evidence.newcomers:
                before = self._shares.get(live.attempt.lease_id or "")
                if before is None or self._adjusted(live, newcomer, before, now, sureness) != before:
                    return True
            evidence.settled_for = sureness
        return False

    def _adjusted(
        self, live: Live, newcomer: Newcomer, before: tuple[Share, ...], now: float, sureness: float
    ) -> tuple[Share, ...]:
        """Return the shares by what is expected of the job, by itself and by running jobs like it."""
        means_mb, batch = self.running_like(live.job, now, but=live.job.id)
        if means_mb or batch is not None:
            known = self._transitions.estimates.known_runs(live.job, means_mb, batch)
            newcomer = Newcomer(live.attempt, known, now)
        return newcomer.adjusted_shares(before, self._evidence(now).sizes_mb, sureness)

    def evidence_due(self) -> dict[int, float]:
        """Return for each newcomer, by job id, when a sample will say more about it if its memory stays as it is."""
        newcomers = [] if self._known is None else self._known.newcomers
        return {live.job.id: newcomer.changes_at for live, newcomer in newcomers}

    def running_like(self, job: Job, now: float, *, but: int | None = None) -> RunningPeaks:
        """Return what to expect of a job from running jobs that have shown what they use: the expected peaks of those
        of its program, without the job `but`, and the largest of those of its batch."""
        found = self._evidence(now).shown.get(self._transitions.estimates.fingerprints(job)[1], ())
        batch = [peak for other, peak in found if other.group == job.group] if job.spec.pace is not None else []
        means_mb = tuple([peak.mean_mb for other, peak in found if other.id != but])
        return means_mb, max(batch, default=None, key=lambda peak: peak.mean_mb)

    def _evidence(self, now: float) -> _Evidence:
        known, sample, estimates = self._known, self._usage_tracker.last, self._transitions.estimates
        versions = estimates.version, self._transitions.live.version
        if known is None or known.sample is not sample or known.versions != versions or now >= known.until:
            newcomers = [
                (live, Newcomer(live.attempt, estimates.known_runs(live.job), now))
                for live in self._transitions.live.unpredicted.values()
                if live.job.state is JobState.RUNNING
            ]
            devices = sample.snapshot.devices if sample is not None else ()
            sizes_mb = {device.id: size for device in devices if (size := capacity(device)) is not None}
            until = min((newcomer.changes_at for _, newcomer in newcomers), default=float("inf"))
            self._known = known = _Evidence(sample, versions, until, sizes_mb, newcomers, {})
            for live, newcomer in newcomers:
                if newcomer.flat_s >= _SHOWN_S:
                    peaks = newcomer.usage.peaks_mb
                    device_id = max(peaks, key=peaks.__getitem__)
                    peak = newcomer.expected(device_id, sizes_mb.get(device_id, 0.0))
                    known.shown.setdefault(estimates.fingerprints(live.job)[1], []).append((live.job, peak))
        return known
