"""The host guard over a store: what it records, and when a stopping job is killed. The machine has 24 GB of RAM."""

from typing import Any

import pytest

from gpuyard.config import HostConfig
from gpuyard.model.job import Attempt, Growth, Outcome, OutcomeKind, Started
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Host, Sample, Snapshot
from gpuyard.policy.memory_guards import HostProgram
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.guard_memory import HostGuard
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb

GB = 1024.0
TOTAL = 24 * GB
RULES = Rules(limits=SchedulingLimits(cpu_jobs=1))


class Guarded:
    """The guard of a queue whose jobs began at 101, 102, … and hold what each reading says."""

    def __init__(self, queue_db: QueueDb, rules: Rules = RULES) -> None:
        self.programs: list[HostProgram] = []
        self.queue_db = queue_db
        self.transitions = JobTransitions(queue_db.store)
        self.guard = HostGuard(self.transitions, lambda _: self.programs)
        self.rules = rules
        self.numbers: dict[int, int] = {}

    def start(self, **spec: Any) -> int:
        (job_id,) = self.queue_db.add(need=Need(devices=0), **spec)
        self.start_again(job_id, 100.0 + job_id)
        return job_id

    def start_again(self, job_id: int, at: float) -> None:
        number = self.numbers[job_id] = self.numbers.get(job_id, 0) + 1
        with self.queue_db.store.transaction():
            job = self.queue_db.job(job_id)
            phase = Started(at=at, keeper_pid=9)
            self.transitions.start(job, Attempt(job_id=job_id, number=number, phase=phase, boot_id="b"))

    def end(self, job_id: int, at: float) -> None:
        with self.queue_db.store.transaction():
            self.transitions.end(job_id, Outcome(kind=OutcomeKind.FAILED, status=143), at)

    def read(self, at: float, available_gb: float | None, **held_gb: float) -> bool:
        """Take a reading, with what `job1`, `job2`, … hold, and do a step if the guard asks for one."""
        held = {int(name.removeprefix("job")): gb * GB for name, gb in held_gb.items()}
        available = None if available_gb is None else available_gb * GB
        host = Host(memory_total_mb=TOTAL, memory_available_mb=available)
        ram_mb = {(job_id, self.numbers[job_id]): mb for job_id, mb in held.items()}
        acts = self.guard.note(Sample(snapshot=Snapshot(taken_at=at, host=host), ram_mb=ram_mb), self.rules, at)
        if acts:
            with self.queue_db.store.transaction():
                self.guard.act(at)
        return acts

    def state(self, job_id: int) -> JobState:
        return self.queue_db.job(job_id).state


@pytest.fixture
def guarded(queue_db: QueueDb) -> Guarded:
    return Guarded(queue_db)


def test_the_youngest_is_queued_again_with_a_need_of_what_it_held(guarded: Guarded) -> None:
    first, second = guarded.start(), guarded.start()
    assert not guarded.read(110.0, 4.0, job1=8.0, job2=8.0)
    assert guarded.read(110.5, 1.5, job1=8.0, job2=10.0)
    assert (guarded.state(first), guarded.state(second)) == (JobState.RUNNING, JobState.STOPPING)
    growth = guarded.queue_db.job(second).growth
    assert growth == Growth(count=0, ram_mb=10 * 1.25 * GB)
    assert not guarded.read(110.6, 1.5, job1=8.0, job2=10.0), "its RAM will be free soon"
    guarded.end(second, 111.0)
    job = guarded.queue_db.job(second)
    assert (job.state, job.failures) == (JobState.QUEUED, 0)
    assert job.outcome is not None
    assert job.outcome.kind is OutcomeKind.HOST_GUARD
    why = "the machine had 1.5 GB of RAM left of the 2 GB to keep; it was the youngest job with notable RAM, and held"
    assert (job.reason or "").startswith(f"{why} 10 GB; it starts again when 14.5 GB are available; queued again")


def test_a_single_job_makes_way_for_an_older_script(guarded: Guarded) -> None:
    only = guarded.start()
    assert not guarded.read(110.0, 0.9, job1=8.0)
    guarded.programs = [HostProgram(since=50.0, held_mb=6 * GB)]
    assert guarded.read(110.5, 0.8, job1=8.0)
    assert guarded.state(only) is JobState.STOPPING


