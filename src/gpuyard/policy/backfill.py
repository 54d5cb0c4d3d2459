"""Backfill and reservation: jobs behind the head of the queue start only where that cannot delay it.

The head of the queue is the first job that needs devices and cannot get them. It has every device reserved that would
serve it. A job behind it may start on devices that the head cannot use, in the memory that the head leaves over if its
own need is known, or anywhere if it is sure to end before the head could start. A job that would not fit even after all
leases have ended does not become the head.

The first job that waits for RAM or CPUs, with devices or without, has them kept: a job behind it starts only if the
first job fits beside it once those jobs have ended that ran already when the wait began. After STRICT_AFTER_S no job
behind it starts that reserves RAM or CPUs.

Requests in the ledger's queue, of other users or of scripts, that are ahead of this queue are served before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from msgspec.structs import replace

from gpuyard.model.lease import Claim, Holder, Need
from gpuyard.policy.numbers import STRICT_AFTER_S
from gpuyard.policy.placement import PlacementState, in_queue_order
from gpuyard.policy.queue_order import Candidate, Lane
from gpuyard.policy.rules import Rule
from gpuyard.policy.running_counts import StartedSoFar
from gpuyard.policy.wait_reasons import Reason
from gpuyard.policy.world import WaitingJob, World, planned_lease_id


class Backfill:
    """Finds claims for the candidates of one plan."""

    def __init__(self, world: World, started: StartedSoFar, rules: Sequence[Rule]) -> None:
        self._world = world
        self._started = started
        self._rules = rules
        self._ends_of_starts: dict[str, float] = {}  # the earliest ends, by the lease that stands for the start
        self.head: WaitingJob | None = None
        self._beside_head: PlacementState | None = None
        self._head_starts_at: float | None = None
        self._host_head: WaitingJob | None = None  # the first job that waits for RAM or CPUs
        self.first_head: WaitingJob | None = None  # the head or the host's head, whichever comes first in the queue
        self._tickets = in_queue_order(world.tickets)
        # Needs that were refused, with and without the head's reservation. They stay so: placements only fill.
        self._refused: set[Need] = set()
        self._never: set[Need] = set()

    @cached_property
    def placement(self) -> PlacementState:
        """All leases and starts of this plan, without the head's reservation."""
        return PlacementState(self._world.machine, self._started, self._rules)

    def _has_waited(self, candidate: Candidate) -> bool:
        return self._world.now - candidate.queued_at > STRICT_AFTER_S

    def explain(self, need: Need) -> tuple[Reason, ...]:
        return tuple((self._beside_head or self.placement).explain(need))

    def add_start(self, job: Candidate, claim: Claim) -> None:
        job_id, least_s = job.job_id, self._world.facts_of(job).estimate.least_s
        self._ends_of_starts[planned_lease_id(job_id)] = self._world.now + (least_s or 0.0)
        for placement in self._placements() if claim.takes_lease else ():
            placement.add_claim(claim, self._holder(job_id), planned_lease_id(job_id))

    def find_claim(self, need: Need, candidate: Candidate) -> Claim | None:
        """Return a claim that cannot delay the head, or None."""
        if need not in self._refused:
            claim = (self._beside_head or self.placement).find_claim(need)
            if claim is not None:
                return claim
            self._refused.add(need)
        if self.head is None or need in self._never or not self._ends_before(self.head, candidate):
            return None
        claim = self.placement.find_claim(need)
        if claim is None:
            self._never.add(need)
        is_host_kept = self._beside_head is not None and self._beside_head.host.refuses(need)
        return None if is_host_kept else claim

    def reserve_for_tickets_ahead(self, lane: Lane) -> None:
        """Reserve devices for requests in the ledger's queue that are ahead of this lane."""
        mine = self._world.my_ticket
        place = (-lane.priority, mine.since if mine else float("inf"))
        while self._tickets and (-self._tickets[0].priority, self._tickets[0].since) < place:
            ticket = self._tickets.pop(0)
            for placement in self._placements():
                placement.reserve_for_ticket(ticket)

    def try_make_head(self, job: WaitingJob) -> None:
        """Make the job the head of the queue, unless the end of all leases would not let it start."""
        if not self.placement.has_capacity():
            self._set_head(job)  # no device is left to reserve
            return
        beside_head = (self._beside_head or self.placement).copy()
        if beside_head.reserve(job.need, self._holder(job.job_id)):
            self._beside_head = beside_head
            self._set_head(job)

    def _set_head(self, job: WaitingJob) -> None:
        self.head, self.first_head = job, self.first_head or job

    def keep_host_for(self, job: WaitingJob, candidate: Candidate) -> None:
        """Reserve RAM and CPUs for the job if it is the first that waits for them."""
        if self._host_head is None and self.placement.host.lacks(job.need):
            beside = (self._beside_head or self.placement).copy()
            is_strict = self._has_waited(candidate)
            runs = [run for run in self._world.running if run.started_at <= candidate.queued_at]
            older = None if is_strict else {run.lease_id for run in runs if run.lease_id is not None}
            if beside.reserve_host(job.need, self._holder(job.job_id), older):
                self._host_head, self._beside_head = job, beside
                self.first_head = self.first_head or job

    def _placements(self) -> Iterator[PlacementState]:
        yield self.placement
        if self._beside_head is not None:
            yield self._beside_head

    def _ends_before(self, head: WaitingJob, candidate: Candidate) -> bool:
        most_s = self._world.facts_of(candidate).estimate.most_s
        if most_s is None:
            return False
        if self._head_starts_at is None:
            self._head_starts_at = self._may_start_at(head.need, self._earliest_ends())
        return self._world.now + most_s <= self._head_starts_at

    def _may_start_at(self, need: Need, ends: Mapping[str, float]) -> float:
        first = self.placement.first_available(need, ends)
        return first[-1][0] if len(first) == need.devices else self._world.now

    def _earliest_ends(self) -> dict[str, float]:
        """Return when each lease of this queue could end at the earliest: now, if that is unknown."""
        now = self._world.now
        running = (run for run in self._world.running if run.lease_id is not None)
        ends = {run.lease_id or "": max(now, run.ends_after or now) for run in running}
        return ends | self._ends_of_starts

    def _holder(self, job_id: int) -> Holder:
        return replace(self._world.holder, label=planned_lease_id(job_id))
