"""Jobs that end while they are being stopped, and jobs that were being resumed when the daemon was killed."""

import contextlib
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from msgspec.structs import replace

from gpuyard.errors import StoreFault
from gpuyard.model.job import Attempt, MemoryLack, Outcome, OutcomeKind, Started, SuspendedBy
from gpuyard.model.job_progress import ProgressReading
from gpuyard.model.lease import Holder, Lease, Share
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.model.machine_snapshot import Host, Sample, Snapshot
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.policy.world import Preempt
from gpuyard.ports import Ended, SuspendResult
from gpuyard.queue.attempt_ends import AttemptEnds, _after_shortage
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.measure_usage import ProgressTracker
from gpuyard.queue.step_parts import QueueParts
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions
from tests.fakes.no_suspender import NoSuspender
from tests.simulation.simulated_daemon import RULES
from tests.unit.policy.test_placement import GB, card
from tests.unit.store import QueueDb, attempt_of

SUCCEEDED = Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
LEASE = Lease(id="a", holder=Holder(uid=0, user="me", pid=1), shares=(Share(device_id="G0"),), since=100.0)


class Suspender(NoSuspender):
    """Records the jobs that it was asked to resume."""

    def __init__(self) -> None:
        self.resumed: list[int] = []

    def resume(self, attempt: Attempt, needs_mb: Mapping[str, float]) -> None:
        self.resumed.append(attempt.job_id)


def running(queue_db: QueueDb) -> tuple[JobTransitions, int]:
    """Return a running job, and the transitions of a daemon that has just started."""
    (job_id,) = queue_db.add()
    queue_db.store.start_attempt(attempt_of(job_id, 110.0, devices=("G0",), lease_id=LEASE.id))
    transitions = JobTransitions(queue_db.store)
    transitions.reload()
    return transitions, job_id


@pytest.mark.parametrize(
    ("stopping", "state"),
    [
        (OutcomeKind.PREEMPTED, JobState.SUCCEEDED),
        (OutcomeKind.CANCELLED, JobState.CANCELLED),
        (OutcomeKind.TIMED_OUT, JobState.FAILED),
    ],
)
def test_a_job_that_succeeds_while_it_is_stopped_is_done_only_if_it_was_preempted(
    queue_db: QueueDb, stopping: OutcomeKind, state: JobState
) -> None:
    transitions, job_id = running(queue_db)
    transitions.stop(job_id, stopping, 120.0)
    transitions.end(job_id, SUCCEEDED, 121.0)
    assert queue_db.job(job_id).state is state


def resuming(queue_db: QueueDb) -> tuple[JobTransitions, int]:
    """Return a job that a daemon was resuming when it was killed, and the transitions of the next daemon."""
    transitions, job_id = running(queue_db)
    transitions.suspend(job_id, SuspendedBy.FOR_ROOM, 120.0, "preempted")
    transitions.move_suspension(job_id, JobEvent.MOVED_OUT, 121.0)
    transitions.move_suspension(job_id, JobEvent.RESUME, 130.0)
    after = JobTransitions(queue_db.store)
    after.reload()
    return after, job_id


def test_after_a_crash_a_job_resumes_when_the_ledger_confirms_its_memory_or_is_suspended(queue_db: QueueDb) -> None:
    transitions, job_id = resuming(queue_db)
    suspender = Suspender()
    suspend_control = SuspendControl(transitions, suspender)
    suspend_control.request()
    assert suspender.resumed == []
    suspend_control.release_leases([LEASE], 131.0)
    suspend_control.request()
    suspend_control.request()
    assert suspender.resumed == [job_id]
    transitions, job_id = resuming(queue_db)
    suspend_control = SuspendControl(transitions, Suspender())
    suspend_control.release_leases([], 131.0)
    assert queue_db.job(job_id).state is JobState.SUSPENDED


