"""decide(world) -> Plan: which jobs start or resume now and where, which are preempted, and why the others wait. And
worlds as files, which are decided again elsewhere.

Candidates are considered in queue order. A job that waits for a `JobRule` delays no other; the first that waits for
devices has them reserved (`Backfill`). A head that may preempt preempts the cheapest jobs of lower priority.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Claim, Holder, Need
from gpuyard.policy.numbers import LOOK_AHEAD, STRICT_AFTER_S
from gpuyard.policy.placement import PlacementState, in_queue_order
from gpuyard.policy.preempt import find_victims
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, QueueOrder
from gpuyard.policy.rules import RULES, DeviceLoad, JobRule, Power, Rule, RunningLimit, StartRequest, first_refusal
from gpuyard.policy.running_counts import StartedSoFar
from gpuyard.policy.sharing import merge_variants, spread_need
from gpuyard.policy.wait_reasons import Reason
from gpuyard.policy.world import Plan, Preempt, Start, WaitingJob, WaitingLane, World, planned_lease_id

# After this time the daemon takes back what has not started.
LONGEST_S = 1.0
# Jobs that the starts of one plan take along: to record and launch them takes some 20 ms.
MOST = 96


def may_slice(lane: Lane, plan: Plan, world: World) -> bool:
    """Return whether the starts of a lane may take along jobs that wait."""
    is_special = lane.engine or lane.resumes or lane.preempts or lane.writes_files
    is_paced = lane.pace is not None or lane.tag_sharing is not None or lane.stagger_s or lane.need.limits_load
    if is_special or is_paced or plan.preempts or world.closed_reasons or world.start_caps:
        return False
    takes_lease = lane.need.devices or lane.need.host is not None or lane.sizes_each
    if takes_lease and any(ticket.priority > lane.priority for ticket in world.tickets):
        return False
    return all(each.lane.priority < lane.priority for each in plan.waiting if each.lane.id != lane.id)


def slice_length(likely_s: float | None, waiting: int, places: int, starts: int = 1) -> int:
    """Return how many jobs each of these starts takes along, of which each takes `likely_s`. What waits is shared among
    all places where jobs run, so that these end at about the same time."""
    if likely_s is None:
        return 0
    # Half of the longest time that an urgent job may wait: estimates of short jobs are off by a factor of two. A keeper
    # needs a millisecond for a job that takes no time.
    return min(MOST // starts, int(0.5 / max(likely_s, 0.001)) - 1, waiting // max(1, places))


def estimate_start(world: World, lane: Lane, ahead: int, likely_s: float | None) -> float | None:
    """Return roughly when a job with `ahead` jobs before it could start, each taking `likely_s`; None if unknown. The
    time has passed if the running job that it waits for should have ended already."""
    same = [run for run in world.running if (run.devices if lane.need.devices else run.takes_slot and not run.devices)]
    ends = sorted(run.ends_about for run in same if run.ends_about is not None)
    if not ends or len(ends) < len(same) or (ahead >= len(ends) and likely_s is None):
        return None
    end, rounds = ends[ahead % len(ends)], ahead // len(ends)
    return max(world.now, end) + rounds * (likely_s or 0.0) if rounds else end


def decide(world: World, *, explained_lane: int | None = None, rules: Sequence[Rule] = RULES) -> Plan:
    """Return the plan. `explained_lane` gets its reasons in full, even where all devices are full."""
    return _Planner(world, explained_lane, rules).plan()


class Backfill:
    """Finds claims for the candidates of one plan: jobs behind the head of the queue start only where that cannot delay
    it.

    The head of the queue is the first job that needs devices and cannot get them. It has every device reserved that
    would serve it. A job behind it may start on devices that the head cannot use, in the memory that the head leaves
    over if its own need is known, or anywhere if it is sure to end before the head could start. A job that would not
    fit even after all leases have ended does not become the head.

    The first job that waits for RAM or CPUs, with devices or without, has them kept: a job behind it starts only if the
    first job fits beside it once those jobs have ended that ran already when the wait began. After STRICT_AFTER_S no
    job behind it starts that reserves RAM or CPUs.

    Requests in the ledger's queue, of other users or of scripts, that are ahead of this queue are served before it.
    """

    def __init__(self, world: World, started: StartedSoFar, rules: Sequence[Rule]) -> None:
        self._world = world
        self.placement = PlacementState(world.machine, started, rules)  # without the head's reservation
        self._beside_head: PlacementState | None = None
        self._ends_of_starts: dict[str, float] = {}  # the earliest ends, by the lease that stands for the start
        self.head: WaitingJob | None = None
        self._head_starts_at: float | None = None
        self._host_head: WaitingJob | None = None  # the first job that waits for RAM or CPUs
        self.first_head: WaitingJob | None = None  # the head or the host's head, whichever comes first in the queue
        self._tickets = in_queue_order(world.tickets)
        # Needs that were refused, with and without the head's reservation. They stay so: placements only fill.
        self._refused: set[Need] = set()
        self._never: set[Need] = set()

    @property
    def _placements(self) -> list[PlacementState]:
        return [self.placement] if self._beside_head is None else [self.placement, self._beside_head]

    def explain(self, need: Need) -> tuple[Reason, ...]:
        return tuple(self._placements[-1].explain(need))

    def add_start(self, job: Candidate, claim: Claim) -> None:
        lease_id, least_s = planned_lease_id(job.job_id), self._world.facts_of(job).estimate.least_s
        self._ends_of_starts[lease_id] = self._world.now + (least_s or 0.0)
        for placement in self._placements if claim.takes_lease else ():
            placement.add_claim(claim, self._holder(job.job_id), lease_id)

    def find_claim(self, need: Need, candidate: Candidate) -> Claim | None:
        """Return a claim that cannot delay the head, or None."""
        if need not in self._refused:
            claim = self._placements[-1].find_claim(need)
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

    def _ends_before(self, head: WaitingJob, candidate: Candidate) -> bool:
        """Return whether the candidate is sure to end before the head could start."""
        now, most_s = self._world.now, self._world.facts_of(candidate).estimate.most_s
        if most_s is None:
            return False
        if self._head_starts_at is None:
            running = (run for run in self._world.running if run.lease_id is not None)
            ends = {run.lease_id or "": max(now, run.ends_after or now) for run in running}
            first = self.placement.first_available(head.need, ends | self._ends_of_starts)
            self._head_starts_at = first[-1][0] if len(first) == head.need.devices else now
        return self._world.now + most_s <= self._head_starts_at

    def reserve_for_tickets_ahead(self, lane: Lane) -> None:
        """Reserve devices for requests in the ledger's queue that are ahead of this lane."""
        mine = self._world.my_ticket
        place = (-lane.priority, mine.since if mine else float("inf"))
        while self._tickets and (-self._tickets[0].priority, self._tickets[0].since) < place:
            ticket = self._tickets.pop(0)
            for placement in self._placements:
                placement.reserve_for_ticket(ticket)

    def try_make_head(self, job: WaitingJob) -> None:
        """Make the job the head of the queue, unless the end of all leases would not let it start."""
        if self.placement.has_capacity():
            beside_head = self._placements[-1].copy()
            if not beside_head.reserve(job.need, self._holder(job.job_id)):
                return
            self._beside_head = beside_head
        self.head, self.first_head = job, self.first_head or job

    def keep_host_for(self, job: WaitingJob, candidate: Candidate) -> None:
        """Reserve RAM and CPUs for the job if it is the first that waits for them."""
        if self._host_head is None and self.placement.host.lacks(job.need):
            beside, older = self._placements[-1].copy(), None
            if self._world.now - candidate.queued_at <= STRICT_AFTER_S:
                runs = (run for run in self._world.running if run.started_at <= candidate.queued_at)
                older = {run.lease_id for run in runs if run.lease_id is not None}
            if beside.reserve_host(job.need, self._holder(job.job_id), older):
                self._host_head, self._beside_head = job, beside
                self.first_head = self.first_head or job

    def _holder(self, job_id: int) -> Holder:
        return replace(self._world.holder, label=planned_lease_id(job_id))