def test_a_floor_near_what_is_available_is_kept_while_jobs_grow(queue_db: QueueDb) -> None:
    guarded = Guarded(queue_db, Rules(limits=SchedulingLimits(cpu_jobs=1), host=HostConfig(keep_free="20G")))
    first, second = guarded.start(), guarded.start()
    assert not guarded.read(110.0, 20.1, job1=0.4, job2=0.3)
    assert not guarded.read(110.2, 19.95, job1=0.4, job2=0.3), "none of them grows"
    assert guarded.read(110.5, 19.9, job1=0.4, job2=0.4)
    assert (guarded.state(first), guarded.state(second)) == (JobState.RUNNING, JobState.STOPPING)


def test_nothing_starts_below_the_floor_until_it_has_been_free_for_a_while(guarded: Guarded) -> None:
    guarded.start()
    guarded.read(110.0, 1.9, job1=1.0)
    (reason,) = guarded.guard.closed_reasons()
    assert (reason.had, reason.needed) == (1.9 * GB, 2 * GB)
    guarded.read(111.0, 9.0, job1=1.0)
    assert any(guarded.guard.closed_reasons())
    guarded.read(116.5, 9.0, job1=1.0)
    assert not any(guarded.guard.closed_reasons())


def test_a_program_that_succeeds_while_it_is_asked_to_stop_has_succeeded(guarded: Guarded) -> None:
    guarded.start()
    second = guarded.start()
    guarded.read(110.0, 0.9, job1=8.0, job2=8.0)
    with guarded.queue_db.store.transaction():
        guarded.transitions.end(second, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 111.0)
    assert guarded.state(second) is JobState.SUCCEEDED


def test_a_stopping_job_is_killed_once_when_nearly_nothing_is_left(guarded: Guarded) -> None:
    guarded.start()
    second = guarded.start(grace_s=10.0)
    guarded.read(110.0, 0.9, job1=8.0, job2=8.0)
    assert guarded.transitions.live[second].attempt.kill_at == 120.0
    assert guarded.read(110.1, 0.3, job1=8.0, job2=8.6)
    assert guarded.transitions.live[second].attempt.kill_at == 110.1
    assert not guarded.read(110.2, 0.3, job1=8.0, job2=8.6)


def test_a_job_makes_way_three_times_at_most(guarded: Guarded) -> None:
    guarded.start()
    second = guarded.start()
    for at in (110.0, 120.0, 130.0):
        assert guarded.read(at, 0.9, job1=8.0, job2=8.0)
        assert guarded.state(second) is JobState.STOPPING
        guarded.end(second, at + 1.0)
        guarded.start_again(second, at + 2.0)
    guarded.read(140.0, 0.9, job1=8.0, job2=8.0)
    assert guarded.state(second) is JobState.RUNNING
    assert not guarded.read(141.0, 0.9, job1=8.0, job2=8.0), "it is not considered at each reading"


def test_a_job_that_is_never_preempted_is_left_alone(guarded: Guarded) -> None:
    guarded.start()
    second = guarded.start(on_preempt=OnPreempt.NEVER)
    assert not guarded.read(110.0, 0.9, job1=8.0, job2=8.0)
    assert guarded.state(second) is JobState.RUNNING


def test_unknown_ram_and_a_floor_of_zero_turn_the_guard_off(queue_db: QueueDb) -> None:
    off = Guarded(queue_db, Rules(limits=SchedulingLimits(cpu_jobs=1), host=HostConfig(keep_free="0")))
    off.start()
    off.start()
    assert not off.read(110.0, 0.1, job1=8.0, job2=8.0)
    off.rules = RULES
    assert not off.read(111.0, None, job1=8.0, job2=8.0)
    assert off.guard.watch_every_s is None


def test_ram_is_watched_only_while_jobs_run(guarded: Guarded) -> None:
    guarded.read(110.0, 3.0)
    idle = guarded.guard.watch_every_s
    guarded.start()
    guarded.read(111.0, 3.0, job1=1.0)
    assert (idle, guarded.guard.watch_every_s) == (None, 0.125)
