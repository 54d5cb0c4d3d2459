"""The table of job transitions: which events each state allows, and the rules in its docstring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.daemon.api.sweeps import group_state, progress_text
from gpuyard.errors import UserError
from gpuyard.model.lifecycle import (
    FINISHED,
    IN_SUSPENSION,
    LIVE,
    TRANSITIONS,
    WAITING,
    JobEvent,
    JobState,
    advance,
    can,
)

BY_A_PERSON = {JobEvent.REQUEUE, JobEvent.BLOCK}


def reachable(start: JobState) -> set[JobState]:
    found = {start}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in found} - found:
        found |= more
    return found


@given(st.sampled_from(JobState), st.sampled_from(JobEvent))
def test_events_outside_the_table_are_refused(state: JobState, event: JobEvent) -> None:
    if can(state, event):
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(UserError, match=f"(?m)^a {state} job does not allow '{event}'$"):
            advance(state, event)


def test_the_table_is_complete() -> None:
    with pytest.raises(UserError) as caught:
        advance(JobState.HELD, JobEvent.START)
    assert caught.value.hint == "allowed: block, cancel, reject, release", "a refusal lists the allowed events"
    assert set(JobState) == WAITING | LIVE | FINISHED
    assert len(WAITING) + len(LIVE) + len(FINISHED) == len(JobState), "every state is waiting live or finished"
    assert {event for _, event in TRANSITIONS} == set(JobEvent), "every event is in the table"
    # Only a queued job becomes live.
    into_live = {key for key, after in TRANSITIONS.items() if after in LIVE and key[0] not in LIVE}
    assert into_live == {(JobState.QUEUED, JobEvent.START), (JobState.QUEUED, JobEvent.HAND_OVER)}


def test_suspending_and_resuming_go_through_four_states_in_order() -> None:
    steps = (JobEvent.SUSPEND, JobEvent.MOVED_OUT, JobEvent.RESUME, JobEvent.CONTINUE)
    state = JobState.RUNNING
    seen = []
    for step in steps:
        state = advance(state, step)
        seen.append(state)
    assert seen == [JobState.SUSPENDING, JobState.SUSPENDED, JobState.RESUMING, JobState.RUNNING]
    for paused in IN_SUSPENSION:
        back = {event for (before, event), after in TRANSITIONS.items() if before is paused and after in LIVE}
        assert back <= {*steps, JobEvent.STOP}


@pytest.mark.parametrize("state", sorted(LIVE - {JobState.STOPPING}))
def test_a_live_job_may_end_in_every_way_and_be_asked_to_stop(state: JobState) -> None:
    for event in (JobEvent.SUCCEED, JobEvent.FAIL, JobEvent.RETRY, JobEvent.REQUEUE, JobEvent.HOLD, JobEvent.STOP):
        assert can(state, event)


def test_where_stopping_and_finished_jobs_go() -> None:
    after = {after for (before, _), after in TRANSITIONS.items() if before is JobState.STOPPING}
    assert not after & LIVE, "a stopping job cannot become live again"
    # A finished job runs again only when a person asks.
    for (before, event), then in TRANSITIONS.items():
        if before in FINISHED:
            assert event in BY_A_PERSON
            assert then in WAITING
    # A job that is being stopped cannot be held. A preempted program may have finished before.
    assert after == {
        JobState.CANCELLED, JobState.FAILED, JobState.DELAYED, JobState.SUCCEEDED, JobState.QUEUED,
    }  # fmt: skip


@pytest.mark.parametrize("state", sorted(JobState))
def test_from_every_state_a_job_can_still_run_and_can_still_finish(state: JobState) -> None:
    assert JobState.RUNNING in reachable(state)
    assert reachable(state) >= FINISHED


@pytest.mark.parametrize("state", sorted(WAITING))
def test_a_waiting_job_can_be_cancelled_at_once(state: JobState) -> None:
    assert advance(state, JobEvent.CANCEL) is JobState.CANCELLED


@pytest.mark.parametrize(
    ("counts", "state", "text"),
    [
        ({"succeeded": 10, "failed": 2, "running": 3, "stopping": 1, "queued": 24}, "running",
         "12/40 done, 2 failed, 4 running"),
        ({"pending": 8}, "pending", "0/8 done, 8 pending"),
        ({"running": 2, "pending": 5, "succeeded": 1}, "running", "1/8 done, 5 pending, 2 running"),
        ({"queued": 5, "held": 2}, "queued", "0/7 done, 2 held"),
        ({"succeeded": 3, "failed": 1}, "failed", "4/4 done, 1 failed"),
        ({"succeeded": 3, "cancelled": 1}, "cancelled", "4/4 done, 1 cancelled"),
        ({"succeeded": 1200}, "succeeded", "1,200/1,200 done"),
        ({"suspended": 1, "rejected": 1}, "suspended", "1/2 done, 1 rejected, 1 suspended"),
    ],
)  # fmt: skip
def test_progress_names_what_matters(counts: dict[str, int], state: str, text: str) -> None:
    by_state = {JobState(each): jobs for each, jobs in counts.items()}
    assert (group_state(by_state), progress_text(by_state)) == (state, text)


@pytest.mark.parametrize("state", list(JobState))
def test_a_group_of_jobs_in_one_state_has_that_state(state: JobState) -> None:
    assert group_state({state: 3}) is state