class _Planner:
    def __init__(self, world: World, explained_lane: int | None, rules: Sequence[Rule]) -> None:
        self._world = world
        self._explained_lane = explained_lane
        self._dry: set[int] = set()
        lanes = [LaneQueue(lane=each.lane, jobs=self._jobs_of(each)) for each in world.lanes]
        self._order = QueueOrder(lanes, world.used, world.now, explained_lane=explained_lane)
        self._started = StartedSoFar(world)
        self._job_rules = [each for each in rules if isinstance(each, JobRule)]
        self._claim_rules = [each for each in rules if isinstance(each, Power)]
        self._narrowing = [each for each in rules if isinstance(each, RunningLimit | DeviceLoad)]
        self._starts: list[Start] = []
        self._backfill = Backfill(world, self._started, rules)
        self._waiting: dict[int, WaitingJob] = {}
        self._first_waiting: WaitingJob | None = None
        self._preempts: tuple[Preempt, ...] = ()
        self._considered: dict[int, int] = {}
        self._refused: set[tuple[int, int]] = set()  # lanes and kinds of jobs: a kind that was refused once stays so
        own, leases = {run.lease_id for run in world.running}, world.machine.leases
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
        refusals = self._refuse(self._job_rules, StartRequest(need=lane.need, lane=lane, job=candidate))
        need = lane.need if refusals or not lane.sizes_each else facts.need or lane.need
        variants: Sequence[Need] = (need,)
        if need.devices and not refusals:
            variants, refusals = self._variants(lane, need)
        need = merge_variants(variants)
        choice = refusals or self._place(lane, need, variants, candidate)
        if isinstance(choice, Claim):
            over = self._refuse(self._claim_rules, StartRequest(need=need, facts=facts, claim=choice))
            if over:
                choice = refusals = over
        if isinstance(choice, Claim):
            self._start(lane, candidate, need, choice)
            return
        job = WaitingJob(job_id=candidate.job_id, lane=lane, need=need, reasons=choice)
        self._wait(job, candidate, is_refused=bool(refusals))
        if kind is not None and not refusals:
            self._refused.add((lane.id, kind))
        # The next job may write to another disk, where that of this one is full: not a run of a batch, all of which
        # write to one disk, nor beside a disk that is being read (without `needed`), which is known in a moment.
        is_disk_full = any(reason in candidate.full_disks for reason in refusals) and lane.pace is None
        has_other_disk = is_disk_full and any(reason.needed is not None for reason in candidate.full_disks)
        if has_other_disk or (lane.sizes_each and not refusals):
            self._look_further(lane)
        else:
            self._order.drop()

    def _refuse(self, rules: Sequence[Rule], request: StartRequest) -> tuple[Reason, ...]:
        reason = first_refusal(rules, request, None, self._backfill.placement)
        return () if reason is None else (reason,)

    def _variants(self, lane: Lane, need: Need) -> tuple[Sequence[Need], tuple[Reason, ...]]:
        """Return the need on the devices that gates or the limit of its tag leave it, in order; or why they are too
        few."""
        if lane.pace is None and lane.tag_sharing is None:
            return (need,), ()
        if lane.pace is not None:
            need = replace(need, ignores_foreign_load=lane.pace.max_gpu_percent is not None)
        placement, request = self._backfill.placement, StartRequest(need=need, lane=lane)
        devices = list(placement.suitable_devices(need))
        if len(devices) < need.devices:
            return (need,), ()
        refused = {each.device.id: first_refusal(self._narrowing, request, each, placement) for each in devices}
        reasons = tuple(dict.fromkeys(reason for reason in refused.values() if reason is not None))
        left = [state for state in devices if refused[state.device.id] is None]
        if lane.tag_sharing is None:
            only = tuple(state.device.id for state in left)
            narrowed = need if len(left) == len(devices) else replace(need, only=only)
            return ((need,), reasons) if len(left) < need.devices else ((narrowed,), ())
        counts = self._started.counts.by_tag_and_device[lane.tag]
        if variants := spread_need(need, lane.tag_sharing, left, counts):
            return variants, ()
        if need.devices > 1:  # hold its places, or jobs that need one device would take each as it becomes free
            emptiest = sorted((state.device.id for state in devices), key=lambda each: (counts[each], each))
            counts.update(dict.fromkeys(emptiest[: need.devices], lane.tag_sharing.most_per_device))
        return (need,), reasons[:1]

    def _wait(self, job: WaitingJob, candidate: Candidate, *, is_refused: bool) -> None:
        """Keep devices, RAM and CPUs for a job that waits for them. `is_refused`: it waits for something else."""
        lane, need = job.lane, job.need
        needs_head = need.devices and not is_refused and self._backfill.head is None
        self._waiting.setdefault(lane.id, job)
        if needs_head:
            self._first_waiting = self._first_waiting or job
            if lane.preempts:
                victims = find_victims(need, self._backfill.placement, self._world.running, lane.priority)
                self._preempts = tuple(Preempt(job_id=run.job_id, for_job=job.job_id) for run in victims)
            self._backfill.try_make_head(job)
        if need.host is not None and not is_refused:
            self._backfill.keep_host_for(job, candidate)

    def _look_further(self, lane: Lane) -> None:
        """Go on with the next job of a lane whose jobs have needs of their own."""
        considered = self._considered[lane.id] = self._considered.get(lane.id, 0) + 1
        if considered < LOOK_AHEAD and self._backfill.placement.has_capacity():
            self._order.pass_over()
        else:
            self._order.drop()

    def _place(
        self, lane: Lane, need: Need, variants: Sequence[Need], candidate: Candidate
    ) -> Claim | tuple[Reason, ...]:
        backfill, is_explained = self._backfill, lane.id == self._explained_lane
        if not need.devices and need.host is None:
            return tuple(backfill.explain(need)) or Claim(shares=())
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
        charged_mb = None
        if lane.pace is not None and claim.shares:
            share = claim.shares[0]
            charged_mb = self._backfill.placement.states[share.device_id].charged_mb
            charged_mb = None if charged_mb is None else charged_mb + (share.memory_mb or 0.0)
        self._order.advance()
        start = Start(job_id=candidate.job_id, lane=lane, claim=claim, need=need, charged_mb=charged_mb)
        self._starts.append(start)
        self._started.add(lane, self._world.facts_of(candidate), claim)
        self._backfill.add_start(candidate, claim)


