"""JobStore on a real SQLite database: its constraints, its counts, and the cost of its queries."""

import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.errors import StoreFault
from gpuyard.model.dependencies import Dependency, DependencyKind
from gpuyard.model.job import Growth, MemoryLack, Outcome, OutcomeKind, Over, Started, SuspendedBy, Usage
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.out_of_memory import Shortage, ShortageKind
from gpuyard.model.placeholders import ArrayElement
from gpuyard.policy.estimates import Profile
from gpuyard.policy.queue_order import Lane, WeightedUse
from gpuyard.store.job_store import JobStore
from tests.unit.store import QueueDb, end_attempt, full_scans

FAILED = Outcome(kind=OutcomeKind.FAILED, status=1, reason="exit status 1")


def test_a_second_live_attempt_of_a_job_is_refused(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    queue_db.run(job_id)
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        queue_db.run(job_id, 2)
    end_attempt(queue_db.store, job_id, 1, FAILED, 120.0)
    queue_db.run(job_id, 2)
    assert [(job.id, attempt.number) for job, attempt in queue_db.store.live_attempts()] == [(job_id, 2)]


def test_a_refusal_within_a_transaction_undoes_all_of_it(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    queue_db.run(first)

    def start_both() -> None:
        with queue_db.store.transaction():
            queue_db.run(second)
            queue_db.run(first, 2)

    with pytest.raises(StoreFault):
        start_both()
    assert queue_db.job(second).state is JobState.QUEUED
    assert not queue_db.store.attempts(second)


def test_an_attempt_has_an_outcome_exactly_when_it_has_ended_and_is_handed_over_or_started(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    queue_db.run(job_id)
    for half in ("ended_at = 1.0", "outcome = '{}'"):
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            queue_db.db.execute(f"UPDATE attempts SET {half}")
    for half in ("handed_over_at = 1.0", "started_at = NULL", "handed_over_at = 1.0, started_at = NULL, place = 'n0'"):
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            queue_db.db.execute(f"UPDATE attempts SET {half}")


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), max_size=30))
def test_a_cycle_of_dependencies_cannot_be_stored(pairs: list[tuple[int, int]]) -> None:
    queue_db = QueueDb()
    queue_db.add(6)
    for job_id, on in pairs:
        if on < job_id:
            queue_db.store.add_pairs([(job_id, Dependency(job_id=on))])
        else:
            with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
                queue_db.store.add_pairs([(job_id, Dependency(job_id=on))])
    waits_for = {job_id: [other for other, _, _ in queue_db.store.dependencies(job_id)] for job_id in range(1, 7)}
    queue_db.db.close()
    for job_id, others in waits_for.items():
        reached = set(others)
        while more := {each for other in reached for each in waits_for[other]} - reached:
            reached |= more
        assert job_id not in reached


