"""What starts take along, when it is recorded and when it is taken back."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Outcome, OutcomeKind, Started, SuspendedBy
from gpuyard.model.lease import Claim
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.world import Plan, Start
from gpuyard.ports import Prepared, SiteStatus
from gpuyard.queue.engine_set import EngineSet
from gpuyard.queue.launch_jobs import Slices, upcoming
from gpuyard.queue.transitions import JobTransitions
from tests.unit.policy.test_planner import CPU, queue, view
from tests.unit.store import QueueDb

NOW = 200.0
SHORT_S = 0.01
SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
NEVER_STARTED = Outcome(kind=OutcomeKind.NEVER_STARTED)


class Engines:
    def __init__(self) -> None:
        self.withdrawn: list[int] = []
        self.has_begun: list[int] = []

    def withdraw(self, attempts: list[Attempt]) -> None:
        self.withdrawn += [each.job_id for each in attempts]

    def begun(self) -> list[SiteStatus]:
        begun, self.has_begun = self.has_begun, []
        return [SiteStatus(job_id=each, attempt=1, site_id="", at=NOW + 0.5, keeper_pid=7) for each in begun]


class ShortJobs:
    """A queue of jobs of 10 ms, of which one has run."""

    def __init__(self, queue_db: QueueDb, count: int = 500, **fields: Any) -> None:
        self.transitions, self.engines = JobTransitions(queue_db.store), Engines()
        self.slices = Slices(self.transitions, cast("EngineSet", self.engines), lambda _: CPU)
        self.db = queue_db
        before, *self.queued = queue_db.add(count + 1, need=CPU, command=("true",), **fields)
        self.start(before, NOW - 1)
        self.transitions.end(before, SUCCEEDED, NOW - 1 + SHORT_S)

    def start(self, job_id: int, at: float = NOW) -> Attempt:
        attempt = Attempt(job_id=job_id, number=1, phase=Started(at=at, keeper_pid=7), boot_id="b")
        self.transitions.start(self.db.job(job_id), attempt)
        return attempt

    def taken_along(self, *job_ids: int) -> dict[int, list[int]]:
        """Return what these starts of one plan take along."""
        lane = self.db.store.lane_of(job_ids[0])
        starts = tuple(Start(job_id=each, lane=lane, claim=Claim(shares=()), need=CPU) for each in job_ids)
        taken = self.slices.taken_along(Plan(starts=starts), view(queue(lane.id, CPU, 1)))
        return {first: [job.id for job in jobs] for first, jobs in taken.items() if jobs}

    def start_slice(self, first: int, *rest: int) -> None:
        attempt = self.start(first)
        prepared = [Prepared(job_id=each, attempt=1, keeper_pid=7, log=f"{each}.log") for each in rest]
        for each in prepared:
            self.transitions.start(self.db.job(each.job_id), upcoming(attempt, each))
        self.slices.note(Prepared(job_id=first, attempt=1, log="", rest=tuple(prepared)), NOW)

    def step(self, *begun: int, at: float = NOW + 0.6) -> None:
        self.engines.has_begun += begun
        self.slices.collect()
        self.slices.record(at)
        self.transitions.store_begun()
        self.slices.forget_recorded()
        self.slices.take_back(at)


@pytest.fixture
def jobs(queue_db: QueueDb) -> ShortJobs:
    return ShortJobs(queue_db)


def test_only_equal_jobs_are_taken_along_in_turns_and_none_during_a_request(jobs: ShortJobs) -> None:
    first, second, *others = jobs.queued
    taken = jobs.taken_along(first, second)
    assert taken == {first: others[:96:2], second: others[1:96:2]}
    jobs.slices.begin_change()
    assert jobs.taken_along(jobs.queued[0]) == {}
    jobs.slices.end_change()
    assert jobs.taken_along(jobs.queued[0])
    others = jobs.db.add(5, need=CPU, command=("true",))
    assert jobs.taken_along(jobs.queued[-3]) == {jobs.queued[-3]: jobs.queued[-2:]}
    assert jobs.taken_along(others[0]) == {others[0]: others[1:]}, "of the same command, in another submission"
    others = jobs.db.add(5, need=CPU, command=("true",), filled_variables=("A",))
    assert jobs.taken_along(others[0]) == {}


def test_jobs_are_pending_until_their_turn_and_run_from_when_it_came(jobs: ShortJobs) -> None:
    jobs.start_slice(*jobs.queued[:3])
    states = [jobs.db.job(each).state for each in jobs.queued[:3]]
    assert states == [JobState.RUNNING, JobState.PENDING, JobState.PENDING]
    jobs.step(jobs.queued[1])
    second = jobs.db.job(jobs.queued[1])
    assert (second.state, second.started_at) == (JobState.RUNNING, NOW + 0.5)
    assert jobs.db.store.attempts(second.id)[0].keeper_pid == 7
    assert set(jobs.transitions.upcoming) == {jobs.queued[2]}
    jobs.transitions.reload()
    assert set(jobs.transitions.upcoming) == {jobs.queued[2]}
    assert set(jobs.transitions.live) == set(jobs.queued[:2])


def test_a_job_that_begins_and_ends_in_one_step_has_both_times(jobs: ShortJobs) -> None:
    first, second = jobs.queued[:2]
    jobs.start_slice(first, second)
    jobs.engines.has_begun.append(second)
    jobs.slices.collect()
    jobs.slices.record(NOW + 0.6)
    jobs.transitions.end(second, SUCCEEDED, NOW + 0.55, pid=11)
    jobs.transitions.store_begun()
    job, (attempt,) = jobs.db.job(second), jobs.db.store.attempts(second)
    assert (job.state, job.started_at, job.ended_at) == (JobState.SUCCEEDED, NOW + 0.5, NOW + 0.55)
    assert (attempt.started_at, attempt.ended_at, attempt.pid) == (NOW + 0.5, NOW + 0.55, 11)


def test_what_was_taken_back_waits_as_before(jobs: ShortJobs) -> None:
    first, second = jobs.queued[:2]
    before = jobs.db.job(second)
    jobs.start_slice(first, second)
    jobs.transitions.end(second, NEVER_STARTED, NOW + 0.1)
    assert replace(jobs.db.job(second), outcome=None) == before
    assert jobs.db.store.attempts(second) == []


def test_a_request_takes_back_what_has_not_begun(jobs: ShortJobs) -> None:
    jobs.start_slice(*jobs.queued[:4])
    jobs.step(jobs.queued[1])
    jobs.slices.begin_change()
    assert jobs.engines.withdrawn == jobs.queued[2:4]


def test_a_slice_is_taken_back_when_it_has_lasted_for_a_second(jobs: ShortJobs) -> None:
    jobs.start_slice(*jobs.queued[:3])
    assert jobs.slices.wake_at() == NOW + 1.0
    jobs.step(at=NOW + 0.9)
    assert jobs.engines.withdrawn == []
    jobs.step(at=NOW + 1.0)
    assert jobs.engines.withdrawn == jobs.queued[1:3]
    assert jobs.slices.wake_at() is None


@pytest.mark.parametrize(
    "act",
    [
        lambda jobs, first: jobs.transitions.stop(first, OutcomeKind.CANCELLED, NOW),
        lambda jobs, first: jobs.transitions.suspend(first, SuspendedBy.BY_PERSON, NOW, "by hand"),
    ],
    ids=["stopped", "suspended"],
)
def test_no_job_follows_a_stopped_or_suspended_one(jobs: ShortJobs, act: Callable[[ShortJobs, int], None]) -> None:
    first = jobs.queued[0]
    jobs.start_slice(first, *jobs.queued[1:3])
    act(jobs, first)
    jobs.step(at=NOW + 0.1)
    assert jobs.engines.withdrawn == jobs.queued[1:3]


def test_a_slice_that_has_run_is_forgotten(jobs: ShortJobs) -> None:
    jobs.start_slice(*jobs.queued[:2])
    jobs.step(jobs.queued[1])
    assert jobs.slices.wake_at() is None
