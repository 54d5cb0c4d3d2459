"""The table of a job's life: what may happen in which state, and what the words in its docstring promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.lifecycle import FINISHED, LIVE, TRANSITIONS, WAITING, JobEvent, JobState, advance, can
from gpuyard.errors import UserError

BY_A_PERSON = {JobEvent.REQUEUE, JobEvent.BLOCK}


def reachable(start: JobState) -> set[JobState]:
    found = {start}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in found} - found:
        found |= more
    return found


@given(st.sampled_from(JobState), st.sampled_from(JobEvent))
def test_whatever_is_not_in_the_table_cannot_happen(state: JobState, event: JobEvent) -> None:
    if can(state, event):
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(UserError, match=f"^a job that is {state} cannot {event}$"):
            advance(state, event)


def test_a_refusal_says_what_can_be_done_instead() -> None:
    with pytest.raises(UserError) as caught:
        advance(JobState.HELD, JobEvent.START)
    assert caught.value.hint == "it can: block, cancel, reject, release"


def test_every_state_is_one_of_waiting_live_and_finished() -> None:
    assert set(JobState) == WAITING | LIVE | FINISHED
    assert len(WAITING) + len(LIVE) + len(FINISHED) == len(JobState)


def test_an_attempt_begins_in_one_place_only() -> None:
    """Whatever becomes live comes from the queue; whatever is stopping was running."""
    into_live = {(before, event) for (before, event), after in TRANSITIONS.items() if after in LIVE}
    assert into_live == {(JobState.QUEUED, JobEvent.START), (JobState.RUNNING, JobEvent.STOP)}


def test_a_finished_job_begins_anew_only_when_a_person_says_so() -> None:
    for (before, event), after in TRANSITIONS.items():
        if before in FINISHED:
            assert event in BY_A_PERSON
            assert after in WAITING


def test_a_job_that_is_being_stopped_can_neither_succeed_nor_be_held() -> None:
    after = {after for (before, _), after in TRANSITIONS.items() if before is JobState.STOPPING}
    assert after == {JobState.CANCELLED, JobState.FAILED, JobState.DELAYED}


@pytest.mark.parametrize("state", sorted(JobState))
def test_from_every_state_a_job_can_still_run_and_can_still_finish(state: JobState) -> None:
    assert JobState.RUNNING in reachable(state)
    assert reachable(state) >= FINISHED


@pytest.mark.parametrize("state", sorted(WAITING))
def test_whatever_waits_can_be_cancelled_at_once(state: JobState) -> None:
    assert advance(state, JobEvent.CANCEL) is JobState.CANCELLED


def test_every_event_is_of_use() -> None:
    assert {event for _, event in TRANSITIONS} == set(JobEvent)
