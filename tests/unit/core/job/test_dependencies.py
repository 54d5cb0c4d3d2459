import pytest

from gpuyard.core.job.job import DependencyKind, DependencyOutlook, outlook, outlook_of_all
from gpuyard.core.job.lifecycle import FINISHED, JobState

OK, ANY, FAILED = DependencyKind.OK, DependencyKind.ANY, DependencyKind.FAILED


@pytest.mark.parametrize("kind", DependencyKind)
@pytest.mark.parametrize("state", sorted(set(JobState) - FINISHED))
def test_an_unfinished_dependency_is_pending(kind: DependencyKind, state: JobState) -> None:
    assert outlook(kind, state) is DependencyOutlook.PENDING


@pytest.mark.parametrize(
    ("kind", "met"),
    [(OK, {JobState.SUCCEEDED}), (FAILED, {JobState.FAILED}), (ANY, set(FINISHED))],
)
def test_each_kind_is_met_by_its_own_end_states_only(kind: DependencyKind, met: set[JobState]) -> None:
    for state in FINISHED:
        assert outlook(kind, state) is (DependencyOutlook.MET if state in met else DependencyOutlook.NEVER)


def test_without_dependencies_a_job_may_start() -> None:
    assert outlook_of_all([]) == (DependencyOutlook.MET, None)


def test_all_dependencies_have_to_be_met() -> None:
    done, under_way = (1, OK, JobState.SUCCEEDED), (2, ANY, JobState.RUNNING)
    assert outlook_of_all([done, done]) == (DependencyOutlook.MET, None)
    assert outlook_of_all([under_way, done]) == (DependencyOutlook.PENDING, None)


@pytest.mark.parametrize(
    ("kind", "state", "why"),
    [
        (OK, JobState.FAILED, "skipped: dependency 7 failed"),
        (OK, JobState.CANCELLED, "skipped: dependency 7 was cancelled"),
        (OK, JobState.REJECTED, "skipped: dependency 7 was rejected"),
        (FAILED, JobState.SUCCEEDED, "skipped: dependency 7 succeeded (had to fail)"),
        (FAILED, JobState.CANCELLED, "skipped: dependency 7 was cancelled (had to fail)"),
    ],
)
def test_a_dependency_that_can_never_be_met_decides_and_gives_the_reason(
    kind: DependencyKind, state: JobState, why: str
) -> None:
    others = [(3, OK, JobState.RUNNING), (7, kind, state), (9, ANY, JobState.SUCCEEDED)]
    assert outlook_of_all(others) == (DependencyOutlook.NEVER, why)
