"""Successors: short jobs that follow each other without a step in between.

Where jobs end faster than steps can follow, the keeper gets the next jobs of the lane in advance (`HostEngine.put`).
When a job has succeeded it starts the next one in its place, with its lease, and the record follows a moment later. It
is as if this queue had decided at the very end of the job, because:

- Only the jobs that come next are put, and only while one lane alone has ready jobs, and they wait for nothing but
  places that running ones take.
- While other programs wait in the ledger for what these jobs take, jobs follow each other on a lease for 0.25 s at most
  from its beginning, and not at all if one of those programs has a higher priority.
- They need what the job needs whose place they take, so the ledger stays true. Each plan asks whether the next job
  could start in each place of the group if the job that has it had ended now (`next_in_place`). If not, all are taken
  back.
- No more are put than end within 0.25 s: a plan goes by a sample that may be that old. Longer jobs are never put. While
  the sample is older, or the ledger busy, no more are put, and the keeper starts those that it has.
- They wait in the keeper for no job that has run for 0.25 s already: plans leave out what is put, and it could start
  elsewhere. If all places have such jobs, all are taken back, and none is put until another job begins.
- Each request that may change the queue takes them back first, and puts none until it is answered.
- No job follows one that is stopped or suspended, or resumes (`leave_out_stopping`): its lease may reserve nothing.
- The keeper writes each start to its journal first. A daemon that takes over records what it finds there.
- No job is put whose end may unblock another, and none while such a job runs: the other may come before those put.
- After a failure the keeper starts none: it may be out of memory, and the next job would be, too.
"""

import logging
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.control.engine_set import EngineSet
from gpuyard.control.launch_command import follow_launch
from gpuyard.control.may_follow import is_held_up, is_stopping, job_may_follow, lane_may_follow, turn_ends
from gpuyard.control.rules import Rules
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Job, Started
from gpuyard.core.job.job_spec import JobSpec
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Need, asks_for_the_same
from gpuyard.core.scheduling.next_in_place import NextJob, refused_places, waits_for_places
from gpuyard.core.scheduling.plan import Plan, Start, WaitingJob
from gpuyard.core.scheduling.queue_order import Lane, LaneQueue
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.scheduling.world import JobFacts, World
from gpuyard.core.snapshot import Sample
from gpuyard.errors import GpuyardError
from gpuyard.ports import Followed, Launch

_log = logging.getLogger(__name__)
_WITHIN_S = 0.25
_MOST = 96
_SHORTEST_S = 0.001
_MOST_GROUPS = 100


class _Group(Struct, frozen=True):
    number: int
    lane_id: int
    need: Need
    spec: JobSpec


class _Place(Struct, frozen=True):
    """Where a live job runs: in the group, on a lease that began then."""

    group: int
    since: float


class _Steady(Struct, frozen=True):
    """What the last plan was made of. While it is so, and no device becomes free, another plan would start nothing."""

    group: _Group
    first: Job
    view: World
    places: int  # those with a job that has not run for long yet
    likely_s: float | None  # how long each job takes
    until: float  # when other programs come next
    sample: Sample
    rules: Rules
    live: int

    @property
    def lane(self) -> Lane:
        return self.view.lanes[0].lane

    def most(self, now: float) -> int:
        """Return how many jobs may be in the prefetch queue."""
        if self.likely_s is None:
            return 0
        left_s = min(_WITHIN_S, self.until - now)
        return min(_MOST, int(self.places * left_s / max(self.likely_s, _SHORTEST_S)))

    def takes(self, job: Job, need_of: Callable[[int], Need]) -> bool:
        """Return whether a job can take the place of others of the group."""
        if job.spec is not self.group.spec or not job_may_follow(job):
            return False
        needs_same = not self.lane.sizes_each or job.argv == self.first.argv
        return needs_same or asks_for_the_same(self.group.need, need_of(job.id))


