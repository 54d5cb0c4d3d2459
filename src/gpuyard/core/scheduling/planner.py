"""decide(world) -> Plan: which jobs start or resume now and where, which are preempted, and why the others wait.

Candidates are considered in queue order (`queue_order`). For each: the limits of its lane, the devices that its batch
or tag leaves it (`start_limits`), and a claim that does not delay the head of the queue (`backfill`). A job that waits
for a limit, a gate, or others of its tag or array delays no other job. Jobs without devices have slots of their own and
wait behind no job with devices, unless that waits for RAM or CPUs that they need, too; runs of a batch take no slots,
as a batch limits its own number.

Jobs that were suspended to free memory wait in the same queue. A head that may preempt preempts the cheapest jobs of
lower priority (`preemption`); while these leave it waits, and no further job is preempted.
"""

from collections.abc import Iterator, Sequence

from gpuyard.core.lease import Claim, Need
from gpuyard.core.scheduling.backfill import Backfill
from gpuyard.core.scheduling.device_fit import host_refusals
from gpuyard.core.scheduling.plan import Plan, Preempt, Start, WaitingJob
from gpuyard.core.scheduling.preemption import find_victims
from gpuyard.core.scheduling.queue_order import Candidate, Lane, LaneQueue, QueueOrder
from gpuyard.core.scheduling.start_limits import StartLimits
from gpuyard.core.scheduling.tag_sharing import merge_variants
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.core.scheduling.world import WaitingLane, World

# At most this many jobs of a lane with differing needs are considered in one plan.
LOOK_AHEAD = 64


def decide(world: World, *, explained_lane: int | None = None) -> Plan:
    """Return the plan. `explained_lane` gets its reasons in full, even where all devices are full."""
    return _Planner(world, explained_lane).plan()


def estimate_start(world: World, lane: Lane, ahead: int, likely_s: float | None) -> float | None:
    """Return roughly when a job with `ahead` jobs before it could start, each taking `likely_s`; None if unknown. The
    time has passed if the running job that it waits for should have ended already."""
    same = [run for run in world.running if (run.devices if lane.need.devices else run.takes_slot and not run.devices)]
    known = (run.ends_about for run in same)
    ends = sorted(end for end in known if end is not None)
    if not ends or len(ends) < len(same) or (ahead >= len(ends) and likely_s is None):
        return None
    end, rounds = ends[ahead % len(ends)], ahead // len(ends)
    return max(world.now, end) + rounds * (likely_s or 0.0) if rounds else end