def test_a_dependency_is_kept_once(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    queue_db.store.add_pairs([(second, Dependency(job_id=first))] * 2)
    queue_db.store.add_pairs([(second, Dependency(job_id=first, kind=DependencyKind.ANY))])
    assert queue_db.store.dependencies(second) == [
        (first, DependencyKind.ANY, JobState.QUEUED),
        (first, DependencyKind.OK, JobState.QUEUED),
    ]
    assert queue_db.store.dependants(first) == [second]


def test_an_unknown_state_is_refused_and_a_job_with_attempts_cannot_be_deleted(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        queue_db.db.execute("UPDATE jobs SET state = 'lost'")
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        queue_db.store.change_state(job_id, JobState.DELAYED)
    with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
        queue_db.store.change_state(job_id, JobState.QUEUED, due_at=1.0)
    queue_db.run(*queue_db.add())
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        queue_db.db.execute("DELETE FROM jobs")


@given(st.lists(st.tuples(st.sampled_from(["add", "drop", *JobState]), st.integers(0, 30)), max_size=40))
def test_stored_counts_match_the_jobs(changes: list[tuple[str, int]]) -> None:
    queue_db = QueueDb()
    for what, at in changes:
        ids = [job_id for (job_id,) in queue_db.db.execute("SELECT id FROM jobs ORDER BY id").fetchall()]
        if what == "add":
            queue_db.add(at % 3 + 1)
        elif ids and what == "drop":
            queue_db.db.execute("DELETE FROM jobs WHERE id = ?", (ids[at % len(ids)],))
        elif ids:
            state = JobState(what)
            queue_db.store.change_state(ids[at % len(ids)], state, due_at=1.0 if state is JobState.DELAYED else None)
    counted = dict(queue_db.db.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
    assert queue_db.store.counts() == {state: counted.get(state, 0) for state in JobState}
    queue_db.db.close()


def test_equal_jobs_share_a_lane_in_the_order_of_their_ids(queue_db: QueueDb) -> None:
    queue_db.add(2)
    queue_db.add(1, tag="night")
    queue_db.add(2)
    assert queue_db.ready() == [[1, 2, 4, 5], [3]]
    assert queue_db.store.lane_of(1) is queue_db.store.lane_of(5)


@pytest.mark.parametrize(
    "other", [{"priority": 1}, {"user": "you"}, {"tag": "t"}, {"need": Need(devices=2)}, {"group_limit": 2}]
)
def test_jobs_that_the_planner_treats_differently_have_separate_lanes(queue_db: QueueDb, other: dict[str, Any]) -> None:
    queue_db.add()
    queue_db.add(**other)
    assert queue_db.ready() == [[1], [2]]


def test_a_lane_is_read_back_as_it_was(queue_db: QueueDb) -> None:
    lane = Lane(
        id=0, priority=-2, user="me", tag="t", need=Need(devices=2, only=("a",), model="\udcff"), group=1, group_limit=2
    )
    lane_id = queue_db.store.ensure_lane(lane)
    (job_id,) = queue_db.add()
    queue_db.db.execute("UPDATE jobs SET lane = ?", (lane_id,))
    assert queue_db.store.lane_of(job_id) == replace(lane, id=lane_id)


def test_only_queued_jobs_are_ready(queue_db: QueueDb) -> None:
    for state in sorted(JobState):
        (job_id,) = queue_db.add()
        queue_db.store.change_state(job_id, state, due_at=1.0 if state is JobState.DELAYED else None)
    queued = [job_id for job_id in range(1, 11) if queue_db.job(job_id).state is JobState.QUEUED]
    assert queue_db.ready() == [queued]
    assert queue_db.store.has_ready()
    queue_db.store.change_state(queued[0], JobState.HELD)
    assert not queue_db.store.has_ready()
    assert queue_db.ready() == []


def test_a_long_lane_is_read_to_its_end(queue_db: QueueDb) -> None:
    ids = queue_db.add(300)
    assert queue_db.ready() == [ids]
    assert queue_db.store.count_ahead(queue_db.store.lane_of(1), 250) == 249


def test_ready_jobs_are_found_by_their_index_alone(queue_db: QueueDb) -> None:
    queue_db.add(20)
    queue_db.add(20, tag="night")

    def read_queues() -> None:
        for queue in queue_db.store.ready_queues():
            next(queue.jobs)

    read_queues()
    plan = queue_db.plan_of(read_queues)
    assert [step for step in plan if "jobs" in step] == [step for step in plan if "jobs_ready" in step]
    assert full_scans(plan) == []


def test_a_lane_costs_one_index_lookup_at_any_length(queue_db: QueueDb) -> None:
    def read_queues() -> None:
        for queue in queue_db.store.ready_queues():
            next(queue.jobs)

    queue_db.add(10)
    read_queues()
    little, few = queue_db.effort_of(read_queues), len(queue_db.statements(read_queues))
    queue_db.add(20_000)
    queue_db.add(5_000, state=JobState.SUCCEEDED, ended_at=1.0)
    assert queue_db.effort_of(read_queues) <= little + 10
    assert len(queue_db.statements(read_queues)) == few == 2


def test_the_queries_of_a_step_scan_no_table(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    queue_db.store.add_pairs([(second, Dependency(job_id=first))])
    queue_db.run(first)
    store = queue_db.store
    for act in (
        store.has_ready, store.counts, store.next_due, store.live_attempts, lambda: store.due_jobs(1.0),
        lambda: store.job(1), lambda: store.attempts(1), lambda: store.dependants(1), lambda: store.dependencies(2),
        lambda: store.lane_of(1), lambda: store.state_of(1), lambda: store.learned.profile("x"),
        lambda: store.find_submission("x"),
        lambda: store.count_ahead(store.lane_of(2), 2), lambda: store.dependencies_of([2]),
        lambda: store.may_decide(store.dependants_after(1, 0, 9), JobState.SUCCEEDED),
        lambda: store.with_dependants([1]), lambda: store.may_reject_ready(1, 0),
        lambda: store.batch_state(1), lambda: store.set_batch_state(1, "{}"), lambda: store.last_start_in_batch(1),
    ):  # fmt: skip
        assert full_scans(queue_db.plan_of(act)) == []


def test_a_submission_sent_twice_is_recognized_by_its_token(queue_db: QueueDb) -> None:
    store = queue_db.store
    number, first = store.start_submission("token", 3)
    assert store.find_submission("token") is None
    store.complete_submission(number)
    assert store.find_submission("token") == (first, first + 2)
    assert store.find_submission("another") is None
    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
        store.start_submission("token", 3)


def test_submissions_without_a_token_are_separate(queue_db: QueueDb) -> None:
    assert (queue_db.add(2), queue_db.add(1)) == ([1, 2], [3])
    assert queue_db.store.find_submission("") is None


def test_jobs_of_a_large_submission_are_ready_when_all_are_stored(queue_db: QueueDb) -> None:
    queue_db.add(2, batch=True, complete=False)
    assert queue_db.ready() == []
    queue_db.store.complete_submission(1)
    assert queue_db.ready() == [[1, 2]]


def test_a_job_whose_priority_changes_while_its_submission_arrives_still_waits_for_the_rest(queue_db: QueueDb) -> None:
    queue_db.add(2, batch=True, complete=False)
    queue_db.store.set_priority(1, 5)
    assert queue_db.ready() == []
    queue_db.store.complete_submission(1)
    assert sorted(queue_db.ready()) == [[1], [2]]


def test_an_unacknowledged_submission_is_dropped_and_its_ids_are_not_reused(queue_db: QueueDb) -> None:
    (kept,) = queue_db.add()
    lost = queue_db.add(3, batch=True, complete=False)
    queue_db.store.add_pairs((job_id, Dependency(job_id=kept)) for job_id in lost)
    JobStore(queue_db.db).drop_incomplete_submissions()
    assert [queue_db.store.job(job_id) for job_id in lost] == [None] * 3
    assert queue_db.store.dependants(kept) == []
    assert queue_db.store.counts()[JobState.QUEUED] == 1
    assert queue_db.add() == [5]


def test_a_single_unacknowledged_submission_can_be_dropped_by_its_token(queue_db: QueueDb) -> None:
    for token in ("sent again", "under way"):
        queue_db.store.start_submission(token, 2)
    queue_db.store.drop_incomplete_submissions("sent again")
    _, first = queue_db.store.start_submission("sent again", 2)
    assert first == 5
    assert queue_db.db.execute("SELECT first_id FROM submissions ORDER BY first_id").fetchall() == [(3,), (5,)]


def test_a_reopened_store_knows_the_incomplete_submissions(queue_db: QueueDb) -> None:
    queue_db.add(2, batch=True, complete=False)
    queue_db.add()
    reopened = JobStore(queue_db.db)
    assert [[each.job_id for each in queue.jobs] for queue in reopened.ready_queues()] == [[3]]
    assert [reopened.is_arriving(job_id) for job_id in (1, 2, 3)] == [True, True, False]


def test_ids_continue_after_a_given_last_id(queue_db: QueueDb) -> None:
    queue_db.store.reserve_ids_up_to(41)
    assert queue_db.add() == [42]
    queue_db.store.reserve_ids_up_to(7)
    assert queue_db.add() == [43]


def test_the_array_elements_of_a_submission_are_read_back(queue_db: QueueDb) -> None:
    elements = (
        ArrayElement(index=7),
        ArrayElement(values={"lr": "caf\udce9"}),
        ArrayElement(command=("sh", "-c", "a | b")),
    )
    jobs = [queue_db.job(job_id) for job_id in queue_db.add_each(elements, is_array=True, group_limit=2)]
    assert [(job.index, job.values, job.command) for job in jobs] == [
        (each.index, each.values, each.command) for each in elements
    ]
    assert {(job.group, job.group_limit) for job in jobs} == {(1, 2)}


def test_a_job_is_moved_to_the_lane_of_its_new_priority(queue_db: QueueDb) -> None:
    queue_db.add(2)
    (urgent,) = queue_db.add(priority=5)
    queue_db.store.set_priority(2, 5)
    assert sorted(queue_db.ready()) == [[1], [2, urgent]]
    assert queue_db.job(2).priority == 5
    assert queue_db.store.lane_of(2) is queue_db.store.lane_of(urgent)


def test_a_delayed_job_is_due_at_its_time(queue_db: QueueDb) -> None:
    for job_id, due_at in zip(queue_db.add(3), (30.0, 10.0, 20.0), strict=True):
        queue_db.store.change_state(job_id, JobState.DELAYED, due_at=due_at)
    assert queue_db.store.next_due() == 10.0
    assert queue_db.store.due_jobs(20.0) == [2, 3]
    queue_db.store.change_state(2, JobState.QUEUED)
    assert queue_db.store.next_due() == 20.0


def test_a_job_delayed_after_an_empty_query_is_found(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    for due_at in (10.0, 20.0):
        assert (queue_db.store.next_due(), queue_db.store.due_jobs(99.0)) == (None, [])
        queue_db.store.change_state(job_id, JobState.DELAYED, due_at=due_at)
        assert (queue_db.store.next_due(), queue_db.store.due_jobs(99.0)) == (due_at, [job_id])
        queue_db.store.change_state(job_id, JobState.QUEUED)


def test_a_start_clears_the_reason_of_the_last_end(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    queue_db.store.change_state(
        job_id, JobState.FAILED, reason="exit status 1", ended_at=5.0, outcome=FAILED, failures=1
    )
    queue_db.run(job_id, 2)
    job = queue_db.job(job_id)
    assert (job.state, job.attempts, job.started_at) == (JobState.RUNNING, 2, 110.0)
    assert (job.reason, job.outcome, job.ended_at, job.failures) == (None, None, None, 1)
    queue_db.store.reset_failures(job_id)
    assert queue_db.job(job_id).failures == 0


def test_all_changes_of_a_live_attempt_are_read_back(queue_db: QueueDb) -> None:
    begun = queue_db.run(*queue_db.add())
    assert queue_db.store.attempts(1) == [begun]
    changed = replace(
        begun, stopping=OutcomeKind.TIMED_OUT, kill_at=130.0, reserved_mb=2048.0, parked=SuspendedBy.BY_PERSON,
        suspended_at=150.0, suspended_s=7.5,
        usage=Usage(peaks_mb={"G0": 10.0}, curve=((0.5, 10.0),), grew_at_s=0.5, levels_mb={"G0": 10.0}),
    )  # fmt: skip
    queue_db.store.update_attempt(changed)
    assert [attempt for _, attempt in queue_db.store.live_attempts()] == [changed]


def test_the_end_of_an_attempt_is_read_back(queue_db: QueueDb) -> None:
    begun = queue_db.run(*queue_db.add())
    shortage = Shortage(where=ShortageKind.DEVICE, says="caf\udce9: out of memory", asked_mb=10.0)
    lack = MemoryLack(shortage=shortage, others=(("bob, pid 7", None),))
    shown = replace(lack, shortage=replace(shortage, says="caf?: out of memory"))
    over = Over(before=Started(at=110.0, keeper_pid=9, pid=33), at=120.0, outcome=FAILED, lack=lack)
    queue_db.store.set_phase(replace(begun, phase=over))
    assert queue_db.store.attempts(begun.job_id) == [replace(begun, phase=replace(over, lack=shown))]
    assert queue_db.store.live_attempts() == []


def test_a_job_that_ran_out_of_memory_moves_to_a_lane_with_individual_needs(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2)
    grown = Growth(count=2, memory_mb=4096.0, ram_mb=100.0)
    queue_db.store.set_growth(first, grown)
    assert queue_db.job(first).growth == grown
    assert queue_db.store.lane_of(first).sizes_each
    assert not queue_db.store.lane_of(second).sizes_each
    assert sorted(queue_db.ready()) == [[first], [second]]
    queue_db.store.reset_failures(first)
    assert queue_db.job(first).growth == Growth()


def test_an_attempt_that_never_started_leaves_no_trace(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    queue_db.run(job_id)
    queue_db.store.drop_attempt(job_id, 1)
    assert queue_db.store.attempts(job_id) == []
    assert queue_db.job(job_id).attempts == 0


def test_a_reason_with_a_name_that_is_not_utf_8_can_be_written(queue_db: QueueDb) -> None:
    (job_id,) = queue_db.add()
    queue_db.run(job_id)
    outcome = Outcome(kind=OutcomeKind.CANNOT_START, status=127, reason="there is no program caf\udce9")
    end_attempt(queue_db.store, job_id, 1, outcome, 120.0)
    queue_db.store.change_state(job_id, JobState.FAILED, reason=outcome.reason, ended_at=120.0, outcome=outcome)
    queue_db.store.add_event(job_id, 120.0, "failed", outcome.reason)
    shown = "there is no program caf?"
    assert queue_db.job(job_id).reason == shown
    assert queue_db.job(job_id).outcome == replace(outcome, reason=shown)
    assert queue_db.queries.events(job_id) == [(120.0, "failed", shown)]


def test_cached_rows_of_a_rolled_back_transaction_are_dropped(queue_db: QueueDb) -> None:
    """The next rows get the ids of the rows that were rolled back."""
    assert queue_db.store.setting("paused") is None

    def add_and_fail() -> None:
        with queue_db.store.transaction():
            (undone,) = queue_db.add(tag="undone")
            assert queue_db.job(undone).spec.tag == queue_db.store.lane_of(undone).tag == "undone"
            queue_db.store.set_setting("paused", "1")
            assert queue_db.store.setting("paused") == "1"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        add_and_fail()
    assert queue_db.store.setting("paused") is None
    assert queue_db.store.job(1) is None
    (job_id,) = queue_db.add(tag="done")
    assert queue_db.job(job_id).spec.tag == queue_db.store.lane_of(job_id).tag == "done"


def test_use_and_profiles_are_replaced_as_they_grow(queue_db: QueueDb) -> None:
    learned = Profile(label="run", count=1, durations_s=(2.0,))
    for seconds in (5.0, 9.0):
        queue_db.store.learned.set_recent_use(("me", "t"), WeightedUse(seconds=seconds, at=100.0))
        queue_db.store.learned.set_profile(
            "f", replace(learned, durations_s=(seconds,), peaks_mb=(seconds,), seen_at=seconds)
        )
    assert queue_db.store.learned.recent_use() == {("me", "t"): WeightedUse(seconds=9.0, at=100.0)}
    assert queue_db.store.learned.profile("f") == replace(learned, durations_s=(9.0,), peaks_mb=(9.0,), seen_at=9.0)
    assert queue_db.store.learned.profile("g") is None


def test_a_submission_that_gets_the_id_of_a_refused_one_is_not_refused(queue_db: QueueDb) -> None:
    store = queue_db.store
    refused, first = store.start_submission("again", 3)
    store.refused.add(refused, first, first + 2)
    assert store.refused
    store.drop_incomplete_submissions("again")
    assert store.start_submission("again", 3)[0] == refused
    assert not store.refused
