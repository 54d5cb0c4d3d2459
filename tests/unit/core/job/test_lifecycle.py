"""The table of a job's life: what may happen in which state, and what the words in its docstring promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.core.job.lifecycle import FINISHED, LIVE, PARKED, TRANSITIONS, WAITING, JobEvent, JobState, advance, can
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
    """Whatever becomes live comes from the queue."""
    into_live = {key for key, after in TRANSITIONS.items() if after in LIVE and key[0] not in LIVE}
    assert into_live == {(JobState.QUEUED, JobEvent.START), (JobState.QUEUED, JobEvent.HAND_OVER)}


def test_the_way_out_of_the_memory_and_back_is_one_way_around() -> None:
    steps = (JobEvent.SUSPEND, JobEvent.PARK, JobEvent.RESUME, JobEvent.GO_ON)
    state = JobState.RUNNING
    seen = []
    for step in steps:
        state = advance(state, step)
        seen.append(state)
    assert seen == [JobState.SUSPENDING, JobState.SUSPENDED, JobState.RESUMING, JobState.RUNNING]
    for parked in PARKED:
        back = {event for (before, event), after in TRANSITIONS.items() if before is parked and after in LIVE}
        assert back <= {*steps, JobEvent.STOP}


@pytest.mark.parametrize("state", sorted(LIVE - {JobState.STOPPING}))
def test_whatever_has_a_live_attempt_may_end_in_every_way_and_be_told_to(state: JobState) -> None:
    for event in (JobEvent.SUCCEED, JobEvent.FAIL, JobEvent.RETRY, JobEvent.REQUEUE, JobEvent.HOLD, JobEvent.STOP):
        assert can(state, event)


def test_whoever_is_being_stopped_goes_no_other_way() -> None:
    after = {after for (before, _), after in TRANSITIONS.items() if before is JobState.STOPPING}
    assert not after & LIVE


def test_a_finished_job_begins_anew_only_when_a_person_says_so() -> None:
    for (before, event), after in TRANSITIONS.items():
        if before in FINISHED:
            assert event in BY_A_PERSON
            assert after in WAITING


def test_a_job_that_is_being_stopped_cannot_be_held() -> None:
    """It may succeed: one that was to make room may have come to its end instead."""
    after = {after for (before, _), after in TRANSITIONS.items() if before is JobState.STOPPING}
    assert after == {
        JobState.CANCELLED, JobState.FAILED, JobState.DELAYED, JobState.SUCCEEDED, JobState.QUEUED,
    }  # fmt: skip


@pytest.mark.parametrize("state", sorted(JobState))
def test_from_every_state_a_job_can_still_run_and_can_still_finish(state: JobState) -> None:
    assert JobState.RUNNING in reachable(state)
    assert reachable(state) >= FINISHED


@pytest.mark.parametrize("state", sorted(WAITING))
def test_whatever_waits_can_be_cancelled_at_once(state: JobState) -> None:
    assert advance(state, JobEvent.CANCEL) is JobState.CANCELLED


def test_every_event_is_of_use() -> None:
    assert {event for _, event in TRANSITIONS} == set(JobEvent)
