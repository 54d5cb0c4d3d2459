"""Jobs that end while they are being stopped, and jobs that were being resumed when the daemon was killed."""

from collections.abc import Mapping

import pytest

from gpuyard.control.suspend_jobs import SuspendControl
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind, Started, SuspendedBy
from gpuyard.core.job.lifecycle import JobEvent, JobState
from gpuyard.core.lease import Holder, Lease, Share
from tests.fakes.no_suspender import NoSuspender
from tests.unit.store import QueueDb

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
    queue_db.store.start_attempt(
        Attempt(
            job_id=job_id,
            number=1,
            phase=Started(at=110.0, keeper_pid=9),
            boot_id="b",
            devices=("G0",),
            lease_id=LEASE.id,
        )
    )
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


def test_after_a_crash_no_job_resumes_before_the_ledger_confirms_its_memory(queue_db: QueueDb) -> None:
    transitions, job_id = resuming(queue_db)
    suspender = Suspender()
    suspend_control = SuspendControl(transitions, suspender)
    suspend_control.request()
    assert suspender.resumed == []
    suspend_control.release_leases([LEASE], 131.0)
    suspend_control.request()
    suspend_control.request()
    assert suspender.resumed == [job_id]


def test_after_a_crash_a_job_with_an_empty_lease_is_suspended_again(queue_db: QueueDb) -> None:
    transitions, job_id = resuming(queue_db)
    suspend_control = SuspendControl(transitions, Suspender())
    suspend_control.release_leases([], 131.0)
    assert queue_db.job(job_id).state is JobState.SUSPENDED
