"""Jobs that write to a nearly full disk wait, and delay no others."""

from typing import Any

from gpuyard.core.job.job_spec import BatchPace
from gpuyard.core.lease import Need
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from tests.unit.core.scheduling.test_planner import kinds_of, queue, started, view, waiting_job

FULL = Reason(ReasonKind.DISK_FULL, "the disk of its output (/data) has 1 MB free < 1 GB", had=1.0, needed=1024.0)
BEING_READ = Reason(ReasonKind.DISK_FULL, "the free space of the disk of its output is being read")


def refuse(*jobs: int) -> dict[str, Any]:
    return {"disk_refusals": lambda job_id: (FULL,) if job_id in jobs else ()}


def test_a_job_that_writes_to_a_full_disk_waits() -> None:
    plan = decide(view(queue(1, Need(), writes_files=True), **refuse(1)))
    assert started(plan) == {}
    assert waiting_job(plan, 1).reasons == (FULL,)


def test_jobs_behind_it_that_write_elsewhere_start() -> None:
    plan = decide(view(queue(1, Need(), 1, 2, writes_files=True), queue(3, Need()), on=2, **refuse(1)))
    assert started(plan) == {2: ("G0",), 3: ("G1",)}


def test_jobs_stay_in_order_while_a_disk_is_being_read() -> None:
    refuse_first: dict[str, Any] = {"disk_refusals": lambda job_id: (BEING_READ,) if job_id == 1 else ()}
    assert started(decide(view(queue(1, Need(), 1, 2, writes_files=True), **refuse_first))) == {}


def test_the_runs_of_a_batch_stay_in_order() -> None:
    runs = queue(1, Need(), 1, 2, writes_files=True, pace=BatchPace(), group=1)
    assert started(decide(view(runs, **refuse(1)))) == {}


def test_a_job_without_files_of_its_own_is_not_asked_about() -> None:
    assert started(decide(view(queue(1, Need()), **refuse(1)))) == {1: ("G0",)}


def test_a_full_disk_of_the_queue_keeps_all_jobs_but_suspended_ones() -> None:
    waiting, suspended = queue(1, Need()), queue(-2, Need(), 2, resumes=True)
    plan = decide(view(waiting, suspended, on=2, closed_reasons=(FULL,)))
    assert started(plan) == {2: ("G0",)}
    assert kinds_of(waiting_job(plan, 1)) == [ReasonKind.DISK_FULL]
