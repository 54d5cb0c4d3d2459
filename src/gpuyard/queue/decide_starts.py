"""Starts: collects the world that a plan is decided by, has it decided, claims the leases of what starts, and hands it
to its engine.

The ledger is locked while a plan is made: what it starts is granted at once, and changes of our leases go with it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, LedgerBusy
from gpuyard.model.job import Job
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.host_room import grantable_mb
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import LOOK_AHEAD
from gpuyard.policy.plan import decide, estimate_start
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue, most_urgent
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import Explanation, JobFacts, Plan, Start, WaitingLane, World
from gpuyard.ports import HeldClaim, WantedClaim
from gpuyard.queue.configured_rules import HostGates
from gpuyard.queue.launch_jobs import JobLauncher, Slices
from gpuyard.queue.own_leases import LedgerState, with_changes
from gpuyard.queue.running_jobs import HostUsage, lease_loads, packing_now, power_limit, running_jobs
from gpuyard.queue.step_parts import QueueParts


class Starts:
    """`plan` is the last plan for this machine. `is_outdated`: the last sample may not show memory that was freed."""

    def __init__(self, parts: QueueParts) -> None:
        self.plan = Plan()
        self.is_outdated = False
        self._parts = parts
        self._host_usage = HostUsage(parts.transitions, parts.leases, parts.me.machine)
        self._host_gates = HostGates()
        # `_need_of` is another one in each world.
        self.slices = Slices(parts.transitions, parts.engines, lambda job_id: self._need_of(job_id))  # noqa: PLW0108
        self._launcher = JobLauncher(parts, self.slices)
        self._has_more = self._waits_for_engine = False
        self._has_ended_leases = True  # since the ledger was last read
        self._memory_freed_at = 0.0
        self._world: World | None = None  # of the plan
        self._portions: Mapping[int, int] = {}  # how many jobs of a lane the last plan that ran dry was given
        self._need_of: Callable[[int], Need]  # of a job in a lane that sizes each, as of the last world

    def note_freed_memory(self, now: float, *, has_ended_lease: bool) -> None:
        self._memory_freed_at = now
        self._has_ended_leases = self._has_ended_leases or has_ended_lease

    def start(self, sample: Sample, now: float, granted: list[HeldClaim], *, is_fresh: bool) -> int:
        """Start what can start now, if the sample is fresh; return how many. Their leases are added to `granted`."""
        parts = self._parts
        self._has_more = self._launcher.has_rejected = False
        ready = parts.store.ready_queues()
        # In a sample that was taken before, memory that was freed looks like a foreign process. That matters if a job
        # may preempt others or waits to resume, or if the driver lists no processes: then it is derived from samples.
        taken_at = sample.snapshot.taken_at
        is_older = taken_at is not None and taken_at < self._memory_freed_at
        self.is_outdated = is_older and bool(
            parts.suspend_control.has_waiting or sample.snapshot.hiding or any(each.lane.preempts for each in ready)
        )
        self._waits_for_engine = any(not queue.lane.engine for queue in ready) and not parts.engines.is_ready()
        cannot_decide = self._waits_for_engine or self.is_outdated or parts.transitions.dependants.may_reject_ready
        if cannot_decide or not is_fresh:
            self._start_nothing(now)
            return 0
        queues = self._host_usage.sized([queue for queue in ready if not queue.lane.engine])
        parts.start_pauses.update(now, has_ready=bool(queues))
        parts.batch_gates.update((queue.lane for queue in queues), sample, now)
        if not self._plan_and_claim(sample, now, queues, granted):
            return 0
        started = self._start_planned(sample, now, granted)
        parts.suspend_control.preempt(self.plan.preempts, sample, parts.rules, now)
        parts.batch_gates.record(self.plan, sample, now)
        elsewhere = [queue for queue in ready if queue.lane.engine]
        parts.cluster_dispatch.decide(elsewhere, parts.rules, self._paused(), now)
        starts = parts.cluster_dispatch.plan.starts
        return started + sum(self._launcher.launch(each, None, sample.snapshot, now) for each in starts)

    def others_wait(self) -> bool:
        """Return whether other programs waited in the ledger at the last plan."""
        return self._world is not None and bool(self._world.tickets)

    def wake_times(self, now: float) -> Iterator[float | None]:
        """Yield when another step may start more."""
        if self._has_more or self._launcher.has_rejected:
            yield now
        if self._waits_for_engine:  # it wakes the loop when it is ready
            yield now + 0.5
        yield from self._parts.start_pauses.wake_at(now)
        lanes = (waiting.lane for waiting in self.plan.waiting)
        yield from self._parts.transitions.staggered_starts.next_starts(lanes, now)

    def _start_nothing(self, now: float) -> None:
        """If no job is ready any more, drop the plan, so that no job is shown as waiting."""
        parts = self._parts
        if not parts.store.has_ready():
            self.plan = parts.cluster_dispatch.plan = Plan()
            parts.batch_gates.close()
        if parts.suspend_control.has_suspended:
            with contextlib.suppress(EnvironmentFault):  # the next step tries again
                parts.leases.grant(lambda leases, _: parts.suspend_control.release_leases(leases, now))

    def _plan_and_claim(
        self, sample: Sample, now: float, queues: Sequence[LaneQueue], granted: list[HeldClaim]
    ) -> bool:
        """Make a plan, with the ledger if needed. Return False if that was busy: a step follows as soon as it is
        ours."""
        parts = self._parts
        needs_ledger = (
            any(lane.need.devices or lane.need.host or lane.sizes_each for lane in (queue.lane for queue in queues))
            or parts.suspend_control.has_suspended
            or parts.lease_adjuster.has_adjustments(now, parts.rules.packing.sureness)
            or self._has_ended_leases
            or parts.own_leases.is_check_due(parts.clock.monotonic())
        )
        if not needs_ledger:
            self._make_plan(sample, now, queues, None)
            return True
        try:
            claims = parts.leases.grant(lambda *ledger: self._claims(sample, now, queues, ledger))
            granted += parts.own_leases.keep(claims)
            self._has_ended_leases = False
            parts.start_pauses.note_ledger(None, now)
        except LedgerBusy:
            self.plan = replace(self.plan, starts=(), preempts=())
            return False
        except EnvironmentFault as error:
            parts.start_pauses.note_ledger(error, now)
            self._make_plan(sample, now, self._local_queues(), None)
        return True

    def _claims(
        self, sample: Sample, now: float, queues: Sequence[LaneQueue], ledger: LedgerState
    ) -> list[WantedClaim]:
        """Make a plan while the ledger is locked; return the leases to amend, and a claim for each start."""
        parts, (found, tickets) = self._parts, ledger
        leases = parts.own_leases.complete(found)
        remade = parts.own_leases.wanted(found, parts.clock.monotonic())
        changes = [
            *parts.own_leases.relabelled(found),
            *parts.suspend_control.release_leases(leases, now),
            *parts.lease_adjuster.adjust(leases, now, parts.rules.packing.sureness),
        ]
        leases = with_changes(leases, changes)
        published = list(self._host_usage.publish(leases, sample, now))
        leases = with_changes(leases, published)
        parts.suspend_control.measure_left(parts.leases, leases, sample.snapshot)
        self._make_plan(sample, now, [*queues, *parts.suspend_control.queues(now)], (leases, tickets))
        starts = (start for start in self.plan.starts if start.claim.takes_lease)
        return [*remade, *changes, *published, *map(self._wanted_claim, starts)]

    def _wanted_claim(self, start: Start) -> WantedClaim:
        amends, claim = None, start.claim
        if start.lane.resumes:
            amends = self._parts.transitions.live[start.job_id].attempt.lease_id
            claim = self._parts.suspend_control.with_left(start.job_id, claim)
        host = claim.host and replace(claim.host, used_mb=0.0)  # nothing of it is taken yet
        return WantedClaim(claim=replace(claim, host=host), label=f"job {start.job_id}", amends=amends)

    def _make_plan(self, sample: Sample, now: float, queues: Sequence[LaneQueue], ledger: LedgerState | None) -> None:
        self._world, self.plan = self._decide(sample, now, queues, ledger) if queues else (None, Plan())

    def _local_queues(self) -> list[LaneQueue]:
        """Return the lanes whose jobs run on this machine."""
        return self._host_usage.sized([queue for queue in self._parts.store.ready_queues() if not queue.lane.engine])

    def _start_planned(self, sample: Sample, now: float, granted: Sequence[HeldClaim]) -> int:
        """Resume and start what the plan says, with the leases in its order; return how many started."""
        parts, leases, slices = self._parts, iter(granted), self.slices.taken_along(self.plan, self._world)
        started = 0
        for start in self.plan.starts:
            if start.lane.resumes:
                parts.suspend_control.resume(start.job_id, start.claim, now)
                continue
            held = next(leases, None) if start.claim.takes_lease else None
            if start.claim.takes_lease and held is None:  # the ledger granted as many as it could
                self._has_more = True
            elif parts.start_pauses.may_start(now):
                rest = slices.get(start.job_id, ())
                started += self._launcher.launch(start, held, sample.snapshot, now, rest)
            elif held is not None:
                held.release()
        return started

    def _decide(
        self,
        sample: Sample,
        now: float,
        queues: Sequence[LaneQueue],
        ledger: LedgerState | None,
        about: int | None = None,
    ) -> tuple[World, Plan]:
        """Return the plan and its world. Without `ledger` no process counts as foreign. `about`: a lane to explain."""
        parts, (leases, tickets) = self._parts, ledger or ((), ())
        my_ticket = parts.leases.my_ticket()
        tickets = tuple(replace(each, since=parts.clock.from_wall(each.since)) for each in tickets)
        rules, snapshot, transitions = parts.rules, sample.snapshot, parts.transitions
        foreign_limit = rules.packing.max_foreign_load_percent
        banned = rules.devices.banned_ids(snapshot)
        devices = [each for each in snapshot.usable_devices() if each.id not in banned] or snapshot.usable_devices()
        most_ram_mb = grantable_mb(snapshot.host, rules.host.limits)
        running = running_jobs(transitions)
        if any(queue.lane.preempts for queue in queues):
            running = tuple(parts.suspend_control.with_costs(running, sample, rules, now))
        used = transitions.used(now) if len({queue.lane.party for queue in queues}) > 1 else {}

        def need_of(job_id: int) -> Need:
            return transitions.estimates.need(
                job_id, devices, rules.first_runs, lambda job: parts.lease_adjuster.running_like(job, now), most_ram_mb
            )

        self._need_of = need_of
        first = most_urgent(queues, used, now, about)
        lanes = _Lanes(first, parts, need_of, self._portions)
        world = World(
            now=now,
            machine=Machine(
                now=now,
                snapshot=snapshot,
                leases=leases,
                measured=parts.leases.measure(snapshot, leases),
                loads=sample.loads,
                lease_loads=lease_loads(transitions, now),
                foreign=parts.leases.foreign_loads(snapshot, leases, now, foreign_limit) if ledger else {},
                packing=packing_now(transitions, rules.packing, queues, len(devices)),
                host=self._host_usage.view(leases, sample, rules),
                closed={
                    **parts.memory_guard.closed(),
                    **closed_devices(snapshot, parts.leases.drains(), banned, parts.leases.health_marks()),
                },
            ),
            lanes=lanes.waiting(),
            facts=lanes.facts,
            holder=parts.me,
            limits=rules.limits,
            running=running,
            used=used,
            closed_reasons=(
                *self._paused(),
                *self._host_gates.closed_reasons(sample, rules),
                *parts.host_guard.closed_reasons(),
            ),
            start_caps=tuple(parts.start_pauses.start_caps(now)),
            tickets=tuple(ticket for ticket in tickets if ticket.id != my_ticket),
            my_ticket=next((ticket for ticket in tickets if ticket.id == my_ticket), None),
            power=power_limit(rules.host.max_gpu_power_w, transitions),
            pace_states=parts.batch_gates.pace_states,
            stopped_tags=parts.transitions.store.stopped_tags(),
            last_starts=transitions.staggered_starts.of_tags(queue.lane for queue in queues),
            array_starts=transitions.staggered_starts.of_arrays(queue.lane for queue in queues),
        )
        while (plan := decide(world, explained_lane=about)).dry:
            self._portions = lanes.read_more(plan.dry)
            world = replace(world, lanes=lanes.waiting(), facts=lanes.facts)
        return world, plan

    def _paused(self) -> Iterator[Reason]:
        """Yield why no job starts, as people decided or the disk demands."""
        if self._parts.closed is not None:
            yield Reason(ReasonKind.PAUSED, self._parts.closed)
        if self._parts.transitions.store.setting("paused"):
            yield Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` lets it go on")
        yield from self._parts.disk_gate.closed_reasons(self._parts.rules.host.min_free_disk_mb)

    def explain(self, job: Job, sample: Sample) -> Explanation:
        """Return why a job does not start at this moment, with the planner's own reasons."""
        parts, starts_at, world = self._parts, None, None
        now = parts.clock.now()
        if job.spec.engine:
            lane = parts.store.lane_of(job.id)
            queues = [queue for queue in parts.store.ready_queues() if queue.lane.engine]
            plan = parts.cluster_dispatch.plan_for(queues, parts.rules, self._paused(), now, about=lane.id)
            ahead = parts.store.count_ahead(lane, job.id)
        else:
            found, tickets = parts.leases.read()
            leases = parts.own_leases.complete(found)
            parts.suspend_control.measure_left(parts.leases, leases, sample.snapshot)
            queues = [*self._local_queues(), *parts.suspend_control.queues(now)]
            resuming = next((queue.lane for queue in queues if queue.lane.id == -job.id), None)
            lane = resuming or parts.store.lane_of(job.id)
            world, plan = self._decide(sample, now, queues, (leases, tickets), lane.id)
            ahead = 0 if resuming else parts.store.count_ahead(lane, job.id)
            starts_at = estimate_start(world, lane, ahead, parts.transitions.estimates.estimate(job).likely_s)
        first = next((waiting for waiting in plan.waiting if waiting.lane.id == lane.id), None)
        reasons, first_id = (first.reasons, first.job_id) if first is not None else ((), job.id)
        return Explanation(
            reasons=reasons, first_id=first_id, ahead=ahead, starts_at=starts_at, lane=lane.id, world=world
        )


