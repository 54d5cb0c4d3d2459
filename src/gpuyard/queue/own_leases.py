"""The shares of running attempts stay taken, even if their lease files are removed.

A lease is a file that the program of an attempt keeps locked. Its user, the owner of the directory and a cleaner of
temporary files can remove it, and the program does not notice. Rules:
- Each grant counts every live attempt of this queue. If its lease is missing from the ledger, it counts with the shares
  that the lease had last.
- A lease that stays missing is made again under its old name, so that other programs see it, too. Not at once: the
  lease of a program that has just ended is gone a moment before its end is recorded.
- The daemon holds such a lease until the attempt has ended. The next daemon makes it again at its first grant.

The queue's own ticket in the ledger, for the job at the head of the queue.
"""

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import TypeAlias

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.lease import Claim, Holder, Lease, Share, Ticket, amended
from gpuyard.model.lifecycle import IN_SUSPENSION
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import WaitingJob
from gpuyard.ports import HeldClaim, LeaseLedger, WantedClaim
from gpuyard.queue.live_attempts import Live, LiveJobs
from gpuyard.queue.transitions import JobTransitions

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 1.0
_REMAKE_AFTER_S = 0.9
_MOST_NAMED = 10


class OwnLeases:
    def __init__(self, transitions: JobTransitions, me: Holder) -> None:
        self.notice: str | None = None
        self._transitions = transitions
        self._me = me
        self._seen: dict[str, Lease] = {}  # as last seen in the ledger, by lease
        self._missing: dict[str, float] = {}  # since when, by lease
        self._held: dict[str, HeldClaim] = {}
        self._checked_at = -math.inf
        self._remade = 0
        self._takes_over = True
        self._known_leased: tuple[LiveJobs, int, dict[str, Live]] | None = None
        self._labels_for: dict[str, Live] | None = None  # the result of `_leased` that the next belongs to
        self._labels: dict[str, str] = {}  # of leases, each with the name of its job

    def is_check_due(self, now: float) -> bool:
        """Whether the ledger should be read although no job waits for a device. `now` is of a monotonic clock."""
        return now >= self._checked_at + _CHECK_EVERY_S and bool(self._leased())

    def complete(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Return the leases of the ledger, and those of live attempts that are missing there."""
        found = {lease.id: lease for lease in leases}
        leased = self._leased()
        missing = [self._lease_of(lease_id, live) for lease_id, live in leased.items() if lease_id not in found]
        self._seen = {lease_id: found[lease_id] for lease_id in leased if lease_id in found}
        self._seen.update({lease.id: lease for lease in missing})
        if not missing:
            return tuple(leases)
        return (*leases, *missing)

    def wanted(self, leases: Sequence[Lease], now: float) -> list[WantedClaim]:
        """Return claims for the leases that have been missing for a while; `leases` are those of the ledger."""
        self._takes_over, self._checked_at = self._checked_at == -math.inf, now
        leased, known_since = self._leased(), self._missing
        missing = leased.keys() - {lease.id for lease in leases}
        self._missing = {each: known_since.get(each, now) for each in leased if each in missing} if missing else {}
        due = [each for each, since in self._missing.items() if self._takes_over or now >= since + _REMAKE_AFTER_S]
        return [
            WantedClaim(claim=_claim_of(self._seen[each]), label=f"job {leased[each].job.id}", remakes=each)
            for each in due
        ]

    def relabelled(self, leases: Sequence[Lease]) -> list[WantedClaim]:
        """Return claims that name the job of each lease of ours that has passed to the next job of a slice."""
        leased, relabelled = self._leased(), []
        if self._labels_for is not leased:
            self._labels_for = leased
            self._labels = {lease_id: f"job {live.job.id}" for lease_id, live in leased.items()}
        for lease in leases:
            label = self._labels.get(lease.id)
            if label is not None and lease.holder.label != label:
                relabelled.append(WantedClaim(claim=Claim(shares=lease.shares), label=label, amends=lease.id))
        return relabelled

    def keep(self, claims: Sequence[HeldClaim]) -> Sequence[HeldClaim]:
        """Hold the leases among the claims that were made again; return the others, which are new."""
        remade = [held for held in claims if held.lease.id in self._missing]
        if not remade:
            return claims
        new = [held for held in claims if held.lease.id not in self._missing]
        for held in remade:
            before = self._held.pop(held.lease.id, None)
            if before is not None:
                before.leave()
            self._held[held.lease.id] = held
            self._missing.pop(held.lease.id, None)
        if self._takes_over:
            # The daemon before held some, and an attempt that never started is not reported yet.
            _log.info("%d leases of running jobs were made again", len(remade))
            return new
        self._remade += len(remade)
        jobs = ", ".join(str(held.lease.holder.label) for held in remade[:_MOST_NAMED])
        jobs += ", …" if len(remade) > _MOST_NAMED else ""
        _log.warning("the leases of %s were gone from the ledger while they run, and were made again", jobs)
        self.notice = (
            f"the lease files of {self._remade} running jobs were removed ({jobs}), and made again: see that "
            "nothing deletes files in the lease directory (`gpuyard leases` shows it)"
        )
        return new

    def release_ended(self) -> None:
        """Give back the leases of attempts that are over."""
        if self._held:
            for lease_id in self._held.keys() - self._transitions.live.by_lease.keys():
                self._held.pop(lease_id).release()

    def _leased(self) -> dict[str, Live]:
        """Return the live attempts on this machine that hold a lease, by lease. A suspended one reserves no device.
        What they use may be that of an earlier step."""
        lives, known = self._transitions.live, self._known_leased
        if known is None or known[0] is not lives or known[1] != lives.version:
            leased = {
                lease_id: live for lease_id, live in lives.by_lease.items() if live.job.state not in IN_SUSPENSION
            }
            known = self._known_leased = lives, lives.version, leased
        return known[2]

    def _lease_of(self, lease_id: str, live: Live) -> Lease:
        attempt, reserved_mb = live.attempt, live.attempt.reserved_mb
        is_exclusive = live.job.spec.need.is_exclusive or reserved_mb is None
        shares = tuple(
            Share(device_id=device_id, memory_mb=reserved_mb, is_exclusive=is_exclusive)
            for device_id in attempt.devices
        )
        seen = self._seen.get(lease_id)
        claim = Claim(shares=shares, host=live.job.spec.need.host) if seen is None else _claim_of(seen)
        holder = replace(self._me, label=f"job {attempt.job_id}")
        return Lease(id=lease_id, holder=holder, shares=claim.shares, since=attempt.since, host=claim.host)


def _claim_of(lease: Lease) -> Claim:
    return Claim(shares=lease.shares, host=lease.host)


def with_changes(leases: tuple[Lease, ...], changes: Sequence[WantedClaim]) -> tuple[Lease, ...]:
    """Return the leases as the amendments among the claims will make them."""
    if not changes:
        return leases
    claims = {wanted.amends: wanted.claim for wanted in changes}
    return tuple(amended(lease, claims[lease.id]) if lease.id in claims else lease for lease in leases)


# A job waits this long before it gets a ticket: most waits are over by then, and a ticket is a file. Where others wait
# with tickets, it gets one at once.
TICKET_AFTER_S = 0.25
LedgerState: TypeAlias = tuple[tuple[Lease, ...], tuple[Ticket, ...]]
_WAITS_FOR_US = frozenset({ReasonKind.PAUSED, ReasonKind.ENGINE, ReasonKind.RESOURCE_LIMIT})


class QueueTicket:
    def __init__(self, leases: LeaseLedger) -> None:
        self._leases = leases
        self._head_since: tuple[int, float] | None = None
        self._after_s = TICKET_AFTER_S

    def update(self, head: WaitingJob | None, now: float, *, has_started: bool, others_wait: bool) -> None:
        """Keep a ticket for `head`, unless it waits only for this queue itself. After a start of one of our jobs, the
        ticket is given up, so that the queue goes behind those that already wait."""
        self._after_s = 0.0 if others_wait else TICKET_AFTER_S
        if head is None or has_started:
            self._leases.return_ticket()
            self._head_since = None
        if head is None:
            return
        if self._head_since is None or self._head_since[0] != head.lane.id:
            self._head_since = (head.lane.id, now)
        waits_for_others = not any(reason.kind in _WAITS_FOR_US for reason in head.reasons)
        if now - self._head_since[1] >= self._after_s and waits_for_others:
            with contextlib.suppress(EnvironmentFault):
                self._leases.take_ticket(head.need, head.lane.priority, f"job {head.job_id}")

    def wake_at(self, now: float) -> float | None:
        """Return when the head is due to get a ticket, or None."""
        if self._head_since is None or self._leases.my_ticket() is not None:
            return None
        due_at = self._head_since[1] + self._after_s
        return due_at if now < due_at else None
