"""When a running job ends: by its own progress, by earlier runs, and within its time limit."""

from types import SimpleNamespace
from typing import cast

import pytest

from gpuyard.model.job import Attempt, Job, Started, Usage
from gpuyard.model.job_progress import JobProgress, ProgressReading, WorkDone, add_reading
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.estimates import Estimate
from gpuyard.policy.world import RunningJob
from gpuyard.queue.live_attempts import Live, LiveJobs
from gpuyard.queue.running_jobs import running_jobs
from gpuyard.queue.transitions import JobTransitions

LEARNED = Estimate(least_s=100, likely_s=200, most_s=300)


def running(learned: Estimate, usage: Usage | None, time_limit_s: float | None = None) -> RunningJob:
    spec = JobSpec(command=("x",), cwd="/", environment={}, need=Need(), time_limit_s=time_limit_s)
    job = Job(id=1, spec=spec, state=JobState.RUNNING, priority=0, user="me", submitted_at=0)
    attempt = Attempt(job_id=1, number=1, phase=Started(at=1000.0), usage=usage)
    live = LiveJobs([Live(job=job, attempt=attempt)])
    estimates = SimpleNamespace(estimate_of=lambda _: learned)
    [found] = running_jobs(cast("JobTransitions", SimpleNamespace(live=live, estimates=estimates)))
    return found


def half_after(seconds: float, done: float = 50) -> Usage:
    progress = JobProgress()
    for at_s, now in ((0.0, 0.0), (seconds / 2, done / 2), (seconds, done)):
        progress = add_reading(progress, ProgressReading(amount=WorkDone(done=now, total=100, unit="")), at_s)
    return Usage(progress=progress)


def test_progress_counts_beside_earlier_runs_and_a_time_limit() -> None:
    assert running(LEARNED, None).ends_about == 1200
    for learned in (LEARNED, Estimate()):
        jobs = running(learned, half_after(1000))
        assert jobs.ends_about == pytest.approx(3000)
        after = jobs.ends_after
        assert after is not None
        assert 2000 < after < 3000
    assert running(LEARNED, half_after(1000, done=4)).ends_about == 1200
    assert running(Estimate(), half_after(1000, done=4)).ends_about == pytest.approx(1000 + 25_000)
    jobs = running(Estimate(), half_after(1000), time_limit_s=1500)
    assert jobs.ends_about == 2500
