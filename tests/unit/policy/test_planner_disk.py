"""Jobs that write to a nearly full disk wait, and delay no others."""

from typing import Any

from msgspec.structs import replace

from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lease import Need
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from tests.unit.policy.test_planner import kinds_of, queue, started, view, waiting_job

FULL = Reason(ReasonKind.DISK_FULL, "the disk of its output (/data) has 1 MB free < 1 GB", had=1.0, needed=1024.0)
BEING_READ = Reason(ReasonKind.DISK_FULL, "the free space of the disk of its output is being read")


def refused(job_id: int, *others: int, reason: Reason = FULL, **changes: Any) -> LaneQueue:
    """Return a lane of jobs that write to files, of which the first may not."""
    lane = queue(1, Need(), job_id, *others, **{"writes_files": True, **changes})
    jobs = (replace(job, full_disks=(reason,) if job.job_id == job_id else ()) for job in lane.jobs)
    return replace(lane, jobs=jobs)


def test_a_job_that_writes_to_a_full_disk_waits() -> None:
    plan = decide(view(refused(1)))
    assert started(plan) == {}
    assert waiting_job(plan, 1).reasons == (FULL,)


def test_jobs_behind_it_that_write_elsewhere_start() -> None:
    plan = decide(view(refused(1, 2), queue(3, Need()), on=2))
    assert started(plan) == {2: ("G0",), 3: ("G1",)}


def test_jobs_stay_in_order_while_a_disk_is_being_read() -> None:
    assert started(decide(view(refused(1, 2, reason=BEING_READ)))) == {}


def test_the_runs_of_a_batch_stay_in_order() -> None:
    assert started(decide(view(refused(1, 2, pace=BatchPace(), group=1)))) == {}


def test_a_full_disk_of_the_queue_keeps_all_jobs_but_suspended_ones() -> None:
    waiting, suspended = queue(1, Need()), queue(-2, Need(), 2, resumes=True)
    plan = decide(view(waiting, suspended, on=2, closed_reasons=(FULL,)))
    assert started(plan) == {2: ("G0",)}
    assert kinds_of(waiting_job(plan, 1)) == [ReasonKind.DISK_FULL]
