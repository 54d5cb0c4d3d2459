"""Controller.step(): record ends, decide, claim, start, record. One step is one transaction.

An attempt is recorded before its keeper gets it. So at every moment:

- before the commit, a crash leaves a job that is still queued, and leases that no process holds;
- after the commit, a crash leaves a recorded attempt. If its keeper got it, it runs exactly once; if not, it never
  started, and its job is queued again.

Ends of attempts are kept in memory until they are recorded. A request to stop is recorded before the signal is sent;
signals may be sent twice.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuyard.control.adjust_leases import LeaseAdjuster
from gpuyard.control.attempt_ends import AttemptEnds
from gpuyard.control.batch_gates import BatchGates
from gpuyard.control.cluster_dispatch import ClusterDispatch
from gpuyard.control.device_health_watch import DeviceHealthWatch
from gpuyard.control.disk_gate import DiskGate
from gpuyard.control.engine_set import EngineSet
from gpuyard.control.guard_host import HostGuard
from gpuyard.control.guard_memory import MemoryGuard
from gpuyard.control.host_usage import HostUsage
from gpuyard.control.launch_jobs import JobLauncher
from gpuyard.control.ledger_ticket import LedgerState, QueueTicket
from gpuyard.control.machine_sleep import MachineSleep
from gpuyard.control.memory_lack import MemoryLackFinder
from gpuyard.control.own_leases import OwnLeases, with_changes
from gpuyard.control.planner_input import PlannerInput
from gpuyard.control.preallocation_watch import PreallocationWatch
from gpuyard.control.programs_beside import ProgramsBeside
from gpuyard.control.rules import Rules
from gpuyard.control.slices import Slices
from gpuyard.control.start_pauses import StartPauses
from gpuyard.control.step_result import Step, are_held_by_others, awaited
from gpuyard.control.stop_signals import StopSignals
from gpuyard.control.suspend_jobs import SuspendControl
from gpuyard.control.track_energy import EnergyMeter
from gpuyard.control.track_progress import ProgressTracker
from gpuyard.control.track_usage import UsageTracker
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Job
from gpuyard.core.job.lifecycle import JobEvent
from gpuyard.core.job.retry import died_with_the_machine
from gpuyard.core.lease import Holder
from gpuyard.core.scheduling.plan import Explanation, Plan, Start, WaitingJob
from gpuyard.core.scheduling.planner import estimate_start
from gpuyard.core.scheduling.queue_order import LaneQueue
from gpuyard.core.scheduling.world import World
from gpuyard.core.snapshot import Sample
from gpuyard.engines.common.oom_evidence import loaded_libraries
from gpuyard.errors import EnvironmentFault, LedgerBusy
from gpuyard.ports import Clock, Engine, HeldClaim, HostEngine, LeaseLedger, Suspender, WantedClaim
from gpuyard.store.job_store import JobStore

_log = logging.getLogger(__name__)
# An engine that is not ready is asked again after this time at the latest.
_LOOK_AGAIN_S = 0.5


class Controller:
    def __init__(  # noqa: PLR0913 - the ports
        self,
        store: JobStore,
        leases: LeaseLedger,
        engine: HostEngine,
        clock: Clock,
        *,
        rules: Rules,
        me: Holder,
        suspender: Suspender,
        open_engine: Callable[[str], Engine] | None = None,
    ) -> None:
        self.transitions = JobTransitions(store)
        self.suspend_control = SuspendControl(self.transitions, suspender)
        self.batch_gates = BatchGates(self.transitions, clock.to_wall)
        self.engines = EngineSet(engine, open_engine, from_wall=clock.from_wall)
        self.cluster_dispatch = ClusterDispatch(self.transitions, self.engines)
        self.usage_tracker = UsageTracker(self.transitions, leases, me)
        self.lease_adjuster = LeaseAdjuster(self.transitions, self.usage_tracker)
        self.energy_meter = EnergyMeter(self.transitions)
        self.disk_gate = DiskGate(self.transitions)
        self.progress_tracker = ProgressTracker(self.transitions)
        self._preallocation = PreallocationWatch(self.transitions, loaded_libraries)
        self.memory_guard = MemoryGuard(self.transitions, self.suspend_control, leases, clock.from_wall)
        self.host_guard = HostGuard(self.transitions, ProgramsBeside(self.transitions, leases, clock.from_wall).read)
        self.own_leases = OwnLeases(self.transitions, me)
        self._host_usage = HostUsage(self.transitions, leases, me.machine)
        self.closed: str | None = None  # why this daemon starts no more jobs
        self.rules = rules
        self.plan = Plan()
        self.me = me
        self._store, self._leases, self._clock = store, leases, clock
        self.start_pauses = StartPauses()
        self._ends = AttemptEnds(
            self.transitions, self.engines, MemoryLackFinder(self.usage_tracker, leases), self.cluster_dispatch,
            self.start_pauses, health=DeviceHealthWatch(leases),
            progress=self.progress_tracker, boot_id=me.boot_id,
        )  # fmt: skip
        self._input = PlannerInput(self, leases, clock, self._host_usage)
        self.slices = Slices(self.transitions, self.engines, self._input.need_of)
        parts = self.transitions, self.engines, self.cluster_dispatch, self.start_pauses
        self._launcher = JobLauncher(*parts, slices=self.slices, boot_id=me.boot_id)
        self._stop_signals = StopSignals(self.transitions, self.engines)
        self._machine_sleep = MachineSleep(self.transitions, me.boot_id)
        self._ticket = QueueTicket(leases)
        self._has_ended_leases = self._has_more_to_start = self._waits_for_engine = False
        self._memory_freed_at = 0.0
        self._world: World | None = None  # of the last plan

    def recover(self) -> None:
        """Take over from an earlier daemon. Call this once, before the first step."""
        now = self._clock.now()
        with self._store.transaction():
            self._store.drop_incomplete_submissions()
            self.transitions.reload()
        recorded = [*self.transitions.live.values(), *self.transitions.upcoming.values()]
        attempts = [each.attempt for each in recorded]
        self.engines.adopt(attempts)
        if any(died_with_the_machine(attempt, self.me.boot_id) for attempt in attempts):
            self._ends.collect(now)
            self.slices.collect()
            with self.transitions.in_step(), self._store.transaction():
                self.slices.record(now)
                self._ends.record(now)
                self.transitions.store_begun()
            self._ends.forget_recorded()
            self.slices.forget_recorded()
        self._has_ended_leases = True

    def step(self, sample: Sample, *, is_fresh: bool = True) -> Step:
        """Run one step. With `is_fresh=False` (the sample is too old) it records what happened and starts nothing."""
        now = self._clock.now()
        self._has_more_to_start = self._launcher.has_rejected = False
        self._ends.collect(now)
        self.slices.collect()
        self.cluster_dispatch.collect()
        self.suspend_control.collect()
        self.observe(sample)
        granted: list[HeldClaim] = []
        try:
            with self.transitions.in_step(), self._store.transaction():
                self.slices.record(now)
                self._stop_signals.record_warnings(now, self._ends.collected())
                self._machine_sleep.record(self._clock.asleep(), now)
                if self.suspend_control.record(now):
                    self._memory_freed_at = now
                self.cluster_dispatch.record(now)
                self.energy_meter.settle(self._ends.end_times(now))
                has_ended_lease = self._ends.record(now, sample)
                self.transitions.store_begun()
                if has_ended_lease:
                    self._has_ended_leases, self._memory_freed_at = True, now
                self.transitions.dependants.settle_more(now)
                self._preallocation.note(sample, now)
                self.transitions.note_statistics(now)
                for job in filter(None, map(self._store.job, self._store.due_jobs(now))):
                    self.transitions.apply(job, JobEvent.DUE, now)
                self.host_guard.act(now)
                self._stop_signals.stop_overdue(now)
                self.memory_guard.act(self.rules, now)
                ready = self._store.ready_queues()
                is_outdated = self._is_outdated(sample, ready)
                may_start = self._may_start(ready, is_outdated=is_outdated) and is_fresh
                started = self._start(sample, now, ready, granted) if may_start else self._wait_for_sample(now)
        except BaseException:
            self.batch_gates.forget()
            self.engines.discard_prepared()
            for held in granted:
                held.release()
            raise
        self._ends.forget_recorded()
        self.slices.forget_recorded()
        self.suspend_control.forget_recorded()
        self.cluster_dispatch.forget_recorded()
        self.engines.start_prepared()
        for held in granted:
            held.leave()
        self.slices.take_back(now)
        self.own_leases.release_ended()
        self._stop_signals.send(now)
        self.suspend_control.request()
        self._ticket.update(self.plan.head, now, has_started=started > 0, others_wait=self._others_wait())
        return self._result(now, started, is_outdated=is_outdated)

    def observe(self, sample: Sample) -> bool:
        """Note what live attempts use. Return whether a job has to make way: the next step takes care of that."""
        now = self._clock.now()
        self.usage_tracker.note(sample, now, self._ends.ended_before(sample))
        self.energy_meter.note(sample, self.usage_tracker.loads, self._ends.end_times(now))
        is_due = self.host_guard.note(sample, self.rules, now)
        return self.memory_guard.note(sample, self.usage_tracker.held_mb, now) or is_due

    # Decide and start

    def _is_engine_ready(self, ready: Sequence[LaneQueue]) -> bool:
        """Return False while jobs for this machine are ready and its engine is not. It wakes the loop when it is."""
        self._waits_for_engine = any(not queue.lane.engine for queue in ready) and not self.engines.is_ready()
        return not self._waits_for_engine

    def _may_start(self, ready: Sequence[LaneQueue], *, is_outdated: bool) -> bool:
        return self._is_engine_ready(ready) and not is_outdated and not self.transitions.dependants.may_reject_ready

    def _start(self, sample: Sample, now: float, ready: Sequence[LaneQueue], granted: list[HeldClaim]) -> int:
        """Start what the plan starts, and return how many."""
        queues = self._host_usage.sized([queue for queue in ready if not queue.lane.engine])
        self.start_pauses.update(now, has_ready=bool(queues))
        self.batch_gates.update((queue.lane for queue in queues), sample, now)
        needs_lease = any(lane.need.devices or lane.need.host or lane.sizes_each for lane in (q.lane for q in queues))
        sureness = self.rules.packing.sureness
        changes_leases = self.suspend_control.has_suspended or self.lease_adjuster.has_adjustments(now, sureness)
        is_check_due = self.own_leases.is_check_due(self._clock.monotonic())
        if needs_lease or changes_leases or self._has_ended_leases or is_check_due:
            try:
                claims = self._leases.grant(lambda *ledger: self._claim(sample, now, queues, ledger))
                granted += self.own_leases.keep(claims)
                self._has_ended_leases = False
                self.start_pauses.note_ledger(None, now)
            except LedgerBusy:  # a step follows as soon as it is ours
                self.plan = replace(self.plan, starts=(), preempts=())
                return 0
            except EnvironmentFault as error:
                self.start_pauses.note_ledger(error, now)
                self._decide(sample, now, self._local_queues(), None)
        else:
            self._decide(sample, now, queues, None)
        leases, slices = iter(granted), self.slices.taken_along(self.plan, self._world)
        started = 0
        for start in self.plan.starts:
            if start.lane.resumes:
                self.suspend_control.resume(start.job_id, start.claim, now)
                continue
            held = next(leases, None) if start.claim.takes_lease else None
            if start.claim.takes_lease and held is None:  # the ledger granted as many as it could
                self._has_more_to_start = True
            elif self.start_pauses.may_start(now):
                rest = slices.get(start.job_id, ())
                started += self._launcher.launch(start, held, sample.snapshot, self.rules, now, rest=rest)
            elif held is not None:
                held.release()
        self.suspend_control.preempt(self.plan.preempts, sample, self.rules, now)
        self.batch_gates.record(self.plan, sample, now)
        self.cluster_dispatch.decide(
            [queue for queue in ready if queue.lane.engine], self.rules, self._input.paused(), now
        )
        starts = self.cluster_dispatch.plan.starts
        return started + sum(self._launcher.launch(start, None, sample.snapshot, self.rules, now) for start in starts)

    def _wait_for_sample(self, now: float) -> int:
        """Start nothing. If no job is ready any more, drop the plan, so that no job is shown as waiting."""
        if not self._store.has_ready():
            self.plan = self.cluster_dispatch.plan = Plan()
            self.batch_gates.close()
        if self.suspend_control.has_suspended:
            with contextlib.suppress(EnvironmentFault):  # the next step tries again
                self._leases.grant(lambda leases, _: self.suspend_control.release_leases(leases, now))
        return 0

    def _others_wait(self) -> bool:
        """Return whether other programs waited in the ledger at the last plan."""
        return self._world is not None and bool(self._world.tickets)

    def _claim(self, sample: Sample, now: float, queues: Sequence[LaneQueue], ledger: LedgerState) -> list[WantedClaim]:
        """Decide while the ledger is locked; return the leases to amend, and a claim for each start."""
        (found, tickets), leases = ledger, self.own_leases.complete(ledger[0])
        remade = self.own_leases.wanted(found, self._clock.monotonic())
        changes = [
            *self.own_leases.relabelled(found),
            *self.suspend_control.release_leases(leases, now),
            *self.lease_adjuster.adjust(leases, now, self.rules.packing.sureness),
        ]
        leases = with_changes(leases, changes)
        published = list(self._host_usage.publish(leases, sample, now))
        leases, changes = with_changes(leases, published), [*changes, *published]
        self.suspend_control.measure_left(self._leases, leases, sample.snapshot)
        self._decide(sample, now, [*queues, *self.suspend_control.queues(now)], (leases, tickets))
        starts = (start for start in self.plan.starts if start.claim.takes_lease)
        return [*remade, *changes, *map(self._wanted_claim, starts)]

    def _wanted_claim(self, start: Start) -> WantedClaim:
        amends, claim = None, start.claim
        if start.lane.resumes:
            amends = self.transitions.live[start.job_id].attempt.lease_id
            claim = self.suspend_control.with_left(start.job_id, claim)
        host = claim.host and replace(claim.host, used_mb=0.0)  # nothing of it is taken yet
        return WantedClaim(claim=replace(claim, host=host), label=f"job {start.job_id}", amends=amends)

    def _decide(self, sample: Sample, now: float, queues: Sequence[LaneQueue], ledger: LedgerState | None) -> None:
        self._world, self.plan = self._input.decide(sample, now, queues, ledger) if queues else (None, Plan())

    def _is_outdated(self, sample: Sample, ready: Sequence[LaneQueue]) -> bool:
        """Return whether the sample was taken before device memory was last freed, and that matters.

        In such a sample the freed memory looks like a foreign process. That matters if a job may preempt others or
        waits to resume, or if the driver lists no processes, so that foreign memory is derived from earlier samples.
        """
        taken_at = sample.snapshot.taken_at
        if taken_at is None or taken_at >= self._memory_freed_at:
            return False
        if self.suspend_control.has_waiting or sample.snapshot.hiding:
            return True
        return any(queue.lane.preempts for queue in ready)

    def _local_queues(self) -> list[LaneQueue]:
        """Return the lanes whose jobs run on this machine."""
        return self._host_usage.sized([queue for queue in self._store.ready_queues() if not queue.lane.engine])

    @property
    def waiting(self) -> tuple[WaitingJob, ...]:
        """The first waiting job of each lane that the last step considered."""
        return (*self.plan.waiting, *self.cluster_dispatch.plan.waiting)

    def explain(self, job: Job, sample: Sample) -> Explanation:
        """Return why a job does not start at this moment, with the planner's own reasons."""
        now, starts_at, world = self._clock.now(), None, None
        if job.spec.engine:
            lane = self._store.lane_of(job.id)
            queues = [queue for queue in self._store.ready_queues() if queue.lane.engine]
            plan = self.cluster_dispatch.plan_for(queues, self.rules, self._input.paused(), now, about=lane.id)
            ahead = self._store.count_ahead(lane, job.id)
        else:
            found, tickets = self._leases.read()
            leases = self.own_leases.complete(found)
            self.suspend_control.measure_left(self._leases, leases, sample.snapshot)
            queues = [*self._local_queues(), *self.suspend_control.queues(now)]
            resuming = next((queue.lane for queue in queues if queue.lane.id == -job.id), None)
            lane = resuming or self._store.lane_of(job.id)
            world, plan = self._input.decide(sample, now, queues, (leases, tickets), lane.id)
            ahead = 0 if resuming else self._store.count_ahead(lane, job.id)
            starts_at = estimate_start(world, lane, ahead, self.transitions.estimates.estimate(job).likely_s)
        first = next((waiting for waiting in plan.waiting if waiting.lane.id == lane.id), None)
        reasons, first_id = (first.reasons, first.job_id) if first is not None else ((), job.id)
        return Explanation(
            reasons=reasons, first_id=first_id, ahead=ahead, starts_at=starts_at, lane=lane.id, world=world
        )

    def _has_more_to_do(self) -> bool:
        """Return whether another step should follow at once."""
        has_rejected, dependants = self._launcher.has_rejected, self.transitions.dependants
        has_more = self._has_more_to_start or has_rejected or dependants.has_more
        return has_more or bool(self.transitions.events)

    def _result(self, now: float, started: int, *, is_outdated: bool) -> Step:
        events = tuple(self.transitions.take_events())
        times = [
            self._store.next_due(),
            self.suspend_control.wake_at(now),
            self.slices.wake_at(),
            self._ticket.wake_at(now),
            self.batch_gates.wake_at(now),
            self.cluster_dispatch.wake_at(now),
            self._ends.sample_due(),
            *self.transitions.staggered_starts.next_starts((waiting.lane for waiting in self.plan.waiting), now),
            *self._stop_signals.wake_times(now),
            now if self._has_more_to_do() else None,
            now + _LOOK_AGAIN_S if self._waits_for_engine else None,
            *self.start_pauses.wake_at(now),
        ]
        waits_for_lease, waits_for_sample = awaited(self.plan.waiting)
        waits_for_devices = waits_for_sample or waits_for_lease
        return Step(
            wake_at=min((at for at in times if at is not None), default=None),
            waits_for_devices=waits_for_devices,
            waits_for_sample=waits_for_sample,
            waits_for_others=waits_for_devices and are_held_by_others(self.plan.waiting, self.me.pid),
            started=started,
            is_outdated=is_outdated,
            needs_sample=self._ends.sample_due() is not None,
            events=events,
            has_more_events=bool(self.transitions.events),
        )
