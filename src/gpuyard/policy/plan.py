"""decide(world) -> Plan: which jobs start or resume now and where, which are preempted, and why the others wait. And
worlds as files, which are decided again elsewhere.

Candidates are considered in queue order. A job that waits for a `JobRule` delays no other; the first that waits for
devices has them reserved (`reserve`). A head that may preempt preempts the cheapest jobs of lower priority.
"""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.lease import Claim, Need
from gpuyard.policy.backfill import Backfill
from gpuyard.policy.numbers import LOOK_AHEAD
from gpuyard.policy.preempt import find_victims
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, QueueOrder
from gpuyard.policy.rules import RULES, DeviceLoad, JobRule, Power, Rule, RunningLimit, StartRequest, first_refusal
from gpuyard.policy.running_counts import StartedSoFar
from gpuyard.policy.sharing import merge_variants, spread_need
from gpuyard.policy.wait_reasons import Reason
from gpuyard.policy.world import Plan, Preempt, Start, WaitingJob, WaitingLane, World

# Half of the longest time that an urgent job may wait: estimates of short jobs are off by a factor of two.
_EXPECTED_S = 0.5
# After this time the daemon takes back what has not started.
LONGEST_S = 1.0
# Jobs that the starts of one plan take along: to record and launch them takes some 20 ms.
MOST = 96
# What a keeper needs for a job that takes no time.
_LEAST_S = 0.001


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
    return min(MOST // starts, int(_EXPECTED_S / max(likely_s, _LEAST_S)) - 1, waiting // max(1, places))


def decide(world: World, *, explained_lane: int | None = None, rules: Sequence[Rule] = RULES) -> Plan:
    """Return the plan. `explained_lane` gets its reasons in full, even where all devices are full."""
    return _Planner(world, explained_lane, rules).plan()


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
        if _may_write_elsewhere(lane, candidate, refusals) or (lane.sizes_each and not refusals):
            self._look_further(lane)
        else:
            self._order.drop(lane)

    def _refuse(self, rules: Sequence[Rule], request: StartRequest) -> tuple[Reason, ...]:
        reason = first_refusal(rules, request, None, self._backfill.placement)
        return () if reason is None else (reason,)

    def _variants(self, lane: Lane, need: Need) -> tuple[Sequence[Need], tuple[Reason, ...]]:
        """Return the need on the devices that the gates of its batch, or the limit of its tag, leave it, in the order
        to try them; or why they are too few."""
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
        self._order.advance(lane)
        charged_mb = self._charged_mb(lane, claim)
        start = Start(job_id=candidate.job_id, lane=lane, claim=claim, need=need, charged_mb=charged_mb)
        self._starts.append(start)
        self._started.add(lane, self._world.facts_of(candidate), claim)
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


def _may_write_elsewhere(lane: Lane, job: Candidate, refusals: tuple[Reason, ...]) -> bool:
    """Return whether the next job of the lane may start although a disk of its first job is full. All runs of a batch
    write to one disk; and a disk that is being read (without `needed`) is known in a moment: the order stays."""
    is_full = any(reason in job.full_disks for reason in refusals)
    return is_full and lane.pace is None and any(reason.needed is not None for reason in job.full_disks)


_FORMAT = "gpuyard world 1"


class WorldFile(Struct, frozen=True, kw_only=True):
    """`job_id` is the job that the plan is about, and `lane` its lane. `measured` and `used` are those of the world:
    JSON has no keys of two parts."""

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
