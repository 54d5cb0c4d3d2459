"""The memory guard: when a card is about to run out, and which job makes way. A card has 24 GB."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job import Growth
from gpuyard.policy.foreign_load import SteadyGate
from gpuyard.policy.memory_guards import (
    Alarm,
    GuardedJob,
    MemoryClimb,
    alarm_text,
    closed_reason,
    find_alarm,
    grown_need,
    judge_card,
    may_stop,
    reserve_mb,
    room_to_restart,
    room_to_resume,
    stops_soon,
)
from tests.known import known

GB = 1024.0
CARD = 24 * GB


def job(job_id: int, held_mb: float = 4 * GB, rate_mb_s: float = 0.0, **fields: Any) -> GuardedJob:
    """A first run; the one with the lower id was there first."""
    known = {"since": float(job_id), "is_first_run": True, "steady_mb_s": rate_mb_s, **fields}
    return GuardedJob(job_id=job_id, held_mb=held_mb, rate_mb_s=rate_mb_s, **known)


def alarm_of(free_mb: float, *jobs: GuardedJob, others: bool = False) -> Alarm | None:
    return find_alarm(free_mb, CARD, jobs, has_other_leases=lambda: others)


def victim_of(free_mb: float, *jobs: GuardedJob, others: bool = False) -> int | None:
    alarm = alarm_of(free_mb, *jobs, others=others)
    return None if alarm is None else alarm.victim


def test_when_a_job_makes_way() -> None:
    assert victim_of(300.0, job(1), job(2, rate_mb_s=100.0)) == 2
    assert victim_of(300.0, job(1, rate_mb_s=100.0), job(2), job(3, held_mb=0.0)) == 3
    assert alarm_of(600.0, job(1), job(2, rate_mb_s=100.0)) is None
    assert alarm_of(10.0, job(1), job(2)) is None, "nothing happens while enough is free or nothing grows"
    assert alarm_of(10.0, job(1), job(2, rate_mb_s=100.0, is_first_run=False)) is None
    # Memory that would be gone within a second counts as gone.
    assert victim_of(3 * GB, job(1), job(2, rate_mb_s=4 * GB)) == 2
    assert alarm_of(5 * GB, job(1), job(2, rate_mb_s=4 * GB)) is None
    assert victim_of(5 * GB, job(1, rate_mb_s=3 * GB), job(2, rate_mb_s=3 * GB)) == 2
    assert alarm_of(3 * GB, job(1), job(2, rate_mb_s=12 * GB, steady_mb_s=0.0)) is None, "a model was loaded at once"


def test_a_first_run_makes_way_for_a_known_job_whose_memory_it_has_taken() -> None:
    grows = job(2, rate_mb_s=100.0, is_first_run=False, missing_mb=300.0)
    assert victim_of(200.0, job(1), grows, job(3)) == 3
    assert alarm_of(300.0, job(1), grows, job(3)) is None, "it gets what it was promised"
    assert alarm_of(200.0, job(1, is_first_run=False), grows) is None, "no first run has taken it"
    climbs = job(2, rate_mb_s=2 * GB, is_first_run=False, missing_mb=6 * GB)
    assert victim_of(1900.0, job(1), climbs, job(3)) == 3, "the rest would be gone within a second"
    still = job(2, is_first_run=False, missing_mb=300.0)
    assert alarm_of(200.0, job(1), still) is None, "it may never need more"


def test_who_never_makes_way() -> None:
    assert alarm_of(100.0, job(1, rate_mb_s=100.0)) is None
    assert victim_of(100.0, job(1, rate_mb_s=100.0), others=True) == 1
    leaving = job(2, held_mb=10.0, is_leaving=True)
    assert alarm_of(100.0, job(1, rate_mb_s=100.0), leaving) is None, "a job that has the card alone is left alone"
    known, fixed = job(3, is_first_run=False), job(2, may_be_moved=False)
    assert victim_of(100.0, job(1, rate_mb_s=50.0), known) == 1
    assert victim_of(100.0, job(1, rate_mb_s=50.0), fixed, known) == 1
    alarm = alarm_of(100.0, job(2, rate_mb_s=50.0, may_be_moved=False), known)
    assert alarm is not None, "nothing new may start there"
    assert alarm.victim is None, "jobs within their memory and jobs that may not be moved never make way"
    # A job that was resumed a moment ago makes way only if it grows itself.
    assert victim_of(100.0, job(1), job(2, rate_mb_s=50.0), job(3, is_spared=True)) == 2
    assert victim_of(100.0, job(1), job(3, rate_mb_s=50.0, is_spared=True)) == 3


def test_the_memory_of_jobs_that_leave_counts_as_free() -> None:
    """One job after the other makes way, and no more of them than needed."""
    grows = job(1, rate_mb_s=100.0)
    assert alarm_of(100.0, grows, job(2), job(3, held_mb=4 * GB, is_leaving=True)) is None
    assert victim_of(100.0, grows, job(2), job(3, held_mb=50.0, is_leaving=True)) == 2


def test_only_a_job_that_has_just_begun_is_stopped_and_never_the_first() -> None:
    youngest = alarm_of(100.0, job(1), job(2, rate_mb_s=50.0))
    first = alarm_of(100.0, job(1, rate_mb_s=50.0), job(2, is_first_run=False))
    assert youngest is not None
    assert first is not None
    assert may_stop(youngest, 59.0)
    assert not may_stop(youngest, 61.0)
    assert not may_stop(first, 5.0)
    beside_a_script = known(alarm_of(100.0, job(1, rate_mb_s=50.0), others=True))
    assert may_stop(beside_a_script, 5.0), "the lease of the script was there before it"


def test_a_moved_or_stopped_job_comes_back_where_more_than_it_held_is_free() -> None:
    assert room_to_resume(8 * GB, 0.0) == 10 * GB
    assert room_to_resume(100.0, 0.0) == 612.0
    assert room_to_resume(2 * GB, 6 * GB) == 6 * GB, "a job resumes where clearly more than it held is free"
    # A stopped job can always start alone beside programs that are no jobs.
    assert room_to_restart(8 * GB, 0.0, CARD, 5 * GB) == 10 * GB
    assert room_to_restart(20 * GB, 0.0, CARD, 0.0) == pytest.approx(21.6 * GB)
    assert room_to_restart(23 * GB, 0.0, CARD, 0.0) == 23 * GB, "it fits the empty card"
    assert room_to_restart(16 * GB, 0.0, CARD, 5 * GB) == 18.5 * GB, "19 GB are free when no job runs"
    assert grown_need(Growth(), 5 * GB) == Growth(memory_mb=5 * GB), "a stopped job gets more and keeps its reruns"
    assert grown_need(Growth(count=2, memory_mb=8 * GB), 5 * GB) == Growth(count=2, memory_mb=8 * GB)


def test_a_stopping_job_frees_its_memory_soon_after_it_is_asked_or_killed() -> None:
    cases = ((9.0, False), (10.0, True), (14.0, True), (16.0, False), (99.0, False), (101.0, True), (106.0, False))
    for now, is_soon in cases:
        assert stops_soon(10.0, 100.0, now) is is_soon, now
    assert not stops_soon(None, None, 0.0)


def test_a_card_opens_again_when_its_reserve_was_free_for_some_seconds() -> None:
    alarm = alarm_of(100.0, job(1), job(2, rate_mb_s=50.0))
    gate = judge_card(SteadyGate(), 100.0, CARD, None, 0.0)
    assert not gate.is_closed, "only an alarm closes it"
    gate = judge_card(gate, 100.0, CARD, alarm, 1.0)
    for now, free_mb, is_closed in (
        (2.0, 8 * GB, True),
        (5.0, 100.0, True),
        (6.0, 8 * GB, True),
        (11.0, 8 * GB, False),
    ):
        gate = judge_card(gate, free_mb, CARD, None, now)
        assert gate.is_closed is is_closed
    assert "GPU" not in closed_reason("G0", 100.0, CARD).text, "the device is named beside it"


def test_the_text_says_what_was_left_and_which_job_grew() -> None:
    alarm = known(alarm_of(300.0, job(12, rate_mb_s=100.0), job(13)))
    assert alarm_text(alarm, "0", 13) == "GPU 0 had 300 MB left while job 12 grew"
    assert alarm_text(alarm, "0", 12) == "GPU 0 had 300 MB left while it grew"
    fast = known(alarm_of(3 * GB, job(12), job(13, rate_mb_s=4 * GB)))
    assert alarm_text(fast, "0", 13) == "GPU 0 had 3 GB left while it grew by 4 GB a second"


def test_a_rate_is_taken_over_the_last_second_however_far_apart_the_readings_are() -> None:
    often, seldom = MemoryClimb(), MemoryClimb()
    for tenth in range(31):
        often = often.add(tenth / 10, 100.0 * tenth)
    for second in range(4):
        seldom = seldom.add(float(second), 1000.0 * second)
    assert often.rate_mb_s == pytest.approx(1000.0)
    assert seldom.rate_mb_s == pytest.approx(1000.0)
    assert often.steady_mb_s == pytest.approx(1000.0)
    assert seldom.steady_mb_s == pytest.approx(1000.0)
    assert (often.held_mb, seldom.held_mb) == (3000.0, 3000.0)
    assert len(often.points) < 20


def test_a_single_allocation_is_growth_and_no_steady_climb() -> None:
    often, seldom = MemoryClimb(), MemoryClimb()
    for tenth in range(41):
        often = often.add(tenth / 10, 12_000.0 if tenth > 33 else 500.0)
    for second in range(5):
        seldom = seldom.add(float(second), 12_000.0 if second > 3 else 500.0)
    for climb in (often, seldom):
        assert climb.rate_mb_s > 0.0
        assert climb.steady_mb_s == 0.0


def test_which_memory_grows() -> None:
    flat = MemoryClimb()
    for tenth in range(40):
        flat = flat.add(tenth / 10, 5000.0 + 2.0 * (tenth % 5))
        assert flat.rate_mb_s == 0.0, "drivers count in pages"
    assert flat.add(4.0, 1000.0).rate_mb_s == 0.0, "flat and shrinking memory does not grow"
    # A program that has just begun held nothing before.
    assert MemoryClimb().add(2.0, 4000.0, began_at=0.0).rate_mb_s == 2000.0
    assert MemoryClimb().add(200.0, 4000.0, began_at=0.0).rate_mb_s == 0.0, "it may have held that for long"
    assert MemoryClimb().add(2.0, 4000.0).rate_mb_s == 0.0, "it was put back"


@given(
    st.floats(0.0, CARD),
    st.lists(
        st.builds(
            job,
            st.integers(1, 50),
            st.floats(0.0, 8 * GB),
            st.sampled_from([0.0, 20.0, 5000.0]),
            is_first_run=st.booleans(),
            is_leaving=st.booleans(),
            is_spared=st.booleans(),
            may_be_moved=st.booleans(),
        ),
        max_size=6,
        unique_by=lambda each: each.job_id,
    ),
)
def test_a_job_makes_way_only_if_it_may_and_others_are_there(free_mb: float, jobs: list[GuardedJob]) -> None:
    alarm = alarm_of(free_mb, *jobs)
    if alarm is None:
        return
    by_id = {each.job_id: each for each in jobs if not each.is_leaving}
    assert len(by_id) > 1
    assert by_id[alarm.grower].rate_mb_s > 0.0
    assert free_mb < max(reserve_mb(CARD), sum(each.rate_mb_s for each in by_id.values()))
    if alarm.victim is not None:
        victim = by_id[alarm.victim]
        assert victim.is_first_run
        assert victim.may_be_moved
        younger = [each for each in by_id.values() if each.job_id > victim.job_id and each.is_first_run]
        assert all(not each.may_be_moved or (each.is_spared and not each.rate_mb_s) for each in younger)
