"""The time in which the machine is suspended is not run time: it extends limits, once, also over a restart."""

import pytest

from gpuyard.model.job import Attempt, HandedOver, OutcomeKind, Started, SuspendedBy
from gpuyard.queue.stop_signals import MachineSleep
from gpuyard.queue.transitions import JobTransitions
from tests.unit.store import QueueDb


def started(queue_db: QueueDb, *, engine: str = "", stop_at: float | None = 700.0) -> tuple[JobTransitions, int]:
    (job_id,) = queue_db.add()
    phase = Started(at=100.0, keeper_pid=9) if not engine else HandedOver(at=100.0)
    queue_db.store.start_attempt(
        Attempt(job_id=job_id, number=1, phase=phase, boot_id="b", stop_at=stop_at, engine=engine)
    )
    transitions = JobTransitions(queue_db.store)
    transitions.reload()
    return transitions, job_id


def record(transitions: JobTransitions, asleep: float, boot_id: str | None = "b", now: float = 4000.0) -> None:
    with transitions.store.transaction():
        MachineSleep(transitions, boot_id).record(asleep, now)


def test_a_sleep_extends_the_limit_and_is_not_run_time(queue_db: QueueDb) -> None:
    transitions, job_id = started(queue_db)
    record(transitions, 50.0)
    record(transitions, 3650.0)
    (stored,) = queue_db.store.attempts(job_id)
    for attempt in (transitions.live[job_id].attempt, stored):
        assert attempt.stop_at == pytest.approx(4300.0)
        assert attempt.ran_s(4000.0) == pytest.approx(300.0)
    ((at, kind, text),) = queue_db.queries.events(job_id)
    assert (at, kind) == (4000.0, "asleep")
    assert "1h" in str(text)


def test_a_sleep_counts_once_also_after_a_restart_of_the_daemon(queue_db: QueueDb) -> None:
    transitions, job_id = started(queue_db)
    record(transitions, 50.0)
    record(transitions, 3650.0)
    after = JobTransitions(queue_db.store)
    after.reload()
    record(after, 3650.2)
    record(after, 3650.4)
    assert after.live[job_id].attempt.stop_at == pytest.approx(4300.0)
    record(after, 3750.0)
    assert after.live[job_id].attempt.stop_at == pytest.approx(4400.0)


def test_a_sleep_extends_the_grace_period_of_a_job_that_is_being_stopped(queue_db: QueueDb) -> None:
    transitions, job_id = started(queue_db)
    record(transitions, 0.0)
    transitions.stop(job_id, OutcomeKind.CANCELLED, 200.0)
    before = transitions.live[job_id].attempt.kill_at
    assert before is not None
    record(transitions, 100.0)
    assert transitions.live[job_id].attempt.kill_at == pytest.approx(before + 100.0)


@pytest.mark.parametrize("boot_id", ["another", None])
def test_the_sleep_of_another_or_an_unknown_boot_is_not_compared(queue_db: QueueDb, boot_id: str | None) -> None:
    transitions, job_id = started(queue_db)
    record(transitions, 50.0)
    record(transitions, 3650.0, boot_id)
    record(transitions, 9650.0, boot_id=None)
    assert transitions.live[job_id].attempt.stop_at == 700.0


def test_a_sleep_of_this_machine_changes_nothing_for_a_job_elsewhere_or_a_suspended_one(queue_db: QueueDb) -> None:
    _elsewhere, first = started(queue_db, engine="slurm", stop_at=None)
    transitions, second = started(queue_db)
    transitions.suspend(second, SuspendedBy.BY_PERSON, 150.0, "by hand")
    record(transitions, 0.0)
    record(transitions, 500.0)
    assert transitions.live[first].attempt.suspended_s == 0.0
    assert transitions.live[second].attempt.suspended_s == 0.0
    assert transitions.live[second].attempt.ran_s(1000.0) == pytest.approx(50.0)
