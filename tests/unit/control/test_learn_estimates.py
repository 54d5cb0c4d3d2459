"""Estimates are known as soon as an attempt ends, and survive the daemon once they are stored."""

from gpuyard.control.learn_estimates import LearnedEstimates
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind, Started, Usage
from tests.unit.store import QueueDb


def test_stored_estimates_survive_the_daemon(queue_db: QueueDb) -> None:
    job = queue_db.job(*queue_db.add())
    attempt = Attempt(
        job_id=job.id, number=1, phase=Started(at=100.0, keeper_pid=9), boot_id="b", devices=("G0",),
        usage=Usage(peaks_mb={"G0": 4096.0}, ram_mb=512.0, load_percent=40.0),
    )  # fmt: skip
    estimates = LearnedEstimates(queue_db.store)
    estimates.learn(job, attempt, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 130.0)
    assert estimates.estimate(job).likely_s == 30.0
    assert LearnedEstimates(queue_db.store).estimate(job).likely_s is None
    estimates.save()
    after = LearnedEstimates(queue_db.store)
    assert after.profiles(job) == estimates.profiles(job)
    assert (after.estimate(job).likely_s, after.ram_mb(job), after.load_percent(job)) == (30.0, 512.0, 40.0)
    assert (after.predicted_mb(job) or 0.0) > 4096.0
