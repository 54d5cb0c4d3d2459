"""A page of the queue that SQL returns equals the page that a walk over all jobs gives."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.lifecycle import FINISHED, JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.policy.numbers import AGEING_S
from gpuyard.policy.queue_order import QueueOrder
from gpuyard.store.database import Database, open_database, open_reader
from gpuyard.store.job_store import JobStore
from gpuyard.store.search_jobs import JobFilter, PageRange, Search
from tests.unit.store.sample_queue import SPEC, like, submit

NOW = 1_000_000.0
ALL = PageRange(offset=0, count=10_000)


class Queue:
    """A queue on disk, with a writing and a reading connection."""

    def __init__(self, database: Database, reader: sqlite3.Connection) -> None:
        self.store = JobStore(database)
        self.search = Search(reader)

    def add(self, command: str = "true", *elements: ArrayElement, **facts: object) -> int:
        words = tuple(command.split(" "))
        spec = replace(SPEC, command=words, need=replace(SPEC.need, devices=int(str(facts.pop("devices", 1)))),
                       name=facts.pop("name", None), tag=facts.pop("tag", ""), is_array=len(elements) > 1)  # fmt: skip
        with self.store.transaction():
            return submit(self.store, replace(like(spec), **facts), elements or (ArrayElement(),))

    def found(self, **wanted: object) -> list[int]:
        return self.search.page(JobFilter(**wanted), {}, NOW, ALL, show_all=True).ids  # type: ignore[arg-type]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    database, _ = open_database(tmp_path / "queue.db")
    with closing(database), closing(open_reader(database.path)) as reader:
        yield Queue(database, reader)


def walked(queue: Queue, used: dict[tuple[str, str], float]) -> list[int]:
    line = QueueOrder(queue.store.ready_queues(), used, NOW)
    found = []
    while (first := line.first()) is not None:
        found.append(first[1].job_id)
        line.advance()
    return found


jobs = st.tuples(
    st.sampled_from(["ann", "bob"]), st.sampled_from(["", "night", "day"]), st.integers(-1, 1), st.integers(0, 3),
    st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(jobs, max_size=25),
    st.dictionaries(st.tuples(st.sampled_from(["ann", "bob"]), st.sampled_from(["", "night"])), st.integers(0, 6)),
)
def test_queued_jobs_are_paged_in_queue_order(
    tmp_path_factory: pytest.TempPathFactory,
    facts: list[tuple[str, str, int, int, int]],
    used: dict[tuple[str, str], int],
) -> None:
    database, _ = open_database(tmp_path_factory.mktemp("queue") / "queue.db")
    with closing(database), closing(open_reader(database.path)) as reader:
        queue = Queue(database, reader)
        for user, tag, priority, devices, age in facts:
            job_id = queue.add(user=user, tag=tag, priority=priority, devices=devices, submitted_at=NOW)
            queue.store.change_state(job_id, JobState.QUEUED, queued_at=NOW - age * AGEING_S)
        weights = {party: float(weight) for party, weight in used.items()}
        expected = walked(queue, weights)
        pages = [
            queue.search.page(JobFilter(), weights, NOW, PageRange(offset=offset, count=4), show_all=False)
            for offset in range(0, len(facts) + 1, 4)
        ]
        assert [job_id for page in pages for job_id in page.ids] == expected
        assert {page.total for page in pages} == {len(facts)}
        nights = [job_id for job_id in expected if facts[job_id - 1][1] == "night"]
        assert queue.search.page(JobFilter(tag="night"), weights, NOW, ALL, show_all=False).ids == nights


def fill(queue: Queue) -> dict[str, int]:
    """A job in each state, some twice."""
    found: dict[str, int] = {}
    for number, state in enumerate([*JobState, *JobState]):
        name = f"{state}-{number >= len(JobState)}"
        job_id = found[name] = queue.add("python train.py", name=name, tag="x" if number % 2 else "")
        is_over = state in FINISHED
        with queue.store.transaction():
            queue.store.change_state(
                job_id, state, ended_at=1000.0 + number if is_over else None,
                due_at=5.0 if state is JobState.DELAYED else None,
                outcome=Outcome(kind=OutcomeKind.FAILED) if is_over else None,
            )  # fmt: skip
    return found


def test_a_search_lists_jobs_in_the_order_of_the_whole_list(queue: Queue) -> None:
    found = fill(queue)
    whole = queue.found()
    assert sorted(whole) == sorted(found.values())
    assert queue.found(search="train") == whole
    assert queue.found(tag="x") == [job_id for job_id in whole if job_id % 2 == 0]
    chosen = (JobState.HELD, JobState.FAILED, JobState.RUNNING)
    by_state = [found[f"{state}-{again}"] for state, again in [
        ("running", False), ("running", True), ("held", False), ("held", True), ("failed", True), ("failed", False),
    ]]  # fmt: skip
    assert queue.found(states=chosen) == queue.found(states=chosen, search="train") == by_state
    newest = queue.search.newest(JobFilter(states=chosen), PageRange(offset=1, count=2))
    assert (newest.ids, newest.total) == (sorted(by_state, reverse=True)[1:3], 6)
    assert queue.search.newest(JobFilter(search="TRAIN"), PageRange(offset=1, count=2)).ids == [
        len(whole) - 1,
        len(whole) - 2,
    ]


def test_a_job_that_is_no_longer_queued_is_listed_with_its_state(queue: Queue) -> None:
    ids = [queue.add(tag="x", priority=priority) for priority in (0, 1, 2, 3)]
    assert queue.found(tag="x") == ids[::-1]
    for job_id in ids[1:3]:
        with queue.store.transaction():
            queue.store.change_state(job_id, JobState.HELD)
    assert queue.found(tag="x", states=(JobState.HELD,)) == ids[1:3]
    assert queue.found(tag="x") == [ids[3], ids[0], ids[1], ids[2]]


def test_only_the_last_ten_finished_jobs_are_listed_by_default(queue: Queue) -> None:
    for _ in range(3):
        fill(queue)
    place = PageRange(offset=70, count=50)
    short = queue.search.page(JobFilter(), {}, NOW, place, show_all=False)
    assert short.total == 84 - 24 + 10
    assert short.ids == []
    assert queue.search.page(JobFilter(), {}, NOW, place, show_all=True).total == 84


@pytest.mark.parametrize(
    ("search", "matches"),
    [
        ("train.py --lr 0.1", ["sweep-1"]), ("seed=12", ["array-12"]), ("a | b", ["own"]),
        ("sh -c 'a | b'", ["own"]), ("CAFÉ".lower(), ["café"]), ("50%", ["percent"]), ("5_%", []),
        ("_", ["percent"]), ("\\", ["backslash"]), ('say "x"', ["quoted"]), ("night", ["tagged"]),
        ("big", ["named"]), ("{lr}", []), ("secret", []), ("' OR 1=1 --", []),
    ],
)  # fmt: skip
def test_a_search_matches_exactly_what_is_displayed(queue: Queue, search: str, matches: list[str]) -> None:
    lr = [ArrayElement(values={"lr": value}) for value in ("0.2", "0.1", "1e-4")]
    first = queue.add("python train.py --lr {lr} --out {x}", *lr)
    arrays = queue.add("run seed={index} {strange", *(ArrayElement(index=index) for index in (11, 12)))
    commands = [("/bin/sh", "-c", "a | b"), ("cat", "café"), ("say", 'say "x"')]
    own = queue.add("", *(ArrayElement(command=command) for command in commands))
    known = {
        "sweep-1": first + 1, "array-12": arrays + 1, "own": own, "café": own + 1, "quoted": own + 2,
        "percent": queue.add("dd 50%_"), "backslash": queue.add("a\\b"),
        "tagged": queue.add("t", tag="nightly"), "named": queue.add("n", name="bigone"),
    }  # fmt: skip
    assert queue.found(search=search) == [known[match] for match in matches]


def test_a_search_for_a_number_finds_the_job_with_that_id(queue: Queue) -> None:
    for _ in range(12):
        queue.add("true")
    assert queue.found(search="12") == [12]


def test_matching_jobs_are_returned_as_ranges_of_ids(queue: Queue) -> None:
    for place in range(9):
        queue.add("a" if place in (2, 5, 6) else "b", user="ann" if place < 8 else "bob")
    assert queue.search.ranges(JobFilter(search="b")) == [(1, 2), (4, 5), (8, 9)]
    assert queue.search.ranges(JobFilter(search="b", user="ann")) == [(1, 2), (4, 5), (8, 8)]
    assert queue.search.ranges(JobFilter(search="c")) == []
    assert queue.found(ranges=((2, 4), (8, 9)), search="b") == [2, 4, 8, 9]


def test_jobs_of_an_incomplete_submission_are_not_listed(queue: Queue) -> None:
    queue.add("true")
    number, first = queue.store.start_submission("", 2)
    job = replace(like(replace(SPEC, command=("true",))), id=first)
    from gpuyard.store.row_codec import lane_of

    with queue.store.transaction():
        lane = queue.store.ensure_lane(lane_of(job, number))
        queue.store.add_jobs(job, queue.store.add_spec(job.spec), lane, first, [ArrayElement(), ArrayElement()])
    assert queue.found() == queue.found(search="true") == [1]
    with queue.store.transaction():
        queue.store.complete_submission(number)
    assert queue.found() == queue.found(search="true") == [1, 2, 3]
