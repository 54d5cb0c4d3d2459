"""Adjusts the leases of newcomers, running jobs without an estimate, to what is expected of them now.

What a newcomer has shown also counts for jobs of its program that wait or run beside it (ADR 61).
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from gpuyard.control.learn_estimates import RunningPeaks
from gpuyard.control.live_jobs import Live
from gpuyard.control.track_usage import UsageTracker
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Job, Usage
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Claim, Lease, Share
from gpuyard.core.memory.expected_peak import ExpectedPeak
from gpuyard.core.memory.newcomer import Newcomer
from gpuyard.core.scheduling.device_memory import capacity
from gpuyard.core.snapshot import Sample
from gpuyard.ports import WantedClaim

_SHOWN_S = 1.0  # a running job whose memory was flat for this long says what to expect of others of its program

# Running jobs of a program: their groups and expected peaks, and the means of these.
_RunningLike = tuple[Sequence[tuple[int | None, ExpectedPeak]], tuple[float, ...]]
_NOT_RUNNING: _RunningLike = ((), ())
_NONE_BESIDE: RunningPeaks = ((), None)


class _Evidence(Struct):
    """What was known about a newcomer when its lease was last adjusted, and what followed: nothing else would follow
    until `until`, while its usage, the estimates and the leased shares are the same. Until then, the same is expected
    of `newcomer`, which knows no running jobs like it."""

    usage: Usage | None
    version: int
    newcomer: Newcomer
    until: float
    adjusted: tuple[Sequence[Share], float] | None = None  # the shares for a sureness
    shown: tuple[str, int | None, ExpectedPeak] | None = None  # its program, group and expected peak


class LeaseAdjuster:
    def __init__(self, transitions: JobTransitions, usage_tracker: UsageTracker) -> None:
        self._transitions = transitions
        self._usage_tracker = usage_tracker
        self._shares: dict[str, tuple[Share, ...]] = {}  # of newcomers, by lease, as they were adjusted last
        self._evidence: dict[int, _Evidence] = {}
        self._settled: dict[int, Live] = {}  # newcomers whose leases need no adjustment
        self._settled_for: tuple[int, float] | None = None
        self._sample: Sample | None = None  # the one that the next two belong to
        self._running: dict[str, _RunningLike] | None = None
        self._sizes_mb: dict[str, float] | None = None

    def adjust(self, leases: Sequence[Lease], now: float, sureness: float) -> Iterator[WantedClaim]:
        """Yield amendments for leases that reserve more or less than is expected of their jobs now."""
        if self._usage_tracker.last is None:
            return
        self._unsettle(now, sureness)
        known, self._shares = self._shares, {}
        held = {lease.id: lease.shares for lease in leases}
        newcomers = self._newcomers()
        for live in newcomers:
            lease_id = live.attempt.lease_id or ""
            before = held.get(lease_id, ())
            if self._settled.get(live.job.id) is live and known.get(lease_id) == before:
                self._shares[lease_id] = before
                continue
            shares = self._shares[lease_id] = self._adjusted(live, before, now, sureness)
            if shares != before:
                self._transitions.set_reserved(live.job.id, Claim(shares=shares))
                yield WantedClaim(claim=Claim(shares=shares), amends=live.attempt.lease_id)
        for gone in self._evidence.keys() - {live.job.id for live in newcomers}:
            del self._evidence[gone]

    def has_adjustments(self, now: float, sureness: float) -> bool:
        """Return whether `adjust` would change a lease: then the ledger has to be read."""
        self._unsettle(now, sureness)
        settled = self._settled
        for live in self._newcomers():
            if settled.get(live.job.id) is not live:
                before = self._shares.get(live.attempt.lease_id or "")
                if before is None or self._adjusted(live, before, now, sureness) != before:
                    return True
        return False

    def _unsettle(self, now: float, sureness: float) -> None:
        """Forget that a lease needs no adjustment where time, other estimates or another `sureness` may change it."""
        terms = (self._transitions.estimates.version, sureness)
        if terms != self._settled_for:
            self._settled_for = terms
            self._settled.clear()
        for job_id, evidence in self._evidence.items():
            if now >= evidence.until:
                self._settled.pop(job_id, None)

    def _adjusted(self, live: Live, before: tuple[Share, ...], now: float, sureness: float) -> tuple[Share, ...]:
        """Return the shares by what is expected of the job now. While it uses memory, they stay as they are until it is
        another `Live`, or `_unsettle` says so."""
        usage, evidence = live.attempt.usage, self._evidence_of(live, now)
        uses_memory = usage is not None and bool(usage.peaks_mb)
        if not uses_memory or evidence.adjusted != (before, sureness):
            running = self._running_beside(live, evidence, now)
            newcomer = evidence.newcomer if running == _NONE_BESIDE else self._newcomer(live, now, running)
            shares = newcomer.adjusted_shares(before, self._sizes(), sureness)
            evidence.adjusted = shares, sureness
            if shares != before:
                return shares
        if uses_memory:
            self._settled[live.job.id] = live
        return before

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
            found = _Evidence(usage, version, newcomer, newcomer.changes_at)
            if newcomer.flat_s >= _SHOWN_S:
                peaks = newcomer.usage.peaks_mb
                device_id = max(peaks, key=peaks.__getitem__)
                peak = newcomer.expected(device_id, self._sizes().get(device_id, 0.0))
                found.shown = self._transitions.estimates.fingerprints(live.job)[1], live.job.group, peak
            self._evidence[live.job.id] = found
        return found

    def evidence_due(self) -> dict[int, float]:
        """Return for each newcomer, by job id, when a sample will say more about it if its memory stays as it is."""
        known = ((live.job.id, self._evidence.get(live.job.id)) for live in self._newcomers())
        return {job_id: evidence.until for job_id, evidence in known if evidence is not None}

    def _newcomer(self, live: Live, now: float, running: RunningPeaks = _NONE_BESIDE) -> Newcomer:
        return Newcomer(live.attempt, self._transitions.estimates.known_runs(live.job, *running), now)

    def running_like(self, job: Job, now: float) -> RunningPeaks:
        """Return what to expect of a job from running jobs that have shown what they use: the expected peaks of those
        of its program, and the largest of those of its batch."""
        self._forget_older_sample()
        if self._running is None:
            self._running = self._peaks_of_running(now)
        found, means_mb = self._running.get(self._transitions.estimates.fingerprints(job)[1], _NOT_RUNNING)
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
        return {program: (peaks, tuple([peak.mean_mb for _, peak in peaks])) for program, peaks in found.items()}

    def _sizes(self) -> dict[str, float]:
        self._forget_older_sample()
        if self._sizes_mb is None:
            devices = self._sample.snapshot.devices if self._sample is not None else ()
            self._sizes_mb = {device.id: size for device in devices if (size := capacity(device)) is not None}
        return self._sizes_mb

    def _forget_older_sample(self) -> None:
        if self._sample is not self._usage_tracker.last:
            self._sample, self._running, self._sizes_mb = self._usage_tracker.last, None, None

    def _newcomers(self) -> list[Live]:
        """Return the running jobs without an estimate."""
        return [live for live in self._transitions.live.unpredicted.values() if live.job.state is JobState.RUNNING]


def _without_one(figures: tuple[float, ...], figure: float) -> tuple[float, ...]:
    place = figures.index(figure) if figure in figures else len(figures)
    return (*figures[:place], *figures[place + 1 :])