class _Planner:
    def __init__(self, world: World, explained_lane: int | None) -> None:
        self._world = world
        self._explained_lane = explained_lane
        self._dry: set[int] = set()
        lanes = [LaneQueue(lane=each.lane, jobs=self._jobs_of(each)) for each in world.lanes]
        self._order = QueueOrder(lanes, world.used, world.now, explained_lane=explained_lane)
        self._limits = StartLimits(world)
        self._starts: list[Start] = []
        self._backfill = Backfill(world)
        self._waiting: dict[int, WaitingJob] = {}
        self._first_waiting: WaitingJob | None = None
        self._preempts: tuple[Preempt, ...] = ()
        self._considered: dict[int, int] = {}
        self._refused: set[tuple[int, int]] = set()  # lanes and kinds of jobs: a kind that was refused once stays so
        own = {run.lease_id for run in world.running}
        leases = world.machine.leases
        self._holds_all_leases = bool(leases) and not world.tickets and all(lease.id in own for lease in leases)

    def plan(self) -> Plan:
        while (first := self._order.first()) is not None:
            self._consider(*first)
        return Plan(
            starts=tuple(self._starts),
            waiting=tuple(self._waiting.values()),
            preempts=self._preempts,
            head=self._backfill.first_head or self._first_waiting,
            dry=frozenset(self._dry),
        )

    def _jobs_of(self, waiting: WaitingLane) -> Iterator[Candidate]:
        yield from waiting.jobs
        if waiting.has_more:
            self._dry.add(waiting.lane.id)

    def _consider(self, lane: Lane, candidate: Candidate) -> None:
        sizes_by_kind = lane.sizes_each and lane.pace is None and lane.tag_sharing is None
        kind, facts = candidate.kind if sizes_by_kind else None, self._world.facts_of(candidate)
        if kind is not None and (lane.id, kind) in self._refused:
            self._look_further(lane)
            return
        refusals = self._limits.refusals(lane)
        lacks_disk = () if refusals else self._limits.disk_refusals(lane, candidate)
        refusals = refusals or lacks_disk
        need = lane.need if refusals or not lane.sizes_each else facts.need or lane.need
        variants: Sequence[Need] = (need,)
        if need.devices and not refusals:
            variants, refusals = self._limits.variants(lane, need, self._backfill.placement)
        refusals = refusals or self._limits.stagger_refusals(lane)
        need = merge_variants(variants)
        choice = refusals or self._place(lane, need, variants, candidate)
        if isinstance(choice, Claim) and (over := self._limits.power_refusals(facts, choice)):
            choice = refusals = over
        if isinstance(choice, Claim):
            self._start(lane, candidate, need, choice)
            return
        job = WaitingJob(job_id=candidate.job_id, lane=lane, need=need, reasons=choice)
        self._wait(job, candidate, is_refused=bool(refusals))
        if kind is not None and not refusals:
            self._refused.add((lane.id, kind))
        if _may_write_elsewhere(lane, lacks_disk) or (lane.sizes_each and not refusals):
            self._look_further(lane)
        else:
            self._order.drop(lane)

    def _wait(self, job: WaitingJob, candidate: Candidate, *, is_refused: bool) -> None:
        """Keep devices, RAM and CPUs for a job that waits for them. `is_refused`: it waits for something else."""
        lane, need = job.lane, job.need
        needs_head = need.devices and not is_refused and self._backfill.head is None
        if needs_head or lane.id not in self._waiting:
            self._waiting.setdefault(lane.id, job)
            if needs_head:
                self._make_head(job)
        if need.host is not None and not is_refused:
            self._backfill.keep_host_for(job, candidate)

    def _look_further(self, lane: Lane) -> None:
        """Go on with the next job of a lane whose jobs have needs of their own."""
        considered = self._considered[lane.id] = self._considered.get(lane.id, 0) + 1
        if considered < LOOK_AHEAD and self._backfill.placement.has_capacity():
            self._order.pass_over(lane)
        else:
            self._order.drop(lane)

    def _place(
        self, lane: Lane, need: Need, variants: Sequence[Need], candidate: Candidate
    ) -> Claim | tuple[Reason, ...]:
        backfill, is_explained = self._backfill, lane.id == self._explained_lane
        if not need.devices and need.host is None:
            return tuple(host_refusals(need, self._world.machine.snapshot.host)) or Claim(shares=())
        is_full = backfill.placement.states and not backfill.placement.has_capacity()
        is_hopeless = need.devices and is_full and (backfill.head or self._holds_all_leases)
        if is_hopeless and not is_explained:
            return ()  # without reasons: to write them in each step would cost more than the step itself
        backfill.reserve_for_tickets_ahead(lane)
        for variant in variants:
            claim = backfill.find_claim(variant, candidate)
            if claim is not None:
                return claim
        if not is_explained and lane.id in self._waiting:
            return ()
        return backfill.explain(need)

    def _start(self, lane: Lane, candidate: Candidate, need: Need, claim: Claim) -> None:
        self._order.advance(lane)
        charged_mb = self._charged_mb(lane, claim)
        start = Start(job_id=candidate.job_id, lane=lane, claim=claim, need=need, charged_mb=charged_mb)
        self._starts.append(start)
        self._limits.add_start(lane, self._world.facts_of(candidate), claim)
        self._backfill.add_start(candidate, claim)

    def _charged_mb(self, lane: Lane, claim: Claim) -> float | None:
        if lane.pace is None or not claim.shares:
            return None
        share = claim.shares[0]
        charged = self._backfill.placement.states[share.device_id].charged_mb
        return None if charged is None else charged + (share.memory_mb or 0.0)

    def _make_head(self, job: WaitingJob) -> None:
        self._first_waiting = self._first_waiting or job
        if job.lane.preempts:
            victims = find_victims(job.need, self._backfill.placement, self._world.running, job.lane.priority)
            self._preempts = tuple(Preempt(job_id=run.job_id, for_job=job.job_id) for run in victims)
        self._backfill.try_make_head(job)


def _may_write_elsewhere(lane: Lane, lacks_disk: tuple[Reason, ...]) -> bool:
    """Return whether the next job of the lane may start although a disk of its first job is full. All runs of a batch
    write to one disk; and a disk that is being read (without `needed`) is known in a moment: the order stays."""
    return lane.pace is None and any(reason.needed is not None for reason in lacks_disk)
