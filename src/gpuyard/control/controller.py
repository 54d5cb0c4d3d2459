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
from collections.abc import Iterator, Sequence

from gpuyard.control.desk import Desk, Live
from gpuyard.control.launching import launch_of
from gpuyard.control.words import Explanation, Look, Rules, Step
from gpuyard.core.gates import Gate, judge_above, judge_below
from gpuyard.core.jobs import Attempt, Job, Outcome, OutcomeKind
from gpuyard.core.learning import Estimate
from gpuyard.core.lifecycle import JobEvent, JobState
from gpuyard.core.model import Holder, Lease, Snapshot, Ticket
from gpuyard.core.ordering import LaneQueue
from gpuyard.core.placement import View as Placement
from gpuyard.core.policy import Hold, Plan, Start, View, decide, estimate_start
from gpuyard.core.reasons import Reason, ReasonKind, over, plain
from gpuyard.core.recovery import REBOOTED, after_reboot, died_with_the_machine, ended_before_reboot
from gpuyard.errors import EnvironmentFault, GpuyardError, UserError
from gpuyard.ports import Clock, Ended, Engine, HeldClaim, LeaseBook, Wanted
from gpuyard.store.jobs import JobStore

_log = logging.getLogger(__name__)
# So long a job waits before others in the ledger are told of it: most waits are over by then, and a ticket is a file.
IN_LINE_AFTER_S = 0.25
_KILL_AGAIN_S = 5.0
_ASK_AGAIN_S = 0.05
_TROUBLE_S = 1.0
# Of the end of these we hear by ourselves.
_TOLD_OF = frozenset(
    {ReasonKind.PAUSED, ReasonKind.TAG_LIMIT, ReasonKind.ARRAY_LIMIT, ReasonKind.CPU_LIMIT, ReasonKind.NOT_ASKED_FOR,
     ReasonKind.BANNED, ReasonKind.TOO_FEW}
)  # fmt: skip
_HELD_BY_SOMEBODY = frozenset({ReasonKind.LEASED, ReasonKind.AWAITED})
_CPU_MARGIN_PERCENT, _MEMORY_MARGIN_MB = 5.0, 128.0