def ends_of(
    transitions: JobTransitions, found: list[Ended], progress: ProgressTracker, asked: list[bool] | None = None
) -> AttemptEnds:
    """Return the ends of an engine that reports `found`, once. `asked` gets whether ends were not recorded then."""

    def ended(_: Any, *, has_unrecorded: bool) -> list[Ended]:
        if asked is not None:
            asked.append(has_unrecorded)
        taken = found.copy()
        found.clear()
        return taken

    parts = SimpleNamespace(
        transitions=transitions, engines=SimpleNamespace(ended=ended),
        cluster_dispatch=SimpleNamespace(verdict=lambda *_: None), leases=SimpleNamespace(health_marks=lambda: ()),
        usage_tracker=SimpleNamespace(last=None), progress_tracker=progress, me=SimpleNamespace(boot_id="b"),
    )  # fmt: skip
    return AttemptEnds(cast("QueueParts", parts))


def test_an_end_is_recorded_with_what_its_attempt_wrote_last(queue_db: QueueDb) -> None:
    transitions, job_id = running(queue_db)
    progress = ProgressTracker(transitions)
    progress.read_rest = lambda _: False
    ends = ends_of(transitions, [Ended(job_id=job_id, attempt=1, outcome=SUCCEEDED, at=120.0)], progress)
    for _ in range(2):
        ends.collect(121.0)
        ends.record(121.0)
        ends.forget_recorded()
        assert queue_db.job(job_id).state is JobState.RUNNING
    progress.note_rest((job_id, 1), ProgressReading(figures=[[("val/acc", 0.5)]]))
    ends.record(122.0)
    [attempt] = queue_db.store.attempts(job_id)
    assert queue_db.job(job_id).state is JobState.SUCCEEDED
    assert attempt.ended_at == 120.0
    assert attempt.usage is not None
    assert attempt.usage.progress is not None
    assert attempt.usage.progress.figures["val/acc"].last == 0.5


def test_what_an_attempt_wrote_last_outlasts_a_step_that_fails(queue_db: QueueDb) -> None:
    transitions, job_id = running(queue_db)
    progress = ProgressTracker(transitions)

    def read_at_once(attempt: Attempt) -> bool:
        progress.note_rest((attempt.job_id, attempt.number), ProgressReading(figures=[[("loss", 2.0)]]))
        return True

    progress.read_rest = read_at_once
    ends = ends_of(transitions, [Ended(job_id=job_id, attempt=1, outcome=SUCCEEDED, at=120.0)], progress)
    for is_full in (True, False):
        ends.collect(121.0)
        with contextlib.suppress(StoreFault), transitions.in_step(), queue_db.store.transaction():
            ends.record(121.0)
            if is_full:
                raise StoreFault("the disk is full")
    [attempt] = queue_db.store.attempts(job_id)
    assert attempt.usage is not None
    assert attempt.usage.progress is not None
    assert attempt.usage.progress.figures["loss"].last == 2.0


def test_while_an_end_is_not_recorded_the_engine_keeps_it_and_reports_others(queue_db: QueueDb) -> None:
    transitions, job_id = running(queue_db)
    progress = ProgressTracker(transitions)
    progress.read_rest = lambda _: False
    asked: list[bool] = []
    ends = ends_of(transitions, [Ended(job_id=job_id, attempt=1, outcome=SUCCEEDED, at=120.0)], progress, asked)
    for _ in range(3):
        ends.collect(121.0)
        ends.record(121.0)
        ends.forget_recorded()
        if len(asked) == 2:
            progress.note_rest((job_id, 1), None)
            ends.record(121.0)
            ends.forget_recorded()
    assert asked == [False, True, False]


