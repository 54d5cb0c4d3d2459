"""Jobs that a limit of the system keeps from starting: they wait as before, one is tried at a time, all go on."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.model.job import Attempt, Outcome, OutcomeKind
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.disk_and_system_limits import ResourceLimit
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.ports import Ended, IsCutOff, Launch, PlacesNothing, Prepared
from tests.unit.queue.test_cluster_dispatch import QueueUnderTest

LIMIT = ResourceLimit(text="no program can be started: Resource temporarily unavailable", remedy="end some processes")
OWN = ResourceLimit(text="its program cannot be read: Input/output error", is_own=True)
COUNT = 20


class LimitedEngine(PlacesNothing):
    """Refuses every start while it has a `limit`, or in `prepare` while it has a `fault`. `tries` counts the starts."""

    def __init__(self) -> None:
        self.limit: ResourceLimit | None = None
        self.limited_jobs: set[int] | None = None  # only these, if set
        self.fault: EnvironmentFault | None = None
        self.tries = 0
        self.running: set[int] = set()
        self._prepared: list[Launch] = []
        self._ends: list[Ended] = []

    def prepare(self, launch: Launch, lease_descriptor: int | None) -> Prepared:
        if self.fault is not None:
            self.tries += 1
            raise self.fault
        self._prepared.append(launch)
        return Prepared(job_id=launch.job_id, attempt=launch.attempt, keeper_pid=9, log="/log")

    def start_prepared(self) -> None:
        for launch in self._prepared:
            self.tries += 1
            if self.limit is not None and (self.limited_jobs is None or launch.job_id in self.limited_jobs):
                outcome = Outcome(kind=OutcomeKind.NEVER_STARTED, reason=self.limit.text)
                self._ends.append(
                    Ended(job_id=launch.job_id, attempt=launch.attempt, outcome=outcome, limit=self.limit)
                )
            else:
                self.running.add(launch.job_id)
        self._prepared.clear()

    def discard_prepared(self) -> None:
        self._prepared.clear()

    def adopt(self, attempts: Sequence[Attempt]) -> None: ...

    def ended(self, is_cut_off: IsCutOff | None = None, *, has_unrecorded: bool = False) -> list[Ended]:
        ends, self._ends = self._ends, []
        return ends

    @property
    def has_ends(self) -> bool:
        return bool(self._ends)

    def signal(self, attempt: Attempt, signum: int) -> int:
        return 1


class LimitedQueue(QueueUnderTest):
    def __init__(self) -> None:
        super().__init__()
        self.local = LimitedEngine()
        self.daemon.controller.engines._local = self.local

    def submit(self, *command: str, **options: Any) -> int:
        return super().submit(*command, **{"engine": "local", "gpus": "1", "vram": "16M", **options})

    def run_until(self, at: float) -> None:
        """Step whenever a step is due."""
        while True:
            step = self.step()
            if self.local.has_ends:
                continue
            if step.wake_at is None or step.wake_at > at:
                break
            self.world.advance(max(step.wake_at, self.world.now + 0.001))
        self.world.advance(at)

    def states(self) -> set[JobState]:
        return {self.job(job_id).state for job_id in range(1, COUNT + 1)}

    def notices(self) -> list[str]:
        return self.daemon.controller.start_pauses.notices()


@pytest.fixture
def queue() -> Iterator[LimitedQueue]:
    queue = LimitedQueue()
    yield queue
    queue.database.close()


def test_jobs_that_did_not_begin_wait_and_no_attempt_is_used_up(queue: LimitedQueue) -> None:
    queue.local.limit = LIMIT
    queue.submit("train", array=f"1-{COUNT}")
    queued_at = queue.job(COUNT).queued_at
    queue.run_until(queue.world.now + 0.5)
    assert queue.states() == {JobState.QUEUED}
    last = queue.job(COUNT)
    assert (last.attempts, last.failures, last.queued_at, last.reason) == (0, 0, queued_at, None)
    assert queue.why(1) == [(ReasonKind.RESOURCE_LIMIT, f"{LIMIT.text}; next try within 1 s")]
    assert queue.notices() == [f"jobs wait: {LIMIT.text} ({LIMIT.remedy})"]


def test_one_job_at_most_is_tried_after_each_delay(queue: LimitedQueue) -> None:
    queue.local.limit = LIMIT
    queue.submit("train", array=f"1-{COUNT}")
    queue.run_until(queue.world.now + 0.5)
    first = queue.local.tries
    queue.run_until(queue.world.now + 60.0)  # after 1, 2, 4, 8, 16 and 30 s
    assert queue.local.tries - first <= 6
    assert queue.local.tries > first
    assert queue.states() <= {JobState.QUEUED, JobState.DELAYED}


def test_all_jobs_start_by_themselves_when_the_limit_has_passed(queue: LimitedQueue) -> None:
    queue.local.limit = LIMIT
    queue.submit("train", array=f"1-{COUNT}")
    queue.run_until(queue.world.now + 20.0)
    queue.local.limit = None
    queue.run_until(queue.world.now + 65.0)
    assert queue.states() == {JobState.RUNNING}
    assert [queue.job(job_id).attempts for job_id in range(1, COUNT + 1)] == [1] * COUNT
    assert queue.notices() == []


def test_a_fault_of_the_engine_holds_starts_back_in_the_same_way(queue: LimitedQueue) -> None:
    queue.local.fault = EnvironmentFault("the keeper of jobs cannot be started", hint="ulimit -u")
    queue.submit("train", array=f"1-{COUNT}")
    queue.run_until(queue.world.now + 60.0)
    assert queue.local.tries <= 8
    assert queue.notices() == ["jobs wait: the keeper of jobs cannot be started (ulimit -u)"]
    assert queue.states() == {JobState.QUEUED}
    queue.local.fault = None
    queue.run_until(queue.world.now + 65.0)
    assert queue.states() == {JobState.RUNNING}


def test_a_job_whose_own_files_cannot_be_read_delays_no_other(queue: LimitedQueue) -> None:
    queue.local.limit, queue.local.limited_jobs = OWN, {1}
    queue.submit("train", array=f"1-{COUNT}")
    queue.run_until(queue.world.now + 0.5)
    assert queue.job(1).state is JobState.DELAYED
    assert OWN.text in str(queue.job(1).reason)
    assert {queue.job(job_id).state for job_id in range(2, COUNT + 1)} == {JobState.RUNNING}
    queue.local.limit = None
    queue.run_until(queue.world.now + 31.0)
    assert (queue.job(1).state, queue.job(1).failures, queue.job(1).attempts) == (JobState.RUNNING, 0, 1)


def test_a_job_that_always_meets_a_limit_does_not_stop_the_others_for_good(queue: LimitedQueue) -> None:
    queue.local.limit, queue.local.limited_jobs = LIMIT, {1}
    queue.submit("train", array=f"1-{COUNT}")
    queue.run_until(queue.world.now + 120.0)
    assert {queue.job(job_id).state for job_id in range(2, COUNT + 1)} == {JobState.RUNNING}
    assert queue.job(1).state in (JobState.DELAYED, JobState.QUEUED)


def test_the_notice_goes_when_no_job_waits_any_more(queue: LimitedQueue) -> None:
    queue.local.limit = LIMIT
    queue.submit("train")
    queue.run_until(queue.world.now + 0.5)
    assert queue.notices()
    queue.daemon.requests.cancel(queue.job(1), queue.world.now)
    queue.run_until(queue.world.now + 40.0)
    assert queue.notices() == []
