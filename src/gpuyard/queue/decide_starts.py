"""Starts: decides which jobs start, claims their leases, and hands them to their engines.

The ledger is locked while a plan is made: what it starts is granted at once, and changes of our leases go with it.
"""

import contextlib
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, LedgerBusy
from gpuyard.model.job import Job
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.plan import estimate_start
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.world import Explanation, Plan, Start, World
from gpuyard.ports import HeldClaim, WantedClaim
from gpuyard.queue.collect_world import PlannerInput
from gpuyard.queue.host_usage import HostUsage
from gpuyard.queue.job_slices import Slices
from gpuyard.queue.launch_jobs import JobLauncher
from gpuyard.queue.own_leases import LedgerState, with_changes
from gpuyard.queue.step_parts import QueueParts

# An engine that is not ready is asked again after this time at the latest.
_LOOK_AGAIN_S = 0.5


class Starts:
    """`plan` is the last plan for this machine. `is_outdated`: the last sample may not show memory that was freed."""

    def __init__(self, parts: QueueParts) -> None:
        self.plan = Plan()
        self.is_outdated = False
        self._parts = parts
        self._host_usage = HostUsage(parts.transitions, parts.leases, parts.me.machine)
        self._input = PlannerInput(parts, self._host_usage)
        self.slices = Slices(parts.transitions, parts.engines, self._input.need_of)
        self._launcher = JobLauncher(
            parts.transitions, parts.engines, parts.cluster_dispatch, parts.start_pauses,
            slices=self.slices, boot_id=parts.me.boot_id,
        )  # fmt: skip
        self._has_more = self._waits_for_engine = False
        self._has_ended_leases = True  # since the ledger was last read
        self._memory_freed_at = 0.0
        self._world: World | None = None  # of the plan

    def note_freed_memory(self, now: float, *, has_ended_lease: bool) -> None:
        self._memory_freed_at = now
        self._has_ended_leases = self._has_ended_leases or has_ended_lease

    def start(self, sample: Sample, now: float, granted: list[HeldClaim], *, is_fresh: bool) -> int:
        """Start the jobs that can start now, if the sample is fresh; return how many. Their leases are added to
        `granted`."""
        parts = self._parts
        self._has_more = self._launcher.has_rejected = False
        ready = parts.store.ready_queues()
        self.is_outdated = self._is_outdated(sample, ready)
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
        return started + self._start_elsewhere(sample, now, [queue for queue in ready if queue.lane.engine])

    def others_wait(self) -> bool:
        """Return whether other programs waited in the ledger at the last plan."""
        return self._world is not None and bool(self._world.tickets)

    def wake_times(self, now: float) -> Iterator[float | None]:
        """Yield when another step may start more."""
        if self._has_more or self._launcher.has_rejected:
            yield now
        if self._waits_for_engine:  # it wakes the loop when it is ready
            yield now + _LOOK_AGAIN_S
        yield from self._parts.start_pauses.wake_at(now)
        lanes = (waiting.lane for waiting in self.plan.waiting)
        yield from self._parts.transitions.staggered_starts.next_starts(lanes, now)

    def _is_outdated(self, sample: Sample, ready: Sequence[LaneQueue]) -> bool:
        """Return whether the sample was taken before device memory was last freed, and that matters.

        In such a sample the freed memory looks like a foreign process. That matters if a job may preempt others or
        waits to resume, or if the driver lists no processes, so that foreign memory is derived from earlier samples.
        """
        taken_at = sample.snapshot.taken_at
        if taken_at is None or taken_at >= self._memory_freed_at:
            return False
        if self._parts.suspend_control.has_waiting or sample.snapshot.hiding:
            return True
        return any(queue.lane.preempts for queue in ready)

    def _start_nothing(self, now: float) -> None:
        """If no job is ready any more, drop the plan, so that no job is shown as waiting."""
        parts = self._parts
        if not parts.store.has_ready():
            self.plan = parts.cluster_dispatch.plan = Plan()
            parts.batch_gates.close()
        if parts.suspend_control.has_suspended:
            with contextlib.suppress(EnvironmentFault):  # the next step tries again
                parts.leases.grant(lambda leases, _: parts.suspend_control.release_leases(leases, now))

    # Plan and claim

    def _plan_and_claim(
        self, sample: Sample, now: float, queues: Sequence[LaneQueue], granted: list[HeldClaim]
    ) -> bool:
        """Make a plan, with the ledger if it needs leases or ours may have to change. Return False if the ledger was
        busy: a step follows as soon as it is ours."""
        parts = self._parts
        if not self._needs_ledger(queues, now):
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

    def _needs_ledger(self, queues: Sequence[LaneQueue], now: float) -> bool:
        parts = self._parts
        return (
            any(lane.need.devices or lane.need.host or lane.sizes_each for lane in (queue.lane for queue in queues))
            or parts.suspend_control.has_suspended
            or parts.lease_adjuster.has_adjustments(now, parts.rules.packing.sureness)
            or self._has_ended_leases
            or parts.own_leases.is_check_due(parts.clock.monotonic())
        )

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
        self._world, self.plan = self._input.decide(sample, now, queues, ledger) if queues else (None, Plan())

    def _local_queues(self) -> list[LaneQueue]:
        """Return the lanes whose jobs run on this machine."""
        return self._host_usage.sized([queue for queue in self._parts.store.ready_queues() if not queue.lane.engine])

    # Start

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
                started += self._launcher.launch(start, held, sample.snapshot, parts.rules, now, rest=rest)
            elif held is not None:
                held.release()
        return started

    def _start_elsewhere(self, sample: Sample, now: float, queues: Sequence[LaneQueue]) -> int:
        """Hand jobs to clusters; return how many."""
        parts = self._parts
        parts.cluster_dispatch.decide(queues, parts.rules, self._input.paused(), now)
        starts = parts.cluster_dispatch.plan.starts
        return sum(self._launcher.launch(start, None, sample.snapshot, parts.rules, now) for start in starts)

    # Explain

    def explain(self, job: Job, sample: Sample) -> Explanation:
        """Return why a job does not start at this moment, with the planner's own reasons."""
        parts, starts_at, world = self._parts, None, None
        now = parts.clock.now()
        if job.spec.engine:
            lane = parts.store.lane_of(job.id)
            queues = [queue for queue in parts.store.ready_queues() if queue.lane.engine]
            plan = parts.cluster_dispatch.plan_for(queues, parts.rules, self._input.paused(), now, about=lane.id)
            ahead = parts.store.count_ahead(lane, job.id)
        else:
            found, tickets = parts.leases.read()
            leases = parts.own_leases.complete(found)
            parts.suspend_control.measure_left(parts.leases, leases, sample.snapshot)
            queues = [*self._local_queues(), *parts.suspend_control.queues(now)]
            resuming = next((queue.lane for queue in queues if queue.lane.id == -job.id), None)
            lane = resuming or parts.store.lane_of(job.id)
            world, plan = self._input.decide(sample, now, queues, (leases, tickets), lane.id)
            ahead = 0 if resuming else parts.store.count_ahead(lane, job.id)
            starts_at = estimate_start(world, lane, ahead, parts.transitions.estimates.estimate(job).likely_s)
        first = next((waiting for waiting in plan.waiting if waiting.lane.id == lane.id), None)
        reasons, first_id = (first.reasons, first.job_id) if first is not None else ((), job.id)
        return Explanation(
            reasons=reasons, first_id=first_id, ahead=ahead, starts_at=starts_at, lane=lane.id, world=world
        )
