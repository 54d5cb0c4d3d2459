"""Jobs for engines that place work themselves: their terms, where they are, and what follows from their ends.

- A job is recorded as *pending* before its engine gets it. If the engine refuses it, it is queued again, and its lane
  is not offered for a while, which gets longer each time.
- Jobs that wait at their site are taken back for a change, such as `hold`, and while the queue or their workspace is
  stopped: they are queued here, in their place. One that has begun meanwhile goes on: its engine reports that.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from gpuyard.model.cluster_terms import LEAVE_OUT_S, Basis, ClusterTerms
from gpuyard.model.job import Attempt, Job, OutcomeKind, Started
from gpuyard.model.lease import FixedMemory, Need, PartOfDevice
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.model.retry import Verdict, after_loss
from gpuyard.model.units import format_duration
from gpuyard.policy.cluster_dispatch import MAX_STARTS_PER_STEP, DispatchView, plan_dispatch
from gpuyard.policy.estimates import estimate
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import Plan
from gpuyard.ports import Ended, SiteStatus
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.engine_set import OPEN_AGAIN_S, EngineSet
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.running_jobs import running_jobs
from gpuyard.queue.transitions import JobTransitions

_RAM_STEP_MB = 512.0


class ClusterDispatch:
    def __init__(self, transitions: JobTransitions, engines: EngineSet) -> None:
        self.plan = Plan()
        self._transitions = transitions
        self._store = transitions.store
        self._engines = engines
        self._changes: list[SiteStatus] = []
        self._bad_nodes: dict[tuple[str, str], tuple[str, float]] = {}  # by engine and node: why, and when
        self._delayed: dict[int, tuple[Reason, float, float]] = {}  # by lane: reason, until when, delay in seconds
        self._changes_under_way = 0
        self._asked_back: set[str] = set()  # attempts that their engine was asked to give back
        self._given_back: set[str] = set()  # of these, those whose ends are recorded in this step

    def collect(self) -> None:
        self._changes += self._engines.site_changes()

    def record(self, now: float) -> None:
        """Record the reported changes. A started attempt never goes back to waiting."""
        for status in self._changes:
            live = self._transitions.live.get(status.job_id)
            if live is None or live.attempt.number != status.attempt:
                continue
            if status.place is not None or live.attempt.started is None:
                attempt, site_id = live.attempt, status.site_id or live.attempt.site_id or ""
                attempt = replace(attempt, site_id=site_id, request=attempt.request or status.request)
                if status.place is not None:
                    attempt = _started_at_site(live.job, attempt, status.place, status.at, now)
                where = " ".join(filter(None, (attempt.engine, attempt.site_id)))
                reason = f"{where}: {status.reason}" if status.reason else f"with {where}"
                self._transitions.update_site(live, attempt, reason)
                if status.is_suspended is not None:
                    self._transitions.follow_suspension(status.job_id, now, is_suspended=status.is_suspended)
        # Jobs wait at a site that may not start: the queue or their workspace was stopped.
        is_paused, stopped = bool(self._store.setting("paused")), self._store.stopped_tags()
        if is_paused or stopped:
            waiting = self.waiting_there()
            self.take_back([each.job.id for each in waiting if is_paused or each.job.spec.tag in stopped])

    def forget_recorded(self) -> None:
        self._changes.clear()
        if self._asked_back:
            waiting = {each.attempt.key for each in self.waiting_there()}
            self._asked_back = (self._asked_back - self._given_back) & waiting
        self._given_back.clear()

    def waiting_there(self) -> Iterator[Live]:
        """Yield the jobs that wait at a site, as far as is known."""
        return (each for each in self._transitions.live.without_devices.values() if each.job.state is JobState.PENDING)

    @contextlib.contextmanager
    def during_change(self) -> Iterator[None]:
        """Wrap a change of jobs that are taken back for it: meanwhile no job is handed over."""
        self._changes_under_way += 1
        try:
            yield
        finally:
            self._changes_under_way -= 1

    def take_back(self, job_ids: Collection[int]) -> None:
        """Ask for these jobs: each is queued in a later step, unless it has begun."""
        lives = [self._transitions.live[job_id] for job_id in job_ids if job_id in self._transitions.live]
        wanted = [each.attempt for each in lives if each.attempt.key not in self._asked_back]
        self._asked_back |= self._engines.withdraw(wanted)

    def verdict(self, live: Live, ended: Ended, now: float) -> Verdict | None:
        """Return the verdict on an end for which an engine has its own rules, or None for the general rules."""
        job, attempt, kind, why = live.job, live.attempt, ended.outcome.kind, ended.outcome.reason or ""
        if not attempt.engine or attempt.stopping is not None:
            return None
        if kind is OutcomeKind.NEVER_STARTED:
            return self._after_no_start(live, why, ended.node, now)
        if kind is OutcomeKind.LOST:
            outcomes = filter(None, (each.outcome for each in self._store.attempts(job.id)))
            lost_before = [each for each in outcomes if each.kind is OutcomeKind.LOST]
            return after_loss(job, len(lost_before))
        if kind is OutcomeKind.CANCELLED:
            return Verdict(event=JobEvent.CANCEL, text=why or f"cancelled on {attempt.engine}")
        has_learned_limit = job.spec.time_limit_s is None and attempt.number == 1 and self._longest_s(job) is not None
        if kind is OutcomeKind.TIMED_OUT and has_learned_limit:
            text = f"took far longer than ever before, and {attempt.engine} ended it; runs again without a time limit"
            return Verdict(event=JobEvent.RETRY, text=text)
        return None

    def _after_no_start(self, live: Live, why: str, node: str | None, now: float) -> Verdict:
        engine = live.attempt.engine
        if live.attempt.key in self._asked_back:
            self._given_back.add(live.attempt.key)
            return Verdict(event=JobEvent.REQUEUE, text=f"taken back from {engine}", keeps_place=True)
        if node is not None:
            self._bad_nodes[engine, node] = (why, now)
        text = f"{engine} refused it: {why}" if node is None else f"{why}; queued again without {node}"
        self.delay_lane(live.job, text, now)
        return Verdict(event=JobEvent.REQUEUE, text=text, keeps_place=node is not None)

    def notices(self, now: float) -> list[str]:
        """Name the nodes that could not start jobs."""
        return [
            f"{engine}: {why}; {node} gets no jobs for {format_duration(LEAVE_OUT_S)}"
            f" (`gpuyard doctor --engine {engine}` checks all nodes)"
            for (engine, node), (why, at) in self._bad_nodes.items()
            if now < at + LEAVE_OUT_S
        ]

    def delay_lane(self, job: Job, why: str, now: float) -> None:
        """Offer no job of this lane for a while, as the engine refused one or could not prepare it."""
        lane_id = self._store.lane_of(job.id).id
        self._delayed = {each: one for each, one in self._delayed.items() if now < one[1] + 2 * one[2]}
        before = self._delayed.get(lane_id)
        if before is not None and before[1] > now:
            return  # another job of the same submission
        delay_s = 5.0 if before is None else min(300.0, before[2] * 2)
        reason = Reason(ReasonKind.ENGINE, f"{why}; next try in {delay_s:.0f} s")
        self._delayed[lane_id] = (reason, now + delay_s, delay_s)

    def decide(self, queues: Sequence[LaneQueue], rules: Rules, closed: Iterable[Reason], now: float) -> None:
        self.plan = self.plan_for(queues, rules, closed, now) if queues else Plan()

    def plan_for(
        self, queues: Sequence[LaneQueue], rules: Rules, closed: Iterable[Reason], now: float, about: int | None = None
    ) -> Plan:
        """Return the plan for lanes of clusters. `closed`: why no job may start. Lane `about` is always considered."""
        names = {queue.lane.engine for queue in queues}
        live, started = Counter[str](), Counter[str]()
        buffered: dict[str, dict[int, int]] = {}
        for each in self._transitions.live.values():
            job, engine = each.job, each.attempt.engine
            live[engine] += 1
            if each.attempt.started is not None:
                started[engine] += 1
            elif engine:
                buffered.setdefault(engine, {})[job.group or -job.id] = job.priority  # an array counts as one
        text = "jobs that wait at a cluster are being changed"
        being_changed = [Reason(ReasonKind.PAUSED, text)] if self._changes_under_way else []
        return plan_dispatch(
            DispatchView(
                now=now,
                queues=queues,
                offers={name: self._engines.offer_of(name) for name in names},
                live=live,
                terms=self.terms,
                buffered={name: tuple(priorities.values()) for name, priorities in buffered.items()},
                started=started,
                running=running_jobs(self._transitions),
                used=self._transitions.used(now),
                shut=(*closed, *being_changed),
                stopped=self._store.stopped_tags(),
                tags=rules.limits.tags,
                refused={lane_id: reason for lane_id, (reason, until, _) in self._delayed.items() if now < until},
            ),
            about=about,
        )

    def wake_at(self, now: float) -> float | None:
        if len(self.plan.starts) >= MAX_STARTS_PER_STEP:
            return now
        # A planned start counts too: it may have failed in `prepare`.
        waiting = {each.lane.id for each in self.plan.waiting} | {start.lane.id for start in self.plan.starts}
        times = [until for lane_id, (_, until, _) in self._delayed.items() if lane_id in waiting and until > now]
        if any(self._engines.is_closed(each.lane.engine) for each in self.plan.waiting):
            times.append(now + OPEN_AGAIN_S)
        return min(times, default=None)

    def terms(self, job_id: int) -> ClusterTerms:
        """Return what the job needs from its engine, from its spec and from what was learned.

        A site ends a job that exceeds the time or the RAM it asked for. So these are learned only from the same
        command, with a large margin, and left out of later attempts: the first one may have exceeded them. Learned
        amounts are rounded up, so that jobs that are alike have equal terms."""
        job = self._store.job(job_id)
        assert job is not None
        spec, is_first = job.spec, not job.attempts
        need, memory_basis = self._need(job)
        ram_mb, ram_basis = self._ram(job, need, is_first=is_first)
        longest_s = self._longest_s(job) if is_first else None
        return ClusterTerms(
            need=replace(need, host=None, load_percent=None),
            name=spec.name or spec.tag or "gpuyard",
            priority=job.priority,
            cpus=spec.cpus,
            ram_mb=ram_mb,
            limit_s=spec.time_limit_s,
            expected_s=None if longest_s is None else _round_up(longest_s * 3.0 + 900.0, 900.0),
            group=job.group,
            at_most=job.group_limit,
            options=spec.engine_options,
            warning=spec.warning,
            memory_basis=memory_basis,
            ram_basis=ram_basis,
            time_basis=Basis.LEARNED if spec.time_limit_s is None and spec.duration_s is None else Basis.DECLARED,
        )

    def _need(self, job: Job) -> tuple[Need, Basis]:
        """Return the need of a job whose GPUs are unknown here, and where its memory on each comes from."""
        need, sharing = self._transitions.estimates.need_elsewhere(job), job.spec.tag_sharing
        if job.growth.memory_mb is not None or job.growth.is_alone:
            return need, Basis.GROWN
        if not job.spec.learns_memory:
            return need, Basis.DECLARED
        if isinstance(need.memory, FixedMemory):
            return replace(need, memory=FixedMemory(_round_up(need.memory.required_mb, 256.0))), Basis.LEARNED
        if sharing is not None and need.required_mb is None and sharing.most_per_device > 1:
            need = replace(need, memory=PartOfDevice(1.0 / sharing.most_per_device))
        return need, Basis.DEFAULT

    def _ram(self, job: Job, need: Need, *, is_first: bool) -> tuple[float | None, Basis]:
        declared_mb, least_mb = need.ram_mb, need.min_host_memory_mb or 0.0
        if declared_mb is not None:
            has_grown = job.growth.ram_mb is not None
            ram_mb = _round_up(declared_mb, _RAM_STEP_MB) if has_grown else declared_mb
            return max(ram_mb, least_mb) or None, Basis.GROWN if has_grown else Basis.DECLARED
        exact = self._transitions.estimates.profiles(job)[0] if is_first else None
        learned_mb = None if exact is None else exact.ram_mb
        if learned_mb is None:
            return least_mb or None, Basis.DECLARED if least_mb else Basis.DEFAULT
        return max(_round_up(learned_mb * 2.0 + 1024.0, _RAM_STEP_MB), least_mb), Basis.LEARNED

    def _longest_s(self, job: Job) -> float | None:
        """Return how long this command may take; None if it has not run and its duration was not declared."""
        return estimate(job.spec, self._transitions.estimates.profiles(job)[0]).most_s


def _round_up(figure: float, step: float) -> float:
    return math.ceil(figure / step) * step


def _started_at_site(job: Job, attempt: Attempt, place: str, at: float | None, now: float) -> Attempt:
    """Return an attempt that runs at `place`. Its time limit counts from the start there. The clock of that machine may
    be wrong: it has not started before it was handed over, nor much before an earlier report of its start."""
    if attempt.started is not None and at is None:
        return replace(attempt, phase=replace(attempt.started, place=place))
    earliest = attempt.since - (0.0 if attempt.started is None else 10.0)
    limit, started_at = job.spec.time_limit_s, min(now, max(earliest, at or now))
    stop_at = None if limit is None else started_at + limit + attempt.suspended_s
    return replace(attempt, phase=Started(at=started_at, place=place), stop_at=stop_at)
