import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.dependencies import DependencyKind, DependencyOutlook, awaited, outlook, outlook_of_all
from gpuyard.model.lifecycle import FINISHED, JobState

OK, ANY, FAILED = DependencyKind.OK, DependencyKind.ANY, DependencyKind.FAILED


@pytest.mark.parametrize("kind", DependencyKind)
@pytest.mark.parametrize("state", sorted(set(JobState) - FINISHED))
def test_an_unfinished_dependency_is_pending(kind: DependencyKind, state: JobState) -> None:
    assert outlook(kind, state) is DependencyOutlook.PENDING


@pytest.mark.parametrize(
    ("kind", "met"), [(OK, {JobState.SUCCEEDED}), (FAILED, {JobState.FAILED}), (ANY, set(FINISHED))]
)
def test_each_kind_is_met_by_its_own_end_states_only(kind: DependencyKind, met: set[JobState]) -> None:
    for state in FINISHED:
        assert outlook(kind, state) is (DependencyOutlook.MET if state in met else DependencyOutlook.NEVER)


def test_all_dependencies_have_to_be_met() -> None:
    assert outlook_of_all([]) == (DependencyOutlook.MET, None), "without dependencies a job may start"
    done, under_way = (1, OK, JobState.SUCCEEDED), (2, ANY, JobState.RUNNING)
    assert outlook_of_all([done, done]) == (DependencyOutlook.MET, None)
    assert outlook_of_all([under_way, done]) == (DependencyOutlook.PENDING, None)
    # A set of which none failed names its jobs.
    assert outlook_of_all([(7, FAILED, JobState.SUCCEEDED), (8, FAILED, JobState.CANCELLED)]) == (
        DependencyOutlook.NEVER,
        "skipped: none of the dependencies 7-8 failed (one had to)",
    )


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
def test_a_dependency_that_can_never_be_met_decides(kind: DependencyKind, state: JobState, why: str) -> None:
    others = [(3, OK, JobState.RUNNING), (7, kind, state), (9, ANY, JobState.SUCCEEDED)]
    assert outlook_of_all(others) == (DependencyOutlook.NEVER, why)


def model(others: list[tuple[int, DependencyKind, JobState]]) -> DependencyOutlook:
    """What the words mean, said of each set at a time: all succeed, all end, one fails."""

    def states(kind: DependencyKind) -> list[JobState]:
        return [state for _, each, state in others if each is kind]

    has_met = [
        all(state is JobState.SUCCEEDED for state in states(OK)),
        all(state in FINISHED for state in states(ANY)),
        not states(FAILED) or JobState.FAILED in states(FAILED),
    ]
    has_lost = [
        any(state in FINISHED - {JobState.SUCCEEDED} for state in states(OK)),
        bool(states(FAILED)) and all(state in FINISHED - {JobState.FAILED} for state in states(FAILED)),
    ]
    if any(has_lost):
        return DependencyOutlook.NEVER
    return DependencyOutlook.MET if all(has_met) else DependencyOutlook.PENDING


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DependencyKind), st.sampled_from(JobState)), max_size=6))
def test_sets_of_dependencies_mean_what_the_words_say(others: list[tuple[int, DependencyKind, JobState]]) -> None:
    found, why = outlook_of_all(others)
    assert found is model(others)
    assert (why is not None) == (found is DependencyOutlook.NEVER)
    assert bool(awaited(others)) or found is not DependencyOutlook.PENDING
