"""The leases of this queue in the ledger, and its ticket there.

A lease is a file that a program keeps locked, and that others can remove without its notice. Each grant counts every
live attempt of this queue, one whose lease is missing with the shares that it had last. A lease that stays missing is
made again under its old name (not at once: the lease of a program that has just ended is gone before its end is
recorded), and held by the daemon until the attempt has ended. The next daemon makes it again at its first grant.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import Job
from gpuyard.model.lease import Claim, Holder, Lease, Share, Ticket, amended
from gpuyard.model.lifecycle import IN_SUSPENSION, JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.device_state import capacity
from gpuyard.policy.estimates import ExpectedPeak
from gpuyard.policy.usage_curve import Newcomer
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import WaitingJob
from gpuyard.ports import HeldClaim, LeaseLedger, WantedClaim
from gpuyard.queue.learn_estimates import RunningPeaks, fingerprints_of
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.measure_usage import UsageTracker
from gpuyard.queue.transitions import JobTransitions

_log = logging.getLogger(__name__)


class OwnLeases:
    def __init__(self, transitions: JobTransitions, me: Holder) -> None:
        self.notice: str | None = None
        self._transitions, self._me = transitions, me
        self._seen: dict[str, Lease] = {}  # as last seen in the ledger, by lease
        self._missing: dict[str, float] = {}  # since when, by lease
        self._held: dict[str, HeldClaim] = {}
        self._checked_at = -math.inf
        self._remade = 0
        self._takes_over = True

    def is_check_due(self, now: float) -> bool:
        """Whether the ledger should be read although no job waits for a device. `now` is of a monotonic clock."""
        return now >= self._checked_at + 1.0 and bool(self._leased())

    def complete(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Return the leases of the ledger, and those of live attempts that are missing there."""
        found = {lease.id: lease for lease in leases}
        leased = self._leased()
        missing = [self._lease_of(lease_id, live) for lease_id, live in leased.items() if lease_id not in found]
        self._seen = {lease_id: found[lease_id] for lease_id in leased if lease_id in found}
        self._seen |= {lease.id: lease for lease in missing}
        return (*leases, *missing)

    def wanted(self, leases: Sequence[Lease], now: float) -> list[WantedClaim]:
        """Return claims for the leases that have been missing for a while; `leases` are those of the ledger."""
        self._takes_over, self._checked_at = self._checked_at == -math.inf, now
        leased, known_since = self._leased(), self._missing
        missing = leased.keys() - {lease.id for lease in leases}
        self._missing = {each: known_since.get(each, now) for each in leased if each in missing} if missing else {}
        due = [each for each, since in self._missing.items() if self._takes_over or now >= since + 0.9]
        found = [(self._seen[each], f"job {leased[each].job.id}") for each in due]
        return [
            WantedClaim(claim=Claim(shares=lease.shares, host=lease.host), label=label, remakes=lease.id)
            for lease, label in found
        ]

    def relabelled(self, leases: Sequence[Lease]) -> list[WantedClaim]:
        """Return claims that name the job of each lease of ours that has passed to the next job of a slice."""
        labels = {lease_id: f"job {live.job.id}" for lease_id, live in self._leased().items()}
        return [
            WantedClaim(claim=Claim(shares=lease.shares), label=labels[lease.id], amends=lease.id)
            for lease in leases
            if lease.id in labels and lease.holder.label != labels[lease.id]
        ]

    def keep(self, claims: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        """Hold the leases among the claims that were made again; return the others, which are new."""
        remade = [held for held in claims if held.lease.id in self._missing]
        if not remade:
            return claims
        new = [held for held in claims if held.lease.id not in self._missing]
        for held in remade:
            if (before := self._held.get(held.lease.id)) is not None:
                before.leave()
            self._held[held.lease.id] = held
            self._missing.pop(held.lease.id, None)
        if self._takes_over:
            # The daemon before held some, and an attempt that never started is not reported yet.
            _log.info("%d leases of running jobs were made again", len(remade))
            return new
        self._remade += len(remade)
        jobs = ", ".join([str(held.lease.holder.label) for held in remade[:10]] + ["…"] * (len(remade) > 10))
        _log.warning("the leases of %s were gone from the ledger while they run, and were made again", jobs)
        self.notice = (
            f"the lease files of {self._remade} running jobs were removed ({jobs}), and made again: see that "
            "nothing deletes files in the lease directory (`gpuyard leases` shows it)"
        )
        return new

    def release_ended(self) -> None:
        """Give back the leases of attempts that are over."""
        for lease_id in self._held.keys() - self._transitions.live.by_lease.keys():
            self._held.pop(lease_id).release()

    def _leased(self) -> dict[str, Live]:
        """Return the live attempts on this machine that hold a lease, by lease. A suspended one reserves no device."""
        by_lease = self._transitions.live.by_lease
        return {lease_id: live for lease_id, live in by_lease.items() if live.job.state not in IN_SUSPENSION}

    def _lease_of(self, lease_id: str, live: Live) -> Lease:
        attempt, reserved_mb = live.attempt, live.attempt.reserved_mb
        is_exclusive = live.job.spec.need.is_exclusive or reserved_mb is None
        share = Share(device_id="", memory_mb=reserved_mb, is_exclusive=is_exclusive)
        shares = tuple(replace(share, device_id=device_id) for device_id in attempt.devices)
        holder = replace(self._me, label=f"job {attempt.job_id}")
        lease = Lease(id=lease_id, holder=holder, shares=shares, since=attempt.since, host=live.job.spec.need.host)
        seen = self._seen.get(lease_id)
        return lease if seen is None else replace(lease, shares=seen.shares, host=seen.host)


def with_changes(leases: tuple[Lease, ...], changes: Sequence[WantedClaim]) -> tuple[Lease, ...]:
    """Return the leases as the amendments among the claims will make them."""
    claims = {wanted.amends: wanted.claim for wanted in changes}
    return tuple(amended(lease, claims[lease.id]) if lease.id in claims else lease for lease in leases)


# A job waits this long before it gets a ticket: most waits are over by then, and a ticket is a file. Where others wait
# with tickets, it gets one at once.
TICKET_AFTER_S = 0.25
LedgerState: TypeAlias = tuple[tuple[Lease, ...], tuple[Ticket, ...]]


class QueueTicket:
    def __init__(self, leases: LeaseLedger) -> None:
        self._leases = leases
        self._head_since: tuple[int, float] | None = None
        self._after_s = TICKET_AFTER_S

    def update(self, head: WaitingJob | None, now: float, *, has_started: bool, others_wait: bool) -> None:
        """Keep a ticket for `head`, unless it waits for this queue. A start gives it up: others are next."""
        self._after_s = 0.0 if others_wait else TICKET_AFTER_S
        if head is None or has_started:
            self._leases.return_ticket()
            self._head_since = None
        if head is None:
            return
        if self._head_since is None or self._head_since[0] != head.lane.id:
            self._head_since = (head.lane.id, now)
        for_us = (ReasonKind.PAUSED, ReasonKind.ENGINE, ReasonKind.RESOURCE_LIMIT)
        waits_for_others = not any(reason.kind in for_us for reason in head.reasons)
        if now - self._head_since[1] >= self._after_s and waits_for_others:
            with contextlib.suppress(EnvironmentFault):
                self._leases.take_ticket(head.need, head.lane.priority, f"job {head.job_id}")

    def wake_at(self, now: float) -> float | None:
        """Return when the head is due to get a ticket, or None."""
        if self._head_since is None or self._leases.my_ticket() is not None:
            return None
        due_at = self._head_since[1] + self._after_s
        return due_at if now < due_at else None


class _Evidence(Struct):
    """What a sample says about the newcomers until `until`, while the live jobs and the estimates are the same."""

    sample: Sample | None
    versions: tuple[int, int]
    until: float
    sizes_mb: Mapping[str, float]  # of the devices
    newcomers: list[tuple[Live, Newcomer]]
    shown: dict[str, list[tuple[Job, ExpectedPeak]]]  # by program


class LeaseAdjuster:
    """Adjusts the leases of newcomers, running jobs without an estimate, to what is expected of them now. What a
    newcomer has shown also counts for jobs of its program that wait or run beside it (ADR 61)."""

    def __init__(self, transitions: JobTransitions, usage_tracker: UsageTracker) -> None:
        self._transitions, self._usage_tracker = transitions, usage_tracker
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
        newcomers = self._evidence(now).newcomers if self._transitions.live.unpredicted else ()
        found = ((live, newcomer, self._shares.get(live.attempt.lease_id or "")) for live, newcomer in newcomers)
        return any(
            before is None or self._adjusted(live, newcomer, before, now, sureness) != before
            for live, newcomer, before in found
        )

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
        found = self._evidence(now).shown.get(fingerprints_of(job)[1], ())
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
                if newcomer.flat_s >= 1.0:  # its memory says what to expect of others of its program
                    peaks = newcomer.usage.peaks_mb
                    device_id = max(peaks, key=peaks.__getitem__)
                    peak = newcomer.expected(device_id, sizes_mb.get(device_id, 0.0))
                    known.shown.setdefault(fingerprints_of(live.job)[1], []).append((live.job, peak))
        return known
