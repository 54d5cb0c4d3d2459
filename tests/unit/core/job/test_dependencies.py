import pytest

from gpuyard.core.job.dependencies import DependencyOutlook, prospect, prospect_of_all
from gpuyard.core.job.job import DependencyKind
from gpuyard.core.job.lifecycle import FINISHED, JobState

OK, ANY, FAILED = DependencyKind.OK, DependencyKind.ANY, DependencyKind.FAILED


@pytest.mark.parametrize("kind", DependencyKind)
@pytest.mark.parametrize("state", sorted(set(JobState) - FINISHED))
def test_one_that_has_not_finished_is_waited_for(kind: DependencyKind, state: JobState) -> None:
    assert prospect(kind, state) is DependencyOutlook.PENDING


@pytest.mark.parametrize(
    ("kind", "met"),
    [(OK, {JobState.SUCCEEDED}), (FAILED, {JobState.FAILED}), (ANY, set(FINISHED))],
)
def test_each_kind_is_met_by_its_own_endings_and_by_no_others(kind: DependencyKind, met: set[JobState]) -> None:
    for state in FINISHED:
        assert prospect(kind, state) is (DependencyOutlook.MET if state in met else DependencyOutlook.NEVER)


def test_who_waits_for_nobody_may_go_on() -> None:
    assert prospect_of_all([]) == (DependencyOutlook.MET, None)


def test_all_have_to_be_met() -> None:
    done, under_way = (1, OK, JobState.SUCCEEDED), (2, ANY, JobState.RUNNING)
    assert prospect_of_all([done, done]) == (DependencyOutlook.MET, None)
    assert prospect_of_all([under_way, done]) == (DependencyOutlook.PENDING, None)


@pytest.mark.parametrize(
    ("kind", "state", "why"),
    [
        (OK, JobState.FAILED, "job 7 was to succeed first, and it failed"),
        (OK, JobState.CANCELLED, "job 7 was to succeed first, and it was cancelled"),
        (OK, JobState.REJECTED, "job 7 was to succeed first, and it was rejected"),
        (FAILED, JobState.SUCCEEDED, "job 7 was to fail first, and it succeeded"),
        (FAILED, JobState.CANCELLED, "job 7 was to fail first, and it was cancelled"),
    ],
)
def test_one_that_can_never_be_met_decides_and_says_why(kind: DependencyKind, state: JobState, why: str) -> None:
    others = [(3, OK, JobState.RUNNING), (7, kind, state), (9, ANY, JobState.SUCCEEDED)]
    assert prospect_of_all(others) == (DependencyOutlook.NEVER, why)