def test_a_lease_that_another_attempt_has_has_not_ended(queue_db: QueueDb) -> None:
    transitions, first = running(queue_db)
    others = queue_db.add(2)
    found: list[Ended] = []
    ends = ends_of(transitions, found, ProgressTracker(transitions))
    has_ended = []
    for job_id, following in zip((first, *others), (*others, None), strict=True):
        if following is not None:
            attempt = replace(transitions.live[job_id].attempt, job_id=following)
            transitions.start(queue_db.job(following), attempt)
        found[:] = [Ended(job_id=job_id, attempt=1, outcome=SUCCEEDED, at=120.0)]
        ends.collect(121.0)
        has_ended.append(ends.record(121.0))
        ends.forget_recorded()
    assert has_ended == [False, False, True]
    assert not transitions.live


class LimitedSuspender(Suspender):
    """Could start no process for the last request."""

    def __init__(self, *, may_pass: bool) -> None:
        super().__init__()
        self.may_pass = may_pass

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        return None

    def can_park(self, attempt: Attempt) -> bool:
        return False

    def moved(self) -> list[SuspendResult]:
        return [
            SuspendResult(
                job_id=1, attempt=1, is_resumed=False, is_done=False, may_pass=self.may_pass, text="no process"
            )
        ]


@pytest.mark.parametrize(("may_pass", "state"), [(True, JobState.SUSPENDING), (False, JobState.STOPPING)])
def test_no_victim_is_stopped_because_of_a_passing_limit(queue_db: QueueDb, state: JobState, *, may_pass: bool) -> None:
    transitions, job_id = running(queue_db)
    control = SuspendControl(transitions, LimitedSuspender(may_pass=may_pass))
    transitions.suspend(job_id, SuspendedBy.FOR_ROOM, 120.0, "preempted")
    control.collect()
    control.record(121.0)
    assert queue_db.job(job_id).state is JobState.RUNNING
    sample = Sample(snapshot=Snapshot(taken_at=None, host=Host()))
    control.preempt([Preempt(job_id=job_id, for_job=9)], sample, RULES, 1000.0)
    assert queue_db.job(job_id).state is state


def test_a_failed_step_is_undone_even_if_the_disk_cannot_be_read(
    queue_db: QueueDb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of the job would be lost: it is no longer live in memory, and not ended in the store."""
    transitions, job_id = running(queue_db)

    def fail(*_: object) -> NoReturn:
        raise sqlite3.OperationalError("disk I/O error")

    def end_and_fail() -> None:
        with transitions.in_step(), queue_db.store.transaction():
            transitions.end(job_id, SUCCEEDED, 121.0)
            fail()

    with monkeypatch.context() as patched:
        patched.setattr(queue_db.store, "live_attempts", fail)
        with pytest.raises(StoreFault):
            end_and_fail()
        with pytest.raises(sqlite3.OperationalError), transitions.in_step():
            pytest.fail("a step went on with what a failed one had left in memory")
    with transitions.in_step(), queue_db.store.transaction():
        assert job_id in transitions.live
        transitions.end(job_id, SUCCEEDED, 121.0)
    assert queue_db.job(job_id).state is JobState.SUCCEEDED


@pytest.mark.parametrize(("fault", "is_retried"), [(None, False), ("fell off the bus", True)])
def test_a_job_too_large_for_the_healthy_gpus_is_not_given_up_while_another_has_a_fault(
    queue_db: QueueDb, tmp_path: Path, fault: str | None, is_retried: bool
) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (job_id,) = queue_db.add(command=("python", "train.py"), cwd=str(tmp_path))
    attempt = Attempt(job_id=job_id, number=1, phase=Started(at=110.0), devices=("G0",), reserved_mb=4096.0)
    lack = MemoryLack(shortage=Shortage(where=ShortageKind.DEVICE, says="out of memory", asked_mb=31 * GB))
    cards = (card(0), card(1, fault=fault))
    sample = Sample(snapshot=Snapshot(taken_at=0.0, host=Host(), devices=cards))
    _, verdict = _after_shortage(Live(job=queue_db.job(job_id), attempt=attempt), lack, 1, sample)
    assert verdict.event is (JobEvent.RETRY if is_retried else JobEvent.FAIL)