class Controller:
    def __init__(  # noqa: PLR0913 - the ports
        self,
        store: JobStore,
        leases: LeaseBook,
        engine: Engine,
        clock: Clock,
        *,
        rules: Rules,
        me: Holder,
    ) -> None:
        self.desk = Desk(store)
        self.rules = rules
        self.plan = Plan()
        self.me = me
        self._store = store
        self._leases = leases
        self._engine = engine
        self._clock = clock
        self._unrecorded: dict[tuple[int, int], Ended] = {}
        self._cpu_gate = self._memory_gate = Gate()
        self._trouble: Reason | None = None
        self._trouble_until = self._ledger_until = 0.0
        self._head_since: tuple[int, float] | None = None
        self._devices_end = False
        self._has_rejected = False
        self._asked: set[int] = set()
        self._has_unasked = False

    def recover(self) -> None:
        """Takes over what an earlier daemon left: to be called once, before the first step."""
        now = self._clock.now()
        with self._store.transaction():
            self._store.drop_incomplete()
            self.desk.reload()
        attempts = [live.attempt for live in self.desk.live.values()]
        self._engine.adopt(attempts)
        if any(self._died_with_the_machine(attempt) for attempt in attempts):
            self._ask_for_ends()
            with self.desk.in_step(), self._store.transaction():
                self._record_ends(now)
            self._unrecorded.clear()
        self._devices_end = True

    def step(self, look: Look, *, may_start: bool = True) -> Step:
        """Without `may_start` it only tidies up: the look is too old to start anything by."""
        now = self._clock.now()
        if now >= self._trouble_until:
            self._trouble = None
        self._has_rejected = False
        self._ask_for_ends()
        granted: list[HeldClaim] = []
        try:
            with self.desk.in_step(), self._store.transaction():
                self._record_ends(now)
                self.desk.note_statistics(now)
                self._requeue_due(now)
                self._stop_overdue(now)
                started = self._start(look, now, granted) if may_start else self._wait_for_look()
        except BaseException:
            self._engine.abandon()
            for held in granted:
                held.release()
            raise
        self._unrecorded.clear()
        self._engine.begin()
        for held in granted:
            held.leave()
        self._ask_to_stop()
        self._stand_in_line(now, has_started=started > 0)
        return self._report(now, started)

    # Observe

    def _ask_for_ends(self) -> None:
        if not self._unrecorded:  # the engine may forget what it told of when it is asked again
            self._unrecorded = {(ended.job_id, ended.attempt): ended for ended in self._engine.ended()}

    def _died_with_the_machine(self, attempt: Attempt) -> bool:
        return died_with_the_machine(attempt, self.me.boot_id)

    def _record_ends(self, now: float) -> None:
        for (job_id, number), ended in self._unrecorded.items():
            live = self.desk.live.get(job_id)
            if live is None or live.attempt.number != number:
                continue  # recorded before, by a daemon that did not live to forget it
            attempt = live.attempt
            self._devices_end = self._devices_end or attempt.lease_id is not None
            if self._died_with_the_machine(attempt):
                self._end_of_earlier_boot(live, ended.outcome, now)
                continue
            if attempt.stopping is not None or ended.outcome.kind is OutcomeKind.LOST:
                self._engine.signal(attempt, signal.SIGKILL)  # nothing of it may go on beside its next attempt
            self.desk.end(job_id, ended.outcome, _time_of(ended, attempt, now), pid=ended.pid)

    def _end_of_earlier_boot(self, live: Live, outcome: Outcome, now: float) -> None:
        """Nothing of it is left to be killed, and its pid may be another's by now."""
        if ended_before_reboot(outcome):
            self.desk.end(live.job.id, outcome, now)
        else:
            verdict = after_reboot(live.job) if live.job.state is JobState.RUNNING else None
            self.desk.end(live.job.id, REBOOTED, now, verdict=verdict)

    def _requeue_due(self, now: float) -> None:
        for job_id in self._store.due(now):
            job = self._store.job(job_id)
            if job is not None:
                self.desk.apply(job, JobEvent.DUE, now)

    def _stop_overdue(self, now: float) -> None:
        for live in list(self.desk.live.values()):
            attempt = live.attempt
            if attempt.stopping is None and attempt.stop_at is not None and attempt.stop_at <= now:
                self.desk.stop(live.job.id, OutcomeKind.TIMED_OUT, now)
            elif attempt.kill_at is not None and attempt.kill_at <= now:
                self._engine.signal(attempt, signal.SIGKILL)
                self.desk.postpone_kill(live.job.id, now + _KILL_AGAIN_S)

    def _ask_to_stop(self) -> None:
        """Once it is recorded that they are to; again where nothing of it was found yet, and after a crash of ours."""
        stopping = {job_id: live for job_id, live in self.desk.live.items() if live.attempt.stopping is not None}
        self._asked &= stopping.keys()
        for job_id in stopping.keys() - self._asked:
            if self._engine.signal(stopping[job_id].attempt, signal.SIGTERM):
                self._asked.add(job_id)
        self._has_unasked = len(self._asked) < len(stopping)

    # Decide and start

    def _start(self, look: Look, now: float, granted: list[HeldClaim]) -> int:
        queues = self._store.ready_queues()
        wants_devices = any(queue.lane.need.devices for queue in queues)
        if wants_devices or self._devices_end:
            try:
                granted += self._leases.grant(lambda leases, tickets: self._want(look, now, queues, leases, tickets))
                self._devices_end = False
            except EnvironmentFault as error:
                _log.warning("%s; jobs that need devices wait", error)
                self._ledger_until = now + _TROUBLE_S
                queues = [queue for queue in self._store.ready_queues() if not queue.lane.need.devices]
                self.plan = decide(self._view(look, now, queues)) if queues else Plan()
        else:
            self.plan = decide(self._view(look, now, queues)) if queues else Plan()
        waiting = iter(granted)
        started = 0
        for start in self.plan.starts:
            held = next(waiting) if start.claim.shares else None
            if self._trouble is None or self._trouble.kind is not ReasonKind.NO_ENGINE:
                started += self._launch(start, held, look.snapshot, now)
            elif held is not None:
                held.release()
        return started

    def _wait_for_look(self) -> int:
        """Nothing starts; and where nothing is ready any more, nothing waits either."""
        if not self._store.has_ready():
            self.plan = Plan()
        return 0

    def _want(
        self,
        look: Look,
        now: float,
        queues: Sequence[LaneQueue],
        leases: tuple[Lease, ...],
        tickets: tuple[Ticket, ...],
    ) -> list[Wanted]:
        if not queues:
            self.plan = Plan()
            return []
        self.plan = decide(self._view(look, now, queues, leases, tickets))
        return [
            Wanted(claim=start.claim, label=f"job {start.job_id}") for start in self.plan.starts if start.claim.shares
        ]

    def _view(
        self,
        look: Look,
        now: float,
        queues: Sequence[LaneQueue],
        leases: tuple[Lease, ...] = (),
        tickets: tuple[Ticket, ...] = (),
    ) -> View:
        mine = self._leases.my_ticket()
        snapshot = look.snapshot
        return View(
            now=now,
            placement=Placement(
                now=now, snapshot=snapshot, leases=leases, measured=self._leases.measure(snapshot, leases)
            ),
            queues=queues,
            me=self.me,
            limits=self.rules.limits,
            running=self.desk.running(),
            used=self.desk.used(now),
            shut=tuple(self._shut(look, now)),
            tickets=tuple(ticket for ticket in tickets if ticket.id != mine),
            my_ticket=next((ticket for ticket in tickets if ticket.id == mine), None),
            estimate=self._estimate,
            ends_after=self.desk.ends_after,
        )

    def _shut(self, look: Look, now: float) -> Iterator[Reason]:
        """Why nothing at all may start."""
        if self._store.setting("paused"):
            yield plain(ReasonKind.PAUSED, "the queue is paused: `gpuyard unpause` lets it go on")
        if self._trouble is not None and now < self._trouble_until:
            yield self._trouble
        rules, host = self.rules, look.snapshot.host
        self._cpu_gate = judge_above(self._cpu_gate, look.cpu_percent, rules.max_cpu_percent, _CPU_MARGIN_PERCENT)
        if self._cpu_gate.is_closed:
            yield over(ReasonKind.HOST_TOO_BUSY, look.cpu_percent, rules.max_cpu_percent)
        available, least = host.memory_available_mb, rules.min_free_memory_mb
        self._memory_gate = judge_below(self._memory_gate, available, least, _MEMORY_MARGIN_MB)
        if self._memory_gate.is_closed:
            text = f"{available or 0.0:.0f} MB of RAM available < {least or 0.0:.0f} MB"
            yield plain(ReasonKind.HOST_TOO_FULL, text)

    def _launch(self, start: Start, held: HeldClaim | None, snapshot: Snapshot, now: float) -> int:
        job = self._store.job(start.job_id)
        assert job is not None
        number = job.attempts + 1
        try:
            prepared = self._engine.prepare(
                launch_of(job, number, held, snapshot), held.descriptor if held is not None else None
            )
        except GpuyardError as error:
            if held is not None:
                held.release()
            if isinstance(error, UserError):
                self.desk.apply(job, JobEvent.REJECT, now, str(error))
                self._has_rejected = True  # others were held up by a start that did not come to be
            else:
                self._have_trouble(ReasonKind.NO_ENGINE, error, now)
            return 0
        limit = job.spec.time_limit_s
        attempt = Attempt(
            job_id=job.id,
            number=number,
            pid=prepared.pid,
            boot_id=self.me.boot_id,
            started_at=now,
            lease_id=held.lease.id if held is not None else None,
            devices=tuple(share.device_id for share in start.claim.shares),
            log=prepared.log,
            stop_at=None if limit is None else now + limit,
        )
        self.desk.begin(job, attempt)
        return 1

    def _have_trouble(self, kind: ReasonKind, error: GpuyardError, now: float) -> None:
        self._trouble = plain(kind, f"{error}; tried again in a moment")
        self._trouble_until = now + _TROUBLE_S

    def _estimate(self, job_id: int) -> Estimate:
        job = self._store.job(job_id)
        assert job is not None
        return self.desk.estimate(job)

    def explain(self, job: Job, look: Look) -> Explanation:
        """Why it does not start, in the policy's own words, at this moment."""
        now = self._clock.now()
        seen: list[View] = []
        lane = self._store.lane_of(job.id)

        def read(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[Wanted]:
            seen.append(self._view(look, now, self._store.ready_queues(), leases, tickets))
            return []

        self._leases.grant(read)
        view = seen[0]
        plan = decide(view, about=lane.id)
        ahead = self._store.place_in_lane(lane, job.id)
        hold = next((hold for hold in plan.holds if hold.lane.id == lane.id), None)
        likely_s = self.desk.estimate(job).likely_s
        return Explanation(
            reasons=hold.reasons if hold is not None else (),
            first_id=hold.job_id if hold is not None else job.id,
            ahead=ahead,
            starts_at=estimate_start(view, lane, ahead, likely_s),
        )

    # Stand in line with others, and rest

    def _stand_in_line(self, now: float, *, has_started: bool) -> None:
        """One who has just been served goes behind those who wait already."""
        head = self.plan.head
        if head is None or has_started:
            self._leases.leave_line()
            self._head_since = None
        if head is None:
            return
        if self._head_since is None or self._head_since[0] != head.lane.id:
            self._head_since = (head.lane.id, now)
        if now - self._head_since[1] >= IN_LINE_AFTER_S and self._is_for_others(head):
            with contextlib.suppress(EnvironmentFault):
                self._leases.enter_line(head.lane.need, head.lane.priority, f"job {head.job_id}")

    def _is_for_others(self, head: Hold) -> bool:
        return not any(reason.kind in (ReasonKind.PAUSED, ReasonKind.NO_ENGINE) for reason in head.reasons)

    def _report(self, now: float, started: int) -> Step:
        times = [self._store.next_due()]
        for live in self.desk.live.values():
            attempt = live.attempt
            times.append(attempt.kill_at if attempt.stopping is not None else attempt.stop_at)
        if self._has_rejected:
            times.append(now)
        if self._has_unasked:
            times.append(now + _ASK_AGAIN_S)
        if self._trouble is not None:
            times.append(self._trouble_until)
        if now < self._ledger_until:
            times.append(self._ledger_until)
        if self._head_since is not None and self._leases.my_ticket() is None:
            times.append(self._head_since[1] + IN_LINE_AFTER_S if now < self._head_since[1] + IN_LINE_AFTER_S else None)
        kinds = {reason.kind for hold in self.plan.holds for reason in hold.reasons}
        lacks_devices = ReasonKind.TOO_FEW in kinds and not kinds & _HELD_BY_SOMEBODY
        return Step(
            wake_at=min((at for at in times if at is not None), default=None),
            waits_for_room=lacks_devices or not kinds <= _TOLD_OF,
            waits_for_look=lacks_devices or not kinds <= _TOLD_OF | _HELD_BY_SOMEBODY,
            started=started,
        )


def _time_of(ended: Ended, attempt: Attempt, now: float) -> float:
    """When the program ended, which may have been while nobody could record it."""
    return now if ended.at is None else min(now, max(attempt.started_at, ended.at))
