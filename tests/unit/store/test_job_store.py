"""JobStore on a real SQLite: what the database itself refuses, what it counts, and what reading it costs."""

import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.job.job import (
    Dependency,
    DependencyKind,
    Growth,
    MemoryLack,
    Outcome,
    OutcomeKind,
    SuspendedBy,
    Usage,
)
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.submission import ArrayElement
from gpuyard.core.lease import Need
from gpuyard.core.memory.estimates import Profile
from gpuyard.core.memory.out_of_memory import Shortage, ShortageKind
from gpuyard.core.scheduling.queue_order import Lane, WeightedUse
from gpuyard.errors import StoreFault
from gpuyard.store.job_store import JobStore
from tests.unit.store import Shelf, full_scans

FAILED = Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1")


# What the database itself refuses


def test_a_second_live_attempt_of_a_job_is_refused(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    shelf.run(job_id)
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        shelf.run(job_id, 2)
    shelf.store.end_attempt(job_id, 1, FAILED, 120.0)
    shelf.run(job_id, 2)
    assert [(job.id, attempt.number) for job, attempt in shelf.store.live_attempts()] == [(job_id, 2)]


def test_a_refusal_within_a_transaction_undoes_all_of_it(shelf: Shelf) -> None:
    first, second = shelf.add(2)
    shelf.run(first)

    def start_both() -> None:
        with shelf.store.transaction():
            shelf.run(second)
            shelf.run(first, 2)

    with pytest.raises(StoreFault):
        start_both()
    assert shelf.job(second).state is JobState.QUEUED
    assert not shelf.store.attempts(second)


def test_an_attempt_has_an_outcome_exactly_when_it_has_ended(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    shelf.run(job_id)
    for half in ("ended_at = 1.0", "outcome = '{}'"):
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            shelf.db.execute(f"UPDATE attempts SET {half}")


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=30))
def test_no_circle_of_dependencies_can_be_stored(pairs: list[tuple[int, int]]) -> None:
    shelf = Shelf()
    shelf.add(6)
    for job_id, on in pairs:
        if on < job_id:
            shelf.store.add_dependencies([job_id], [Dependency(job_id=on)])
        else:
            with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
                shelf.store.add_dependencies([job_id], [Dependency(job_id=on)])
    waits_for = {job_id: [other for other, _, _ in shelf.store.dependencies(job_id)] for job_id in range(1, 7)}
    shelf.db.close()
    for job_id, others in waits_for.items():
        reached = set(others)
        while more := {each for other in reached for each in waits_for[other]} - reached:
            reached |= more
        assert job_id not in reached


def test_a_dependency_is_kept_once(shelf: Shelf) -> None:
    first, second = shelf.add(2)
    shelf.store.add_dependencies([second], [Dependency(job_id=first)] * 2)
    shelf.store.add_dependencies([second], [Dependency(job_id=first, kind=DependencyKind.ANY)])
    assert shelf.store.dependencies(second) == [
        (first, DependencyKind.ANY, JobState.QUEUED),
        (first, DependencyKind.OK, JobState.QUEUED),
    ]
    assert shelf.store.dependants(first) == [second]


