"""Controller.step(): observe, decide, claim, start, record. One step is one transaction.

An attempt is recorded before its keeper hears of it. So at every instant:

- before the commit, a crash leaves a job that is still queued, and leases that nobody holds;
- after it, a recorded attempt that its keeper knows, and then it runs once, or does not, and then it never began.

What the world did (ends of attempts) is kept until it is recorded. That a job is to stop is recorded before it is asked
to; signals may be sent twice.
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpuyard.control.attempt_ends import AttemptEnds
from gpuyard.control.batch_gates import BatchGates
from gpuyard.control.cluster_dispatch import ClusterDispatch
from gpuyard.control.engine_set import EngineSet
from gpuyard.control.host_gates import HostGates
from gpuyard.control.launch_command import attempt_of, launch_of
from gpuyard.control.ledger_ticket import QueueTicket
from gpuyard.control.step import Explanation, Rules, Step
from gpuyard.control.suspend_jobs import NoSuspender, SuspendControl
from gpuyard.control.track_usage import UsageTracker, as_amended
from gpuyard.control.transitions import JobTransitions
from gpuyard.control.wake_conditions import what_is_awaited
from gpuyard.core.job.crash_recovery import died_with_the_machine
from gpuyard.core.job.job import Job, OutcomeKind
from gpuyard.core.job.lifecycle import JobEvent, JobState
from gpuyard.core.lease import Holder, Lease, Ticket
from gpuyard.core.sample import Sample
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.scheduling.placement import PlacementView
from gpuyard.core.scheduling.plan import Plan, PlannerView, Start, WaitingJob
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.queue_order import Lane, LaneQueue
from gpuyard.core.scheduling.start_estimate import estimate_start
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Snapshot
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.ports import Clock, Engine, HeldClaim, LeaseLedger, Suspender, WantedClaim
from gpuyard.store.job_store import JobStore

_log = logging.getLogger(__name__)
_KILL_AGAIN_S = 5.0
_ASK_AGAIN_S = 0.05
_TROUBLE_S = 1.0


class Controller:
    def __init__(  # noqa: PLR0913 - the ports
        self,
        store: JobStore,
        leases: LeaseLedger,
        engine: Engine,
        clock: Clock,
        *,
        rules: Rules,
        me: Holder,
        suspender: Suspender | None = None,
        open_engine: Callable[[str], Engine] | None = None,
    ) -> None:
        self.transitions = JobTransitions(store)
        self.suspend_control = SuspendControl(self.transitions, suspender or NoSuspender())
        self.batch_gates = BatchGates(self.transitions)
        self._observer = UsageTracker(self.transitions, leases, me)
        self.rules = rules
        self.plan = Plan()
        self.me = me
        self._store = store
        self._leases = leases
        self.engines = EngineSet(engine, open_engine)
        self.cluster_dispatch = ClusterDispatch(self.transitions, store, self.engines)
        self._clock = clock
        self._ends = AttemptEnds(self.transitions, self.engines, self._observer, self.cluster_dispatch, me.boot_id)
        self._gates = HostGates()
        self._trouble: Reason | None = None
        self._trouble_until = self._ledger_until = 0.0
        self._line = QueueTicket(leases)
        self._devices_end = False
        self._left_at = 0.0
        self._has_rejected = False
        self._asked: set[int] = set()
        self._has_unasked = False

    def recover(self) -> None:
        """Takes over what an earlier daemon left: to be called once, before the first step."""
        now = self._clock.now()
        with self._store.transaction():
            self._store.drop_incomplete_submissions()
            self.transitions.reload()
        attempts = [live.attempt for live in self.transitions.live.values()]
        self.engines.adopt(attempts)
        if any(died_with_the_machine(attempt, self.me.boot_id) for attempt in attempts):
            self._ends.ask()
            with self.transitions.in_step(), self._store.transaction():
                self._ends.record(now)
            self._ends.forget_recorded()
        self._devices_end = True

    def step(self, sample: Sample, *, may_start: bool = True) -> Step:
        """Without `may_start` it only tidies up: the sample is too old to start anything by."""
        now = self._clock.now()
        if now >= self._trouble_until:
            self._trouble = None
        self._has_rejected = False
        self._ends.ask()
        self.cluster_dispatch.listen()
        self.suspend_control.listen()
        self._observer.note(sample, now)
        granted: list[HeldClaim] = []
        try:
            with self.transitions.in_step(), self._store.transaction():
                if self.suspend_control.record(now):
                    self._left_at = now
                self.cluster_dispatch.record(now)
                if self._ends.record(now, sample):
                    self._devices_end, self._left_at = True, now
                self.transitions.note_statistics(now)
                self._requeue_due(now)
                self._stop_overdue(now)
                may_start = may_start and not self.is_outdated(sample)
                started = self._start(sample, now, granted) if may_start else self._wait_for_sample(now)
        except BaseException:
            self.batch_gates.forget()
            self.engines.discard_prepared()
            for held in granted:
                held.release()
            raise
        self._ends.forget_recorded()
        self.suspend_control.forget_recorded()
        self.cluster_dispatch.forget_recorded()
        self.engines.start_prepared()
        for held in granted:
            held.leave()
        self._ask_to_stop()
        self.suspend_control.ask()
        self._line.stand(self.plan.head, now, has_started=started > 0)
        return self._report(now, started)

    # Observe

    def observe(self, sample: Sample) -> None:
        """Notes what is used now, for those who cannot wait for the next step."""
        self._observer.note(sample, self._clock.now())

    def _requeue_due(self, now: float) -> None:
        for job_id in self._store.due_jobs(now):
            job = self._store.job(job_id)
            if job is not None:
                self.transitions.apply(job, JobEvent.DUE, now)

    def _stop_overdue(self, now: float) -> None:
        for live in list(self.transitions.live.apart.values()):
            attempt = live.attempt
            is_running = live.job.state is JobState.RUNNING  # the time of one that is suspended stands still
            if is_running and attempt.stop_at is not None and attempt.stop_at <= now:
                self.transitions.stop(live.job.id, OutcomeKind.TIMED_OUT, now)
            elif attempt.kill_at is not None and attempt.kill_at <= now:
                self.engines.signal(attempt, signal.SIGKILL)
                self.transitions.postpone_kill(live.job.id, now + _KILL_AGAIN_S)

    def _ask_to_stop(self) -> None:
        """Once it is recorded that they are to; again where nothing of it was found yet, and after a crash of ours."""
        stopping = {
            job_id: live for job_id, live in self.transitions.live.apart.items() if live.attempt.stopping is not None
        }
        self._asked &= stopping.keys()
        for job_id in stopping.keys() - self._asked:
            attempt = stopping[job_id].attempt
            if self.engines.signal(attempt, signal.SIGTERM):
                self._asked.add(job_id)
                if attempt.parked is not None:
                    self.engines.signal(attempt, signal.SIGCONT)  # one that is halted hears nothing
        self._has_unasked = len(self._asked) < len(stopping)

    # Decide and start

    def _start(self, sample: Sample, now: float, granted: list[HeldClaim]) -> int:
        ready = self._store.ready_queues()
        queues = [queue for queue in ready if not queue.lane.engine]
        self.batch_gates.update((queue.lane for queue in queues), sample, now)
        wants_devices = any(queue.lane.need.devices for queue in queues)
        if wants_devices or self._devices_end or self.suspend_control.has_parked or self._observer.has_unsettled:
            try:
                granted += self._leases.grant(lambda leases, tickets: self._want(sample, now, queues, leases, tickets))
                self._devices_end = False
            except EnvironmentFault as error:
                _log.warning("%s; jobs that need devices wait", error)
                self._ledger_until = now + _TROUBLE_S
                queues = [queue for queue in self._here() if not queue.lane.need.devices]
                self.plan = decide(self._view(sample, now, queues)) if queues else Plan()
        else:
            self.plan = decide(self._view(sample, now, queues)) if queues else Plan()
        waiting = iter(granted)
        started = 0
        for start in self.plan.starts:
            if start.lane.resumes:
                self.suspend_control.resume(start.job_id, start.claim, now)
                continue
            held = next(waiting) if start.claim.shares else None
            if self._trouble is None or self._trouble.kind is not ReasonKind.NO_ENGINE:
                started += self._launch(start, held, sample.snapshot, now)
            elif held is not None:
                held.release()
        self.suspend_control.make_room(self.plan.preempts, sample, self.rules, now)
        self.batch_gates.record(self.plan, sample, now)
        self.cluster_dispatch.decide([queue for queue in ready if queue.lane.engine], self.rules, self._paused(), now)
        return started + sum(
            self._launch(start, None, sample.snapshot, now) for start in self.cluster_dispatch.plan.starts
        )

    def _wait_for_sample(self, now: float) -> int:
        """Nothing starts; and where nothing is ready any more, nothing waits either."""
        if not self._store.has_ready():
            self.plan = self.cluster_dispatch.plan = Plan()
            self.batch_gates.rest()
        if self.suspend_control.has_parked:
            with contextlib.suppress(EnvironmentFault):  # it is tried at each step
                self._leases.grant(lambda leases, _: self.suspend_control.parks(leases, now))
        return 0

    def _want(
        self,
        sample: Sample,
        now: float,
        queues: Sequence[LaneQueue],
        leases: tuple[Lease, ...],
        tickets: tuple[Ticket, ...],
    ) -> list[WantedClaim]:
        amended = [*self.suspend_control.parks(leases, now), *self._observer.settles(leases, now, self.rules.settle_s)]
        queues = [*queues, *self.suspend_control.queues(now)]
        self.plan = decide(self._view(sample, now, queues, as_amended(leases, amended), tickets)) if queues else Plan()
        return [*amended, *(self._wanted(start) for start in self.plan.starts if start.claim.shares)]

    def _wanted(self, start: Start) -> WantedClaim:
        amends = self.transitions.live[start.job_id].attempt.lease_id if start.lane.resumes else None
        return WantedClaim(claim=start.claim, label=f"job {start.job_id}", amends=amends)

    def _view(
        self,
        sample: Sample,
        now: float,
        queues: Sequence[LaneQueue],
        known_leases: tuple[Lease, ...] | None = None,
        tickets: tuple[Ticket, ...] = (),
    ) -> PlannerView:
        """`known_leases` is None where the ledger was not read: then no process is taken for a stranger."""
        leases = known_leases or ()
        mine = self._leases.my_ticket()
        snapshot = sample.snapshot
        devices = snapshot.usable_devices()
        running: Sequence[RunningJob] = self.transitions.running()
        if any(queue.lane.preempts for queue in queues):
            running = list(self.suspend_control.priced(running, sample, self.rules, now))
        return PlannerView(
            now=now,
            placement=PlacementView(
                now=now,
                snapshot=snapshot,
                leases=leases,
                measured=self._leases.measure(snapshot, leases),
                loads=sample.loads,
                foreign={} if known_leases is None else self._foreign(sample, known_leases, now),
                packing=self.rules.packing,
            ),
            queues=queues,
            holder=self.me,
            limits=self.rules.limits,
            running=running,
            used=self.transitions.used(now),
            closed_reasons=tuple(self._shut(sample, now)),
            tickets=tuple(ticket for ticket in tickets if ticket.id != mine),
            my_ticket=next((ticket for ticket in tickets if ticket.id == mine), None),
            estimate=self.transitions.estimates.estimate_of,
            ends_after=self.transitions.ends_after,
            ends_about=self.transitions.ends_about,
            pace_states=self.batch_gates.standings,
            stopped_tags=self._store.stopped_tags(),
            last_starts=self.transitions.last_starts(queue.lane for queue in queues),
            need=lambda lane, job_id: self.transitions.estimates.need(
                job_id, devices, self.rules.first_run_part, self._sibling_mb(lane, now)
            ),
        )

    def _sibling_mb(self, lane: Lane, now: float) -> float | None:
        return None if lane.pace is None else self._observer.sibling_mb(lane.group, now, self.rules.settle_s)

    def _foreign(self, sample: Sample, leases: tuple[Lease, ...], now: float) -> Mapping[str, ForeignLoad]:
        return self._leases.foreign_loads(sample.snapshot, leases, now, self.rules.packing.max_foreign_load_percent)

    def is_outdated(self, sample: Sample) -> bool:
        """Whether the look does not show yet what was left of late, and that matters: by such a look the memory of
        those who left is a stranger's. It matters where somebody may be asked to leave, or waits to go on, or where the
        driver lists no processes, so that what strangers hold is told by what was in use before."""
        taken_at = sample.snapshot.taken_at
        if taken_at is None or taken_at >= self._left_at:
            return False
        if self.suspend_control.has_waiting or any(device.hides_processes for device in sample.snapshot.devices):
            return True
        return any(queue.lane.preempts for queue in self._store.ready_queues())

    def _shut(self, sample: Sample, now: float) -> Iterator[Reason]:
        """Why nothing at all may start."""
        yield from self._paused()
        if self._trouble is not None and now < self._trouble_until:
            yield self._trouble
        yield from self._gates.closed(sample, self.rules)

    def _paused(self) -> Iterator[Reason]:
        if self._store.setting("paused"):
            yield Reason(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` lets it go on")

    def _here(self) -> list[LaneQueue]:
        """Lanes whose jobs run on this machine."""
        return [queue for queue in self._store.ready_queues() if not queue.lane.engine]

    @property
    def holds(self) -> tuple[WaitingJob, ...]:
        """Of all lanes that were looked at, its first job's."""
        return (*self.plan.waiting, *self.cluster_dispatch.plan.waiting)

    def _launch(self, start: Start, held: HeldClaim | None, snapshot: Snapshot, now: float) -> int:
        job = self._store.job(start.job_id)
        assert job is not None
        number = job.attempts + 1
        try:
            launch = launch_of(job, number, held, snapshot, terms=start.terms, shows_uuids=self.rules.shows_uuids)
            prepared = self.engines.prepare(launch, held.descriptor if held is not None else None)
        except GpuyardError as error:
            if held is not None:
                held.release()
            if isinstance(error, UserError):
                self.transitions.apply(job, JobEvent.REJECT, now, str(error))
                self._has_rejected = True  # others were held up by a start that did not come to be
            elif start.terms is not None:
                self.cluster_dispatch.refuse(job, str(error), now)
            else:
                self._have_trouble(ReasonKind.NO_ENGINE, error, now)
            return 0
        predicted_mb = (
            self.transitions.estimates.predicted_mb(job) if held is not None or start.terms is not None else None
        )
        self.transitions.begin(
            job, attempt_of(job, prepared, start, held, predicted_mb=predicted_mb, boot_id=self.me.boot_id, now=now)
        )
        return 1

    def _have_trouble(self, kind: ReasonKind, error: GpuyardError, now: float) -> None:
        self._trouble = Reason(kind, f"{error}; tried again in a moment")
        self._trouble_until = now + _TROUBLE_S

    def explain(self, job: Job, sample: Sample) -> Explanation:
        """Why it does not start, in the policy's own words, at this moment."""
        now = self._clock.now()
        if job.spec.engine:
            queues = [queue for queue in self._store.ready_queues() if queue.lane.engine]
            return self.cluster_dispatch.explain(job, queues, self.rules, self._paused(), now)
        seen: list[PlannerView] = []

        def read(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[WantedClaim]:
            queues = [*self._here(), *self.suspend_control.queues(now)]
            seen.append(self._view(sample, now, queues, leases, tickets))
            return []

        self._leases.grant(read)
        view = seen[0]
        waits_to_go_on = next((queue.lane for queue in view.queues if queue.lane.id == -job.id), None)
        lane = waits_to_go_on or self._store.lane_of(job.id)
        plan = decide(view, explained_lane=lane.id)
        ahead = 0 if waits_to_go_on else self._store.count_ahead(lane, job.id)
        hold = next((hold for hold in plan.waiting if hold.lane.id == lane.id), None)
        likely_s = self.transitions.estimates.estimate(job).likely_s
        return Explanation(
            reasons=hold.reasons if hold is not None else (),
            first_id=hold.job_id if hold is not None else job.id,
            ahead=ahead,
            starts_at=estimate_start(view, lane, ahead, likely_s),
        )

    def _report(self, now: float, started: int) -> Step:
        times = [
            self._store.next_due(),
            self.suspend_control.wake_at(now),
            self._line.wake_at(now),
            self.batch_gates.wake_at(now),
        ]
        times += self.transitions.staggered_starts((hold.lane for hold in self.plan.waiting), now)
        times += self.transitions.ends_to_make()
        times.append(self.cluster_dispatch.wake_at(now))
        if self._has_rejected:
            times.append(now)
        if self._has_unasked:
            times.append(now + _ASK_AGAIN_S)
        if self._trouble is not None:
            times.append(self._trouble_until)
        if now < self._ledger_until:
            times.append(self._ledger_until)
        waits_for_devices, waits_for_sample = what_is_awaited(self.plan)
        return Step(
            wake_at=min((at for at in times if at is not None), default=None),
            waits_for_devices=waits_for_devices,
            waits_for_sample=waits_for_sample,
            started=started,
            events=tuple(self.transitions.take_events()),
        )