_FORMAT = "gpuyard world 1"


class WorldFile(Struct, frozen=True, kw_only=True):
    """`job_id` is the job that the plan is about. `measured` and `used` of the world: JSON has no keys of two parts."""

    format: str
    job_id: int
    lane: int
    world: World
    measured: list[tuple[str, str, float | None]]
    used: list[tuple[str, str, float]]

    def decide(self) -> Plan:
        """Return the plan, with the reasons that `gpuyard why` gave."""
        return decide(self.restored(), explained_lane=self.lane)

    def restored(self) -> World:
        measured = {(lease_id, device_id): held_mb for lease_id, device_id, held_mb in self.measured}
        machine = replace(self.world.machine, measured=measured)
        return replace(self.world, machine=machine, used={(user, tag): seconds for user, tag, seconds in self.used})


def write_world(world: World, job_id: int, lane: int) -> bytes:
    devices = tuple(
        replace(each, processes=each.processes and tuple(replace(process, name=None) for process in each.processes))
        for each in world.machine.snapshot.devices
    )
    machine = replace(world.machine, snapshot=replace(world.machine.snapshot, devices=devices), measured={})
    found = WorldFile(
        format=_FORMAT,
        job_id=job_id,
        lane=lane,
        world=replace(world, machine=machine, used={}),
        measured=[(*key, held_mb) for key, held_mb in world.machine.measured.items()],
        used=[(*party, seconds) for party, seconds in world.used.items()],
    )
    return msgspec.json.encode(found)


def read_world(content: bytes) -> WorldFile:
    """Raise UserError for what `gpuyard why --export` of this version did not write."""
    try:
        found = msgspec.json.decode(content, type=WorldFile)
    except msgspec.DecodeError as error:
        raise UserError(
            f"this is no world of this version: {error}", hint="write one with `gpuyard why --export`"
        ) from None
    if found.format != _FORMAT:
        raise UserError(
            f"this is a '{found.format}', not a '{_FORMAT}'", hint="replay it with the version that wrote it"
        )
    return found