class _Lanes:
    """The first jobs of each lane, as far as they have been read, and what is known of them."""

    def __init__(
        self,
        first: Sequence[tuple[LaneQueue, Candidate]],
        parts: QueueParts,
        need_of: Callable[[int], Need],
        portions: Mapping[int, int],
    ) -> None:
        self.facts: dict[int, JobFacts] = {}
        self._estimates, self._rules = parts.transitions.estimates, parts.rules
        self._disk_gate = parts.disk_gate
        self._need_of = need_of
        self._queues = {queue.lane.id: queue for queue, _ in first}
        self._jobs = {queue.lane.id: [self._known(queue.lane, job)] for queue, job in first}
        self._ended: set[int] = set()
        for lane_id in self._queues:
            self._read(lane_id, portions.get(lane_id, 2))

    def read_more(self, lane_ids: frozenset[int]) -> dict[int, int]:
        """Return how many jobs have been read of each lane of which there are more: the next plan begins with these."""
        for lane_id in lane_ids:
            self._read(lane_id, 8 * len(self._jobs[lane_id]))
        known = ((lane_id, len(jobs)) for lane_id, jobs in self._jobs.items() if lane_id not in self._ended)
        return {lane_id: min(count, LOOK_AHEAD + 1) for lane_id, count in known}

    def waiting(self) -> tuple[WaitingLane, ...]:
        return tuple(
            WaitingLane(lane=queue.lane, jobs=tuple(self._jobs[lane_id]), has_more=lane_id not in self._ended)
            for lane_id, queue in self._queues.items()
        )

    def _read(self, lane_id: int, count: int) -> None:
        queue, jobs = self._queues[lane_id], self._jobs[lane_id]
        jobs += [self._known(queue.lane, job) for job in islice(queue.jobs, count - len(jobs))]
        if len(jobs) < count:
            self._ended.add(lane_id)

    def _known(self, lane: Lane, job: Candidate) -> Candidate:
        kind, full = None, tuple[Reason, ...]()
        if lane.sizes_each or lane.need.devices or lane.need.host is not None:
            kind, estimates = self._estimates.kind_of(job.job_id), self._estimates
            found = self.facts.get(kind)
            if found is None:
                power_w = None
                if self._rules.host.max_gpu_power_w is not None:
                    power_w = estimates.figure(estimates.job(job.job_id), "power_w")
                found = self.facts[kind] = JobFacts(estimate=estimates.estimate_of(job.job_id), power_w=power_w)
            if lane.sizes_each and found.need is None:
                self.facts[kind] = replace(found, need=self._need_of(job.job_id))
        if lane.writes_files and not lane.resumes:
            full = self._disk_gate.job_reasons(job.job_id, self._rules.host.min_free_disk_mb)
        return job if kind is None and not full else replace(job, kind=kind, full_disks=full)