class Successors:
    def __init__(self, transitions: JobTransitions, engines: EngineSet, need_of: Callable[[int], Need]) -> None:
        self._transitions = transitions
        self._store = transitions.store
        self._engines = engines
        self._need_of = need_of
        self._followed: list[Followed] = []  # not recorded yet
        self._groups: list[_Group] = []
        self._last_group = 0
        self._places: dict[int, _Place] = {}  # by live job
        self._put: dict[int, Job | None] = {}  # as they were when they were put; None: read it again
        self._put_up_to = 0  # the last job that was put since the last plan
        self._steady: _Steady | None = None
        self._is_paused = False  # until the next plan
        self.has_taken_back = False  # since the last step began
        self._changes = 0  # requests that may change the queue, and are not answered yet

    # Requests

    @property
    def is_active(self) -> bool:
        return self._steady is not None

    def begin_change(self) -> None:
        """Take back what the keeper has not begun, and put nothing until `end_change`. What is still `prefetched` then
        has begun, and a step records it as soon as the keeper says so."""
        self._changes += 1
        self.stop()

    def end_change(self) -> None:
        self._changes -= 1

    # Groups

    def with_group(self, launch: Launch, start: Start, job: Job, now: float) -> Launch:
        """Return the launch with the group of its job, if others may take its place."""
        may_follow = lane_may_follow(start.lane) and job_may_follow(job) and launch.ram_limit_mb is None
        self._places.pop(job.id, None)
        if start.need is None or not may_follow:
            return launch
        group = self._group_for(start.lane, start.need, job.spec).number
        self._places[job.id] = _Place(group=group, since=now)
        return replace(launch, group=group)

    def _group_for(self, lane: Lane, need: Need, spec: JobSpec) -> _Group:
        for group in self._groups:
            if group.lane_id == lane.id and group.spec is spec and asks_for_the_same(group.need, need):
                return group
        if len(self._groups) >= _MOST_GROUPS:
            self._groups.clear()
        self._last_group += 1
        self._groups.insert(0, _Group(self._last_group, lane.id, need, spec))
        return self._groups[0]

    def leave_out_stopping(self) -> None:
        """Let no job follow one that is being stopped or suspended, waits to resume, or resumes.

        Call it when that is recorded, and before signals are sent. The group of such a job is given up: what is put of
        it is taken back, and its number is never used again. So when the job ends, the keeper finds no launch of its
        group, whatever is put for the groups of others. What the keeper took before that, it took because the job had
        ended already, with its whole lease: neither signals nor the suspender find a process of it any more, and a
        lease is amended only after its job was suspended.
        """
        live = self._transitions.live.apart
        stopping = [self._places.get(job_id) for job_id in live if is_stopping(live[job_id])]
        given_up = {place.group for place in stopping if place is not None}
        if given_up:
            self._give_up(given_up)

    def _give_up(self, numbers: AbstractSet[int]) -> None:
        """Never put anything for these groups again."""
        self._groups = [group for group in self._groups if group.number not in numbers]
        if self._steady is not None and self._steady.group.number in numbers:
            self.stop()

    # What followed

    def collect(self, rules: Rules) -> None:
        """Collect what has begun. If the rules have changed, take back the rest: with a higher limit the plan may start
        more jobs than have ended, and those that were put come first."""
        if self._steady is not None and self._steady.rules is not rules:
            self.stop()
        self._followed += self._engines.followed()

    def record(self, now: float) -> int:
        """Record the attempts that took the place of others, and return how many. Call it before the ends of those are
        recorded."""
        for each in self._followed:
            self._record(each, now)
        return len(self._followed)

    def forget_recorded(self) -> None:
        self._followed.clear()
        live = self._transitions.live
        if len(self._places) > 2 * len(live) + _MOST:
            self._places = {job_id: place for job_id, place in self._places.items() if job_id in live}

    def record_earlier(self, now: float) -> None:
        """Record what keepers started after an earlier daemon had recorded for the last time."""
        for each in self._engines.followed_before():
            job = self._store.job(each.job_id)
            if job is not None and job.attempts < each.attempt:
                self._record(each, now)

    def _record(self, followed: Followed, now: float) -> None:
        job = self._put.pop(followed.job_id, None) or self._store.job(followed.job_id)
        before = self._attempt(followed.after)
        if job is None or before is None or job.state is not JobState.QUEUED:
            self._end_stray(followed)
            return
        at, limit = min(now, followed.at), job.spec.time_limit_s
        attempt = Attempt(
            job_id=job.id,
            number=followed.attempt,
            phase=Started(at=at, keeper_pid=followed.keeper_pid),
            boot_id=before.boot_id,
            lease_id=before.lease_id,
            devices=before.devices,
            log=followed.log,
            stop_at=None if limit is None else at + limit,
            reserved_mb=before.reserved_mb,
            predicted_mb=before.predicted_mb,
            cpus=before.cpus,
        )
        self._transitions.start(job, attempt, is_stored=False)
        place = self._places.get(before.job_id)
        if place is not None:
            self._places[job.id] = place

    def _attempt(self, name: tuple[int, int]) -> Attempt | None:
        live = self._transitions.live.get(name[0])
        attempts = [live.attempt] if live is not None else self._store.attempts(name[0])
        return next((each for each in attempts if each.number == name[1]), None)

    def _end_stray(self, followed: Followed) -> None:
        """End a program whose job was changed while its keeper did not answer."""
        _log.warning("job %d began after it was changed: its program is ended", followed.job_id)
        phase = Started(at=followed.at, keeper_pid=followed.keeper_pid)
        stray = Attempt(job_id=followed.job_id, number=followed.attempt, phase=phase, log=followed.log)
        self._engines.signal(stray, signal.SIGKILL)

    # What is put

    def prefetched(self) -> AbstractSet[int]:
        """Return the jobs that the keeper has, or has begun without that being recorded."""
        return self._engines.prefetched() | {each.job_id for each in self._followed}

    def without_prefetched(self, queues: Iterable[LaneQueue], *, may_start: bool = False) -> list[LaneQueue]:
        """Return the queues without the jobs that the keeper starts. If jobs may start now, the first of these is taken
        back for each place that has become free without a successor: it comes before all others."""
        free = 0 if self._steady is None else self._steady.live - len(self._transitions.live)
        if may_start and free > 0 and self._put:
            self._engines.take_back(free)
        prefetched = self._engines.prefetched()  # those that have followed are recorded, and may wait again
        self._put = {job_id: job for job_id, job in self._put.items() if job_id in prefetched}
        if not prefetched:
            return list(queues)
        return [
            LaneQueue(lane=queue.lane, jobs=(each for each in queue.jobs if each.job_id not in prefetched))
            for queue in queues
        ]

    def is_steady(self, sample: Sample, rules: Rules, queues: Sequence[LaneQueue], now: float) -> bool:
        """Return whether a plan would start nothing: all is as at the last one, and each end had a successor."""
        known = self._steady
        return (
            known is not None
            and not self._is_paused
            and bool(self._put)
            and not self._changes
            and now < min(known.until, known.view.now + _WITHIN_S)
            and _is_same(known.sample, sample)
            and known.rules is rules
            and known.live == len(self._transitions.live)
            and [queue.lane.id for queue in queues] == [known.lane.id]
        )

    def note_plan(self, plan: Plan, view: World | None, sample: Sample, rules: Rules) -> None:
        """Note a plan, after its starts. `view` is None if several lanes have ready jobs, or suspended jobs wait."""
        self._is_paused = False
        known, live = self._steady, self._transitions.live
        self._put_up_to = 0  # a job with a lower id may wait again
        found = None
        if view is not None and not self._changes and not is_held_up(plan, view):
            found = self._find_next(plan, view, rules)
        if view is None or found is None:
            self.stop()
            return
        group, first = found
        places = {
            job_id: place for job_id in live if (place := self._places.get(job_id)) and place.group == group.number
        }
        ends = turn_ends(group.need, {job_id: place.since for job_id, place in places.items()}, view)
        if not self._may_go_on(group, first, ends, plan, view):
            self.stop()
            return
        brief = sum(1 for job_id in places if view.now < (live[job_id].attempt.started_at or 0.0) + _WITHIN_S)
        if self._put and (known is None or known.group is not group or not brief):
            self.stop()  # no job that ends soon would be followed by them
        elif self._put and (waiting := _waiting(plan, view.lanes[0].lane)) and waiting.job_id < max(self._put):
            self._engines.take_back()  # it comes before them: all are put again, in their order
            begun = self.prefetched()
            self._put = {job_id: job for job_id, job in self._put.items() if job_id in begun}
        likely_s = self._transitions.estimates.estimate_of(first.id).likely_s
        self._steady = _Steady(
            group=group, first=first, view=view, places=brief, likely_s=likely_s,
            until=min(ends.values(), default=math.inf), sample=sample, rules=rules, live=len(live),
        )  # fmt: skip

    def _find_next(self, plan: Plan, view: World, rules: Rules) -> tuple[_Group, Job] | None:
        """Return the first job that waits, and its group. If the last ones are with the keeper: the one before."""
        lane, known = view.lanes[0].lane, self._steady
        if not lane_may_follow(lane):
            return None
        waiting = _waiting(plan, lane)
        first = None if waiting is None else self._store.job(waiting.job_id)
        if first is not None:
            return self._group_for(lane, self._need(view, first), first.spec), first
        return (known.group, known.first) if known is not None and known.rules is rules else None

    def _may_go_on(self, group: _Group, first: Job, turn_ends: Mapping[int, float], plan: Plan, view: World) -> bool:
        """Return whether the keeper may start the next jobs in the places of the group: they wait for nothing but these
        places, and could start in each at its end. If that holds for some of the places only, the group is given up:
        jobs that start later have another one."""
        lane, taken = view.lanes[0].lane, turn_ends.keys()
        running = [run for run in view.running if run.job_id in taken]
        waiting = _waiting(plan, lane)
        reasons: Sequence[Reason] = () if waiting is None else waiting.reasons
        if view.tickets:  # what others wait for is theirs at the end of the turn
            reasons = [each for each in reasons if each.kind is not ReasonKind.AWAITED]
        if not waits_for_places(reasons, {device_id for run in running for device_id in run.device_ids}):
            return False
        need = group.need if waiting is None else self._need(view, first)
        alike = [job_id for job_id, live in self._transitions.live.items() if live.job.spec is group.spec]
        if self._store.that_may_unblock(alike, max(self.prefetched(), default=0)):
            return False
        known = (view.facts_of(each) for each in view.lanes[0].jobs if each.job_id == first.id)
        following = NextJob(job_id=first.id, lane=lane, need=need, facts=next(known, JobFacts()))
        over = {job_id for job_id, end in turn_ends.items() if end <= view.now}
        refused = over | {run.job_id for run in refused_places(view, following, running)}
        if refused and refused != taken:
            self._give_up({group.number})
        return not refused

    def _need(self, view: World, job: Job) -> Need:
        lane = view.lanes[0].lane
        return self._need_of(job.id) if lane.sizes_each else lane.need

    def pause(self) -> None:
        """Put no more until the next plan. The keeper starts what it has, which ends within 0.25 s."""
        self._is_paused = True

    def stop(self) -> None:
        """Put no more, and take back what the keeper has not begun: something else decides what comes next."""
        self._steady = None
        if self._put:
            self._engines.take_back()
            begun = self.prefetched()
            self.has_taken_back = self.has_taken_back or not self._put.keys() <= begun
            self._put = dict.fromkeys(self._put.keys() & begun)  # a request may change them before they are recorded

    def fill(self, now: float) -> None:
        """Give the keeper the next jobs of the lane, if half of them are gone. Call it outside of a transaction."""
        known, prefetched = self._steady, self.prefetched()
        if known is None or self._is_paused or len(prefetched) > (most := known.most(now)) // 2:
            return
        most = most - len(prefetched) if self._put_up_to else most
        jobs = self._store.next_jobs(known.lane.id, most, after=self._put_up_to)
        unblocking = self._store.that_may_unblock([job.id for job in jobs], jobs[-1].id) if jobs else ()
        for job in jobs:
            may_put = job.id not in unblocking and known.takes(job, self._need_of)
            if job.id not in prefetched and not (may_put and self._put_job(job, known.group.number)):
                return
            self._put_up_to = job.id

    def _put_job(self, job: Job, group: int) -> bool:
        try:
            is_put = self._engines.put(follow_launch(job, job.attempts + 1, group))
        except GpuyardError:  # the next plan reports it
            return False
        if is_put:
            self._put[job.id] = job
        return is_put


def _is_same(before: Sample, now: Sample) -> bool:
    """Return whether both are one sample. What was read again since, ten times a second, concerns the guards only."""
    return now is before or (bool(now.reread) and now.snapshot.taken_at == before.snapshot.taken_at)


def _waiting(plan: Plan, lane: Lane) -> WaitingJob | None:
    """Return the first job of the lane that did not start."""
    return next((each for each in plan.waiting if each.lane.id == lane.id), None)
