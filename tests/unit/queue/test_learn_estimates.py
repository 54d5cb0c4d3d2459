"""Estimates are known as soon as an attempt ends, and survive the daemon once they are stored."""

from msgspec.structs import replace

from gpuyard.model.job import Growth, Outcome, OutcomeKind, Usage
from gpuyard.model.lease import HostShare, Need, UnknownMemory
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.policy.estimates import Profile
from gpuyard.policy.sizing import FirstRuns, expected_before
from gpuyard.queue.learn_estimates import LearnedEstimates
from tests.unit.store import QueueDb, attempt_of


def test_stored_estimates_survive_the_daemon(queue_db: QueueDb) -> None:
    job = queue_db.job(*queue_db.add())
    attempt = attempt_of(
        job.id, 100.0, devices=("G0",), usage=Usage(peaks_mb={"G0": 4096.0}, ram_mb=512.0, load_percent=40.0)
    )
    estimates = LearnedEstimates(queue_db.store)
    estimates.learn(job, attempt, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 130.0)
    assert estimates.estimate(job).likely_s == 30.0
    assert LearnedEstimates(queue_db.store).estimate(job).likely_s is None
    estimates.save()
    after = LearnedEstimates(queue_db.store)
    assert after.profiles(job) == estimates.profiles(job)
    figures = (after.figure(job, "ram_mb"), after.figure(job, "load_percent"))
    assert (after.estimate(job).likely_s, *figures) == (30.0, 512.0, 40.0)
    assert (after.predicted_mb(job) or 0.0) > 4096.0


def test_what_was_learned_on_one_vendor_s_gpus_is_not_used_for_another_s(queue_db: QueueDb) -> None:
    job = queue_db.job(*queue_db.add())
    on_nvidia, on_amd = (
        replace(job, spec=replace(job.spec, need=replace(job.spec.need, vendor=vendor)))
        for vendor in (Vendor.NVIDIA, Vendor.AMD)
    )
    attempt = attempt_of(job.id, 100.0, devices=("G0",), usage=Usage(peaks_mb={"G0": 4096.0}))  # fmt: skip
    estimates = LearnedEstimates(queue_db.store)
    estimates.learn(on_nvidia, attempt, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 130.0)
    assert estimates.predicted_mb(on_nvidia) is not None
    assert estimates.predicted_mb(on_amd) is None
    exact, _ = estimates.profiles(on_nvidia)
    assert exact is not None
    assert exact.label.endswith(" [nvidia]")


def test_first_runs_teach_about_other_programs_and_most_about_those_of_their_framework(queue_db: QueueDb) -> None:
    job = queue_db.job(*queue_db.add())
    open_need = replace(job.spec.need, memory=UnknownMemory())
    torch, jax, other = (
        replace(job, spec=replace(job.spec, command=(f"{name}.py",), framework=name, need=open_need))
        for name in ("torch", "jax", "")
    )
    estimates = LearnedEstimates(queue_db.store)
    for each, peak in ((torch, 2000.0), (jax, 9000.0)):
        attempt = attempt_of(job.id, 100.0, devices=("G0",), usage=Usage(peaks_mb={"G0": peak}))  # fmt: skip
        for _ in range(4):
            estimates.learn(each, attempt, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 130.0)
    newcomers = [replace(each, spec=replace(each.spec, command=("new.py",))) for each in (torch, jax, other)]
    like_torch, like_jax, unknown = (
        expected_before(estimates.known_runs(each), 24_576.0).mean_mb for each in newcomers
    )
    assert like_torch < unknown < like_jax
    labels = {profile.label for _, profile in _saved(estimates, queue_db) if profile.is_of_any}
    assert labels == {"(first runs of any program)", "(first runs with torch)", "(first runs with jax)"}


def test_jobs_that_differ_in_what_limits_their_framework_are_estimated_apart(queue_db: QueueDb) -> None:
    plain, same = queue_db.add(2)
    (grows,) = queue_db.add(environment={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    (jax,) = queue_db.add(framework="jax")
    estimates = LearnedEstimates(queue_db.store)
    assert estimates.kind_of(plain) == estimates.kind_of(same)
    assert len({estimates.kind_of(each) for each in (plain, grows, jax)}) == 3


def _saved(estimates: LearnedEstimates, queue_db: QueueDb) -> list[tuple[str, Profile]]:
    estimates.save()
    return queue_db.queries.profiles(100)


def test_a_job_that_made_way_for_ram_reserves_more_next_time(queue_db: QueueDb) -> None:
    job = queue_db.job(*queue_db.add(need=Need(devices=0, host=HostShare(ram_mb=1000.0))))
    queue_db.store.set_growth(job.id, Growth(ram_mb=5000.0))
    need = LearnedEstimates(queue_db.store).need(job.id, (), FirstRuns())
    assert need.host == HostShare(ram_mb=5000.0)
