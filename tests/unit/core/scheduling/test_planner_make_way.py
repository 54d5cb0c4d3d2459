"""Younger first runs make way for a head that ran out of memory, and resume after it has started. A card has 24 GB."""

from typing import Any

from msgspec.structs import replace

from gpuyard.core.lease import Lease, Need
from gpuyard.core.scheduling.plan import Preempt
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.queue_order import LaneQueue
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from tests.unit.core.scheduling.test_placement import GB, lease, shared
from tests.unit.core.scheduling.test_planner import NOW, queue, started, view, waiting_job

FIRST, SECOND, LATER, KNOWN = 1, 2, 3, 4


def beside(job_id: int, memory_gb: float) -> tuple[Lease, RunningJob]:
    held = lease(f"job {job_id}", "G0", memory_mb=memory_gb * GB)
    run = RunningJob(
        job_id=job_id, user="me", tag="", devices=1, started_at=NOW - 60 + job_id, lease_id=held.id, device_ids=("G0",)
    )
    return held, run


def two_beside() -> dict[str, Any]:
    """Return the leases and the running jobs of two first runs of 8 GB."""
    (second, runs_second), (later, runs_later) = beside(SECOND, 8.0), beside(LATER, 8.0)
    return {"leases": [second, later], "running": [runs_second, runs_later]}


def resumes(job_id: int, memory_gb: float, made_way_for: int | None) -> LaneQueue:
    return queue(-job_id, shared(memory_gb * GB), job_id, resumes=True, made_way_for=made_way_for)


def test_the_youngest_makes_way_for_a_head_that_ran_out_of_memory() -> None:
    head, behind = queue(FIRST, shared(14 * GB)), queue(9, shared(GB))
    plan = decide(
        view(
            head,
            behind,
            **two_beside(),
            younger=lambda job_id: {SECOND, LATER} if job_id == FIRST else (),
        )
    )
    assert plan.made_way == (Preempt(job_id=LATER, for_job=FIRST),)
    assert not plan.preempts
    assert not plan.starts, "the memory is kept for the head"


def test_a_head_that_did_not_run_out_of_memory_waits() -> None:
    plan = decide(view(queue(FIRST, shared(14 * GB)), **two_beside()))
    assert not plan.made_way


def test_a_job_that_starts_lets_no_other_make_way() -> None:
    held, run = beside(SECOND, 8.0)
    plan = decide(view(queue(FIRST, shared(14 * GB)), leases=[held], running=[run], younger=lambda _: {SECOND}))
    assert list(started(plan)) == [FIRST]
    assert not plan.made_way


def test_a_job_that_made_way_resumes_after_the_one_for_which_it_did() -> None:
    """It was submitted first, and would come first otherwise."""
    plan = decide(view(resumes(FIRST, 12.0, made_way_for=SECOND), queue(SECOND, shared(12 * GB)), queue(9, shared(GB))))
    assert list(started(plan)) == [SECOND, FIRST], "before the jobs behind both"
    plan = decide(view(resumes(FIRST, 12.0, made_way_for=None), queue(SECOND, shared(14 * GB))))
    assert list(started(plan)) == [FIRST]


def test_a_job_that_made_way_waits_while_the_other_cannot_start() -> None:
    held, run = beside(KNOWN, 8.0)
    queues = resumes(FIRST, 4.0, made_way_for=SECOND), queue(SECOND, Need())
    plan = decide(view(*queues, leases=[held], running=[run]))
    assert not plan.starts
    (reason,) = waiting_job(plan, -FIRST).reasons
    assert reason.text.startswith("made way for job 2, which was on its GPU first")


def suspended(restart: Need | None, **changes: Any) -> LaneQueue:
    """A suspended job that waits for 8 GB on G0, and may start anew elsewhere."""
    need = replace(shared(8 * GB), only=("G0",), is_resumed=True)
    return queue(-SECOND, need, SECOND, resumes=True, restart=restart, **changes)


def test_a_suspended_job_starts_anew_on_a_device_that_has_room() -> None:
    held, run = beside(FIRST, 20.0)
    elsewhere = replace(shared(10 * GB), banned=("G0",))
    behind = queue(9, shared(16 * GB))
    plan = decide(view(suspended(elsewhere), behind, on=2, leases=[held], running=[run]))
    (restart,) = plan.restarts
    assert (restart.job_id, [share.device_id for share in restart.claim.shares]) == (SECOND, ["G1"])
    assert not plan.starts, "the other device is kept for it"
    assert not decide(view(suspended(None), on=2, leases=[held], running=[run])).restarts, "it may not yet"
    full = lease("full", "G1", memory_mb=20 * GB)
    assert not decide(view(suspended(elsewhere), on=2, leases=[held, full], running=[run])).restarts


def test_a_suspended_job_that_can_resume_does_not_start_anew() -> None:
    plan = decide(view(suspended(replace(shared(8 * GB), banned=("G0",))), on=2))
    assert list(started(plan)) == [SECOND]
    assert not plan.restarts


def test_a_suspended_job_stays_suspended_while_it_could_not_start_anew() -> None:
    """A pause lets suspended jobs resume, but none start: stopped, it would lose its work for nothing."""
    held, run = beside(FIRST, 20.0)
    elsewhere = replace(shared(10 * GB), banned=("G0",))
    paused = Reason(ReasonKind.PAUSED, "paused")
    for changes in ({"closed_reasons": (paused,)}, {"stopped_tags": frozenset({"t"})}):
        plan = decide(view(suspended(elsewhere, tag="t"), on=2, leases=[held], running=[run], **changes))
        assert not plan.restarts