def test_a_state_that_is_none_is_refused(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        shelf.db.execute("UPDATE jobs SET state = 'lost'")
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        shelf.store.change_state(job_id, JobState.DELAYED)
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        shelf.store.change_state(job_id, JobState.QUEUED, due_at=1.0)


def test_a_job_with_attempts_is_not_deleted_from_under_them(shelf: Shelf) -> None:
    shelf.run(*shelf.add())
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        shelf.db.execute("DELETE FROM jobs")


# Counts


@given(st.lists(st.tuples(st.sampled_from(["add", "drop", *JobState]), st.integers(0, 30)), max_size=40))
def test_counts_are_what_counting_would_give(changes: list[tuple[str, int]]) -> None:
    shelf = Shelf()
    for what, at in changes:
        ids = [job_id for (job_id,) in shelf.db.execute("SELECT id FROM jobs ORDER BY id").fetchall()]
        if what == "add":
            shelf.add(at % 3 + 1)
        elif ids and what == "drop":
            shelf.db.execute("DELETE FROM jobs WHERE id = ?", (ids[at % len(ids)],))
        elif ids:
            state = JobState(what)
            shelf.store.change_state(ids[at % len(ids)], state, due_at=1.0 if state is JobState.DELAYED else None)
    counted = dict(shelf.db.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
    assert shelf.store.counts() == {state: counted.get(state, 0) for state in JobState}
    shelf.db.close()


# Ready jobs


def test_jobs_of_one_kind_stand_in_one_lane_in_the_order_of_their_ids(shelf: Shelf) -> None:
    shelf.add(2)
    shelf.add(1, tag="night")
    shelf.add(2)
    assert shelf.ready() == [[1, 2, 4, 5], [3]]
    assert shelf.store.lane_of(1) is shelf.store.lane_of(5)


@pytest.mark.parametrize(
    "other", [{"priority": 1}, {"user": "you"}, {"tag": "t"}, {"need": Need(devices=2)}, {"group_limit": 2}]
)
def test_jobs_that_differ_in_what_the_policy_goes_by_stand_in_lanes_of_their_own(
    shelf: Shelf, other: dict[str, Any]
) -> None:
    shelf.add()
    shelf.add(**other)
    assert shelf.ready() == [[1], [2]]


def test_a_lane_is_read_back_as_it_was(shelf: Shelf) -> None:
    lane = Lane(
        id=0, priority=-2, user="me", tag="t", need=Need(devices=2, only=("a",), model="\udcff"), group=1, group_limit=2
    )
    lane_id = shelf.store.ensure_lane(lane)
    (job_id,) = shelf.add()
    shelf.db.execute("UPDATE jobs SET lane = ?", (lane_id,))
    assert shelf.store.lane_of(job_id) == replace(lane, id=lane_id)


def test_only_queued_jobs_are_ready(shelf: Shelf) -> None:
    for state in sorted(JobState):
        (job_id,) = shelf.add()
        shelf.store.change_state(job_id, state, due_at=1.0 if state is JobState.DELAYED else None)
    queued = [job_id for job_id in range(1, 11) if shelf.job(job_id).state is JobState.QUEUED]
    assert shelf.ready() == [queued]
    assert shelf.store.has_ready()
    shelf.store.change_state(queued[0], JobState.HELD)
    assert not shelf.store.has_ready()
    assert shelf.ready() == []


def test_a_long_lane_is_read_to_its_end(shelf: Shelf) -> None:
    ids = shelf.add(300)
    assert shelf.ready() == [ids]
    assert shelf.store.count_ahead(shelf.store.lane_of(1), 250) == 249


def test_ready_jobs_are_found_by_their_index_alone(shelf: Shelf) -> None:
    shelf.add(20)
    shelf.add(20, tag="night")

    def look() -> None:
        for queue in shelf.store.ready_queues():
            next(queue.jobs)

    look()
    plan = shelf.plan_of(look)
    assert [step for step in plan if "jobs" in step] == [step for step in plan if "jobs_ready" in step]
    assert full_scans(plan) == []


def test_a_lane_costs_one_look_however_long_it_is(shelf: Shelf) -> None:
    def look() -> None:
        for queue in shelf.store.ready_queues():
            next(queue.jobs)

    shelf.add(10)
    look()
    little, few = shelf.effort_of(look), len(shelf.statements(look))
    shelf.add(20_000)
    shelf.add(5_000, state=JobState.SUCCEEDED, ended_at=1.0)
    assert shelf.effort_of(look) <= little + 10
    assert len(shelf.statements(look)) == few == 2


def test_what_a_step_asks_scans_no_table(shelf: Shelf) -> None:
    first, second = shelf.add(2)
    shelf.store.add_dependencies([second], [Dependency(job_id=first)])
    shelf.run(first)
    store = shelf.store
    for act in (
        store.has_ready, store.counts, store.next_due, store.live_attempts, lambda: store.due_jobs(1.0),
        lambda: store.job(1), lambda: store.attempts(1), lambda: store.dependants(1), lambda: store.dependencies(2),
        lambda: store.lane_of(1), lambda: store.state_of(1), lambda: store.estimates.profile("x"),
        lambda: store.find_submission("x"),
        lambda: store.count_ahead(store.lane_of(2), 2), lambda: store.still_waits_after(2, 1),
        lambda: store.batch_state(1), lambda: store.set_batch_state(1, "{}"), lambda: store.last_start_in_batch(1),
    ):  # fmt: skip
        assert full_scans(shelf.plan_of(act)) == []


# Submissions


def test_a_submission_that_is_sent_twice_is_known_by_its_token(shelf: Shelf) -> None:
    store = shelf.store
    number, first = store.start_submission("token", 3)
    assert store.find_submission("token") is None
    store.complete_submission(number)
    assert store.find_submission("token") == (first, first + 2)
    assert store.find_submission("another") is None
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        store.start_submission("token", 3)


def test_submissions_without_a_token_are_each_their_own(shelf: Shelf) -> None:
    assert (shelf.add(2), shelf.add(1)) == ([1, 2], [3])
    assert shelf.store.find_submission("") is None


def test_jobs_of_a_large_submission_are_ready_when_all_of_them_are_there(shelf: Shelf) -> None:
    shelf.add(2, batch=True, complete=False)
    assert shelf.ready() == []
    shelf.store.complete_submission(1)
    assert shelf.ready() == [[1, 2]]


def test_a_job_that_is_moved_while_its_submission_arrives_waits_for_the_rest_all_the_same(shelf: Shelf) -> None:
    shelf.add(2, batch=True, complete=False)
    shelf.store.set_priority(1, 5)
    assert shelf.ready() == []
    shelf.store.complete_submission(1)
    assert sorted(shelf.ready()) == [[1], [2]]


def test_a_submission_that_was_never_acknowledged_is_dropped_and_its_ids_are_not_given_again(shelf: Shelf) -> None:
    (kept,) = shelf.add()
    lost = shelf.add(3, batch=True, complete=False)
    shelf.store.add_dependencies(lost, [Dependency(job_id=kept)])
    JobStore(shelf.db).drop_incomplete_submissions()
    assert [shelf.store.job(job_id) for job_id in lost] == [None] * 3
    assert shelf.store.dependants(kept) == []
    assert shelf.store.counts()[JobState.QUEUED] == 1
    assert shelf.add() == [5]


def test_of_submissions_that_were_never_acknowledged_one_can_be_dropped_by_its_token(shelf: Shelf) -> None:
    for token in ("sent again", "under way"):
        shelf.store.start_submission(token, 2)
    shelf.store.drop_incomplete_submissions("sent again")
    _, first = shelf.store.start_submission("sent again", 2)
    assert first == 5
    assert shelf.db.execute("SELECT first_id FROM submissions ORDER BY first_id").fetchall() == [(3,), (5,)]


def test_whoever_opens_the_store_anew_knows_what_is_still_arriving(shelf: Shelf) -> None:
    shelf.add(2, batch=True, complete=False)
    shelf.add()
    anew = JobStore(shelf.db)
    assert [[each.job_id for each in queue.jobs] for queue in anew.ready_queues()] == [[3]]
    assert [anew.is_arriving(job_id) for job_id in (1, 2, 3)] == [True, True, False]


def test_ids_go_on_after_those_that_are_known_from_elsewhere(shelf: Shelf) -> None:
    shelf.store.reserve_ids_up_to(41)
    assert shelf.add() == [42]
    shelf.store.reserve_ids_up_to(7)
    assert shelf.add() == [43]


def test_what_sets_jobs_of_a_submission_apart_is_read_back(shelf: Shelf) -> None:
    elements = (
        ArrayElement(index=7),
        ArrayElement(values={"lr": "caf\udce9"}),
        ArrayElement(command=("sh", "-c", "a | b")),
    )
    jobs = [shelf.job(job_id) for job_id in shelf.add_each(elements, is_array=True, group_limit=2)]
    assert [(job.index, job.values, job.command) for job in jobs] == [
        (each.index, each.values, each.command) for each in elements
    ]
    assert {(job.group, job.group_limit) for job in jobs} == {(1, 2)}


# Changes


def test_a_job_is_moved_to_the_lane_of_its_new_priority(shelf: Shelf) -> None:
    shelf.add(2)
    (urgent,) = shelf.add(priority=5)
    shelf.store.set_priority(2, 5)
    assert sorted(shelf.ready()) == [[1], [2, urgent]]
    assert shelf.job(2).priority == 5
    assert shelf.store.lane_of(2) is shelf.store.lane_of(urgent)


def test_a_job_is_due_when_its_time_has_come(shelf: Shelf) -> None:
    for job_id, due_at in zip(shelf.add(3), (30.0, 10.0, 20.0), strict=True):
        shelf.store.change_state(job_id, JobState.DELAYED, due_at=due_at)
    assert shelf.store.next_due() == 10.0
    assert shelf.store.due_jobs(20.0) == [2, 3]
    shelf.store.change_state(2, JobState.QUEUED)
    assert shelf.store.next_due() == 20.0


def test_a_job_that_is_delayed_later_is_noticed_however_often_there_was_none(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    for due_at in (10.0, 20.0):
        assert (shelf.store.next_due(), shelf.store.due_jobs(99.0)) == (None, [])
        shelf.store.change_state(job_id, JobState.DELAYED, due_at=due_at)
        assert (shelf.store.next_due(), shelf.store.due_jobs(99.0)) == (due_at, [job_id])
        shelf.store.change_state(job_id, JobState.QUEUED)


def test_a_start_clears_what_was_said_of_the_last_end(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    shelf.store.change_state(job_id, JobState.FAILED, reason="exit status 1", ended_at=5.0, outcome=FAILED, failures=1)
    shelf.run(job_id, 2)
    job = shelf.job(job_id)
    assert (job.state, job.attempts, job.started_at) == (JobState.RUNNING, 2, 110.0)
    assert (job.reason, job.outcome, job.ended_at, job.failures) == (None, None, None, 1)
    shelf.store.reset_failures(job_id)
    assert shelf.job(job_id).failures == 0


def test_an_attempt_is_read_back_as_it_was_and_so_is_how_it_is_stopped(shelf: Shelf) -> None:
    begun = shelf.run(*shelf.add())
    assert shelf.store.attempts(1) == [begun]
    stopped = replace(begun, stopping=OutcomeKind.TIMED_OUT, kill_at=130.0)
    shelf.store.update_attempt(stopped)
    assert [attempt for _, attempt in shelf.store.live_attempts()] == [stopped]


def test_all_that_changes_while_an_attempt_lives_is_read_back(shelf: Shelf) -> None:
    begun = shelf.run(*shelf.add())
    shortage = Shortage(where=ShortageKind.DEVICE, says="caf\udce9: out of memory", asked_mb=10.0)
    changed = replace(
        begun,
        reserved_mb=2048.0,
        parked=SuspendedBy.BY_PERSON,
        suspended_at=150.0,
        suspended_s=7.5,
        usage=Usage(peaks_mb={"G0": 10.0}, curve=((0.5, 10.0),), grew_at_s=0.5, levels_mb={"G0": 10.0}),
        lack=MemoryLack(shortage=shortage, others=(("bob, pid 7", None),)),
    )
    shelf.store.update_attempt(changed)
    shown = MemoryLack(shortage=replace(shortage, says="caf?: out of memory"), others=(("bob, pid 7", None),))
    assert [attempt for _, attempt in shelf.store.live_attempts()] == [replace(changed, lack=shown)]


def test_a_job_that_ran_out_of_memory_stands_in_a_lane_whose_jobs_each_have_their_own_need(shelf: Shelf) -> None:
    first, second = shelf.add(2)
    grown = Growth(count=2, memory_mb=4096.0, ram_mb=100.0)
    shelf.store.set_growth(first, grown)
    assert shelf.job(first).growth == grown
    assert shelf.store.lane_of(first).sizes_each
    assert not shelf.store.lane_of(second).sizes_each
    assert sorted(shelf.ready()) == [[first], [second]]
    shelf.store.reset_failures(first)
    assert shelf.job(first).growth == Growth()


def test_an_attempt_that_never_began_leaves_no_trace(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    shelf.run(job_id)
    shelf.store.drop_attempt(job_id, 1)
    assert shelf.store.attempts(job_id) == []
    assert shelf.job(job_id).attempts == 0


def test_a_reason_with_a_name_that_is_not_utf_8_can_be_written(shelf: Shelf) -> None:
    (job_id,) = shelf.add()
    shelf.run(job_id)
    outcome = Outcome(kind=OutcomeKind.CANNOT_START, status=127, reason="there is no program caf\udce9")
    shelf.store.end_attempt(job_id, 1, outcome, 120.0)
    shelf.store.change_state(job_id, JobState.FAILED, reason=outcome.reason, ended_at=120.0, outcome=outcome)
    shelf.store.add_event(job_id, 120.0, "failed", outcome.reason)
    shown = "there is no program caf?"
    assert shelf.job(job_id).reason == shown
    assert shelf.job(job_id).outcome == replace(outcome, reason=shown)
    assert shelf.catalogue.events(job_id) == [(120.0, "failed", shown)]


def test_what_was_read_of_a_change_that_was_undone_is_forgotten(shelf: Shelf) -> None:
    """The rows that come next have the numbers of those that are gone."""

    def add_in_vain() -> None:
        with shelf.store.transaction():
            (undone,) = shelf.add(tag="undone")
            assert shelf.job(undone).spec.tag == shelf.store.lane_of(undone).tag == "undone"
            shelf.store.set_setting("paused", "1")
            assert shelf.store.setting("paused") == "1"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_in_vain()
    assert shelf.store.setting("paused") is None
    assert shelf.store.job(1) is None
    (job_id,) = shelf.add(tag="done")
    assert shelf.job(job_id).spec.tag == shelf.store.lane_of(job_id).tag == "done"


def test_use_and_profiles_are_replaced_as_they_grow(shelf: Shelf) -> None:
    learned = Profile(label="run", count=1, least_s=2.0, mean_s=2.0, most_s=2.0)
    for seconds in (5.0, 9.0):
        shelf.store.estimates.set_recent_use(("me", "t"), WeightedUse(seconds=seconds, at=100.0))
        shelf.store.estimates.set_profile("f", replace(learned, most_s=seconds, peaks_mb=(seconds,), seen_at=seconds))
    assert shelf.store.estimates.recent_use() == {("me", "t"): WeightedUse(seconds=9.0, at=100.0)}
    assert shelf.store.estimates.profile("f") == replace(learned, most_s=9.0, peaks_mb=(9.0,), seen_at=9.0)
    assert shelf.store.estimates.profile("g") is None
