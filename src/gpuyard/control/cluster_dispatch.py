"""What is handed over to engines that place work themselves: on what terms, how it stands there, what its end means.

- A job is recorded as *pending* before its engine hears of it; what the engine then cannot take was never begun, and is
  queued again. Its lane waits for a while before it is offered anew: longer each time.
- Where a job runs, and since when, comes from its engine; its time limit counts from there.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gpuyard.control.engine_set import OPEN_AGAIN_S, EngineSet
from gpuyard.control.live_jobs import Live
from gpuyard.control.step import Explanation, Rules
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.cluster.dispatch import MAX_STARTS_PER_STEP, DispatchView, plan_dispatch
from gpuyard.core.cluster.offer import ClusterTerms
from gpuyard.core.job.crash_recovery import after_loss
from gpuyard.core.job.job import Job, OutcomeKind
from gpuyard.core.job.lifecycle import JobEvent
from gpuyard.core.job.retry import Verdict
from gpuyard.core.lease import PartOfDevice
from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.queue_order import LaneQueue
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.ports import Ended, SiteStatus
from gpuyard.store.job_store import JobStore

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0
# What is learned of time and RAM may be too little for the next run: so much more is asked for.
_MUCH_LONGER, _LONGER_S = 3.0, 900.0
_MORE_RAM, _MORE_RAM_MB = 1.5, 512.0


class ClusterDispatch:
    def __init__(self, transitions: JobTransitions, store: JobStore, engines: EngineSet) -> None:
        self.plan = Plan()
        self._transitions = transitions
        self._store = store
        self._engines = engines
        self._seen: list[SiteStatus] = []
        self._refused: dict[int, tuple[Reason, float, float]] = {}

    # What is seen of those that are there

    def listen(self) -> None:
        self._seen += self._engines.site_changes()

    def record(self, now: float) -> None:
        """What has begun does not wait again; and an engine that cannot say by which name it has it has not renamed
        it."""
        for seen in self._seen:
            live = self._transitions.live.get(seen.job_id)
            if live is None or live.attempt.number != seen.attempt:
                continue
            if seen.place is not None or not live.attempt.has_started:
                known = replace(seen, site_id=seen.site_id or live.attempt.site_id or "")
                self._transitions.locate(live, known, now)

    def forget_recorded(self) -> None:
        self._seen.clear()

    def verdict(self, live: Live, ended: Ended, now: float) -> Verdict | None:
        """Where the usual rules do not say what follows from such an end."""
        job, attempt, kind = live.job, live.attempt, ended.outcome.kind
        if not attempt.engine or attempt.stopping is not None:
            return None
        if kind is OutcomeKind.NEVER_STARTED:
            why = f"{attempt.engine} did not take it: {ended.outcome.reason}"
            self._wait(job, why, now)
            return Verdict(event=JobEvent.REQUEUE, text=why)
        if kind is OutcomeKind.LOST:
            return after_loss(job)
        if kind is OutcomeKind.CANCELLED:
            return Verdict(event=JobEvent.CANCEL, text=ended.outcome.reason or "cancelled where it was")
        was_given_time = job.spec.time_limit_s is None and not job.failures and self._expected_s(job) is not None
        if kind is OutcomeKind.TIMED_OUT and was_given_time:
            text = (
                "it took far longer than ever before, and was ended there; it is run again with all the time it needs"
            )
            return Verdict(event=JobEvent.RETRY, counts=True, text=text)
        return None

    def refuse(self, job: Job, why: str, now: float) -> None:
        """It could not even be prepared."""
        self._wait(job, why, now)

    def _wait(self, job: Job, why: str, now: float) -> None:
        lane_id = self._store.lane_of(job.id).id
        self._refused = {each: one for each, one in self._refused.items() if now < one[1] + 2 * one[2]}
        before = self._refused.get(lane_id)
        if before is not None and before[1] > now:
            return  # others of the same parcel
        pause_s = _FIRST_PAUSE_S if before is None else min(_LONGEST_PAUSE_S, before[2] * 2)
        reason = Reason(ReasonKind.NO_ENGINE, f"{why}; tried again every {pause_s:.0f} s or so")
        self._refused[lane_id] = (reason, now + pause_s, pause_s)

    # What goes there next

    def decide(self, queues: Sequence[LaneQueue], rules: Rules, shut: Iterable[Reason], now: float) -> None:
        self.plan = self._plan(queues, rules, shut, now) if queues else Plan()

    def explain(
        self, job: Job, queues: Sequence[LaneQueue], rules: Rules, shut: Iterable[Reason], now: float
    ) -> Explanation:
        lane = self._store.lane_of(job.id)
        holds = self._plan(queues, rules, shut, now, about=lane.id).waiting
        hold = next((hold for hold in holds if hold.lane.id == lane.id), None)
        return Explanation(
            reasons=hold.reasons if hold is not None else (),
            first_id=hold.job_id if hold is not None else job.id,
            ahead=self._store.count_ahead(lane, job.id),
            starts_at=None,
        )

    def _plan(
        self,
        queues: Sequence[LaneQueue],
        rules: Rules,
        shut: Iterable[Reason],
        now: float,
        about: int | None = None,
    ) -> Plan:
        names = {queue.lane.engine for queue in queues}
        live: dict[str, int] = {}
        for each in self._transitions.live.values():
            live[each.attempt.engine] = live.get(each.attempt.engine, 0) + 1
        return plan_dispatch(
            DispatchView(
                now=now,
                queues=queues,
                offers={name: self._engines.offer_of(name) for name in names},
                live=live,
                terms=self.terms,
                running=self._transitions.running(),
                used=self._transitions.used(now),
                shut=tuple(shut),
                stopped=self._store.stopped_tags(),
                tags=rules.limits.tags,
                refused={lane_id: reason for lane_id, (reason, until, _) in self._refused.items() if now < until},
            ),
            about=about,
        )

    def wake_at(self, now: float) -> float | None:
        if len(self.plan.starts) >= MAX_STARTS_PER_STEP:
            return now
        # Some that were to start could not even be prepared.
        waiting = {hold.lane.id for hold in self.plan.waiting} | {start.lane.id for start in self.plan.starts}
        times = [until for lane_id, (_, until, _) in self._refused.items() if lane_id in waiting and until > now]
        if any(self._engines.is_shut(hold.lane.engine) for hold in self.plan.waiting):
            times.append(now + OPEN_AGAIN_S)
        return min(times, default=None)

    def terms(self, job_id: int) -> ClusterTerms:
        job = self._store.job(job_id)
        assert job is not None
        spec, estimates = job.spec, self._transitions.estimates
        need = estimates.need_elsewhere(job)
        if spec.crew is not None and need.required_mb is None and spec.learns_memory and spec.crew.most_per_device > 1:
            need = replace(need, memory=PartOfDevice(1.0 / spec.crew.most_per_device))
        learned_mb = estimates.ram_mb(job)
        if need.min_host_memory_mb is None and learned_mb is not None:
            learned_mb = learned_mb * _MORE_RAM + _MORE_RAM_MB
        return ClusterTerms(
            need=need,
            name=spec.name or spec.tag or "gpuyard",
            priority=job.priority,
            cpus=spec.cpus,
            ram_mb=need.min_host_memory_mb or learned_mb,
            limit_s=spec.time_limit_s,
            expected_s=self._expected_s(job),
            group=job.group,
            at_most=job.group_limit,
            options=spec.engine_options,
        )

    def _expected_s(self, job: Job) -> float | None:
        """Far longer than it ever took; nothing for one that has failed, perhaps for want of time."""
        longest_s = self._transitions.estimates.estimate(job).most_s if not job.failures else None
        return None if longest_s is None else longest_s * _MUCH_LONGER + _LONGER_S
