"""Slices (`policy/plan.py`): jobs that were started together, and run one after the other on one lease.

All are recorded before the keeper gets them. The first one runs; the others are pending, in `transitions.upcoming`,
until the keeper reports that they have begun. They are taken back, and queued again as they were, before a request that
may change the queue (it finds each job either queued or running), when the slice has lasted for a second, and when the
job that runs is stopped or suspended: its lease may reserve nothing then. What was taken back ends as NEVER_STARTED, as
does what the keeper did not start because the daemon died.
"""

from collections.abc import Callable, Mapping, Sequence

from gpuyard.model.job import Growth, Job
from gpuyard.model.lease import Need, asks_for_the_same
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.plan import LONGEST_S, MOST, may_slice, slice_length
from gpuyard.policy.world import Plan, Start, World
from gpuyard.ports import Prepared, SiteStatus
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.transitions import JobTransitions


class Slices:
    def __init__(self, transitions: JobTransitions, engines: EngineSet, need_of: Callable[[int], Need]) -> None:
        """`need_of` returns the need of a job in a lane that sizes each."""
        self._transitions = transitions
        self._store = transitions.store
        self._engines = engines
        self._need_of = need_of
        self._begun: list[SiteStatus] = []  # not recorded yet
        self._slices: list[tuple[tuple[int, ...], float]] = []  # jobs, some of which may not have begun; until when
        self._changes = 0  # requests that may change the queue, and are not answered yet

    @property
    def has_upcoming(self) -> bool:
        return bool(self._transitions.upcoming)

    def begin_change(self) -> None:
        """Take back what has not begun, and let no start take jobs along until `end_change`."""
        self._changes += 1
        for job_ids, _ in self._slices:
            self._take_back(job_ids)
        self._slices.clear()

    def end_change(self) -> None:
        self._changes -= 1

    def taken_along(self, plan: Plan, world: World | None) -> Mapping[int, Sequence[Job]]:
        """Return the jobs that starts take along, by the first job."""
        found: dict[int, Sequence[Job]] = {}
        by_lane: dict[int, list[Start]] = {}
        if world is None or self._changes:
            return found
        for start in plan.starts:
            by_lane.setdefault(start.lane.id, []).append(start)
        for starts in by_lane.values():
            if may_slice(starts[0].lane, plan, world):
                jobs = self._next_jobs(starts, places=len(world.running) + len(plan.starts))
                found |= {start.job_id: jobs[place :: len(starts)] for place, start in enumerate(starts)}
        return found

    def _next_jobs(self, starts: Sequence[Start], places: int) -> list[Job]:
        """Return the next jobs of a lane that need what the starts need."""
        start = starts[0]
        lane, first = start.lane, self._store.job(start.job_id)
        likely_s = self._transitions.estimates.estimate_of(start.job_id).likely_s
        waiting = self._store.count_queued([lane.id], MOST * places + len(starts)) - len(starts)
        length = slice_length(likely_s, waiting, places, len(starts))
        are_alike = all(start.need and each.need and asks_for_the_same(start.need, each.need) for each in starts)
        if length < 1 or first is None or not are_alike or not _may_follow(first):
            return []
        jobs: list[Job] = []
        for job in self._store.next_jobs(lane.id, length * len(starts), after=max(each.job_id for each in starts)):
            needs_same = not lane.sizes_each or job.argv == first.argv
            if not needs_same and start.need is not None:
                needs_same = asks_for_the_same(start.need, self._need_of(job.id))
            if job.spec is not first.spec or not needs_same or not _may_follow(job):
                break
            jobs.append(job)
        return jobs

    def note(self, prepared: Prepared, now: float) -> None:
        """Note that these were recorded, and their keeper gets them now."""
        if prepared.rest:
            job_ids = prepared.job_id, *(each.job_id for each in prepared.rest)
            self._slices.append((job_ids, now + LONGEST_S))

    def collect(self) -> None:
        self._begun += self._engines.begun()

    def record(self, now: float) -> None:
        """Record what has begun. Call it before ends are recorded."""
        for each in self._begun:
            live = self._transitions.upcoming.get(each.job_id)
            if live is not None and live.attempt.number == each.attempt:
                at = now if each.at is None else min(now, max(each.at, live.attempt.since))
                self._transitions.begin(live, at, each.keeper_pid)

    def forget_recorded(self) -> None:
        self._begun.clear()

    def take_back(self, now: float) -> None:
        """Take back what has to start no more. Call it when a step is recorded, and before signals are sent."""
        live, kept = self._transitions.live.apart, []
        for job_ids, until in self._slices:
            is_stopping = any(_is_stopping(live[job_id]) for job_id in job_ids if job_id in live)
            if now >= until or is_stopping:
                self._take_back(job_ids)
            elif not self._transitions.upcoming.keys().isdisjoint(job_ids):
                kept.append((job_ids, until))
        self._slices = kept

    def _take_back(self, job_ids: Sequence[int]) -> None:
        upcoming = self._transitions.upcoming
        self._engines.withdraw([upcoming[job_id].attempt for job_id in job_ids if job_id in upcoming])

    def wake_at(self) -> float | None:
        """Return when the first slice has lasted for too long."""
        return min((until for _, until in self._slices), default=None)


def _may_follow(job: Job) -> bool:
    """Return whether a job can run on the lease of another one with the same spec, its variables but for its number."""
    spec = job.spec
    is_plain = spec.container is None and spec.task is None and spec.code.snapshot is None
    return is_plain and not spec.filled_variables and not job.is_unreadable and job.growth == Growth()


def _is_stopping(live: Live) -> bool:
    """Return whether a job is stopped or suspended, or about to be."""
    attempt = live.attempt
    return live.job.state is not JobState.RUNNING or attempt.stopping is not None or attempt.parked is not None
