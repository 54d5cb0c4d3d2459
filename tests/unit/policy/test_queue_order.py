"""Queue order. Times are in seconds, and `now` is far from zero so that jobs can be old."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lease import Need
from gpuyard.policy.numbers import AGEING_S, MOST_LANES, USE_HALF_LIFE_S
from gpuyard.policy.queue_order import (
    Candidate,
    Lane,
    LaneQueue,
    Party,
    QueueOrder,
    WeightedUse,
    add_use,
    current_priority,
    full_order,
    weight,
)
from tests.known import known

NOW = 1_000_000.0


class Jobs:
    """Jobs of a lane that count how many of them were fetched."""

    def __init__(self, *jobs: tuple[int, float]) -> None:
        self.taken = 0
        self._jobs = jobs

    def __iter__(self) -> Iterator[Candidate]:
        for job_id, waited_s in self._jobs:
            self.taken += 1
            yield Candidate(job_id=job_id, queued_at=NOW - waited_s)


def queue(lane_id: int, *jobs: tuple[int, float], priority: int = 0, tag: str = "", devices: int = 1) -> LaneQueue:
    """Return a lane of jobs, given as (id, seconds waited)."""
    lane = Lane(id=lane_id, priority=priority, user="me", tag=tag, need=Need(devices=devices))
    return LaneQueue(lane=lane, jobs=iter(Jobs(*jobs)))


def order(line: QueueOrder) -> list[int]:
    """Return the ids in the order in which the jobs would start on idle devices."""
    ids = []
    while (first := line.first()) is not None:
        ids.append(first[1].job_id)
        line.advance()
    return ids


def test_priority_goes_before_use_and_use_before_submission() -> None:
    used: dict[Party, float] = {("me", "busy"): 500.0, ("me", "idle"): 3.0}
    queues = [queue(1, (10, 50), tag="busy"), queue(2, (11, 40), tag="idle"), queue(3, (12, 1), tag="busy", priority=1)]
    assert order(QueueOrder(queues, used, NOW)) == [12, 11, 10]
    # Within a tag the first submitted job goes first in any lane.
    queues = [queue(1, (10, 50), (13, 20)), queue(2, (11, 40), (12, 30))]
    assert order(QueueOrder(queues, {}, NOW)) == [10, 11, 12, 13]
    # At the same moment the lower id goes first.
    assert order(QueueOrder([queue(1, (12, 5)), queue(2, (11, 5))], {}, NOW)) == [11, 12]
    queues = [
        queue(1, *((each, 90) for each in range(10, 13)), tag="a"),
        queue(2, *((each, 80) for each in range(20, 23)), tag="b"),
    ]
    assert order(QueueOrder(queues, {}, NOW)) == [10, 20, 11, 21, 12, 22], "two tags take turns within one step"
    queues = [
        queue(1, (10, 90), (11, 90), tag="wide", devices=2),
        queue(2, *((each, 80) for each in range(20, 24)), tag="small"),
    ]
    assert order(QueueOrder(queues, {}, NOW)) == [10, 20, 21, 11, 22, 23], "a start counts by its devices"


def test_each_ageing_period_is_worth_one_level() -> None:
    assert current_priority(0, NOW - AGEING_S + 1, NOW) == 0
    assert current_priority(0, NOW - AGEING_S, NOW) == 1
    assert current_priority(-3, NOW - 5 * AGEING_S, NOW) == 2
    assert current_priority(4, NOW + 3600, NOW) == 4, "a clock that was set back costs no priority"


@given(low=st.integers(-100, 100), lead=st.integers(1, 50), used=st.floats(0, 1e9))
def test_an_aged_job_outruns_every_fresh_one_of_higher_priority(low: int, lead: int, used: float) -> None:
    """However much its tag has used: it only takes a period more than the priorities are apart."""
    waited = (lead + 1) * AGEING_S
    old, fresh = queue(1, (10, waited), priority=low, tag="old"), queue(2, (99, 0), priority=low + lead, tag="new")
    assert order(QueueOrder([fresh, old], {("me", "old"): used}, NOW)) == [10, 99]


@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.sampled_from("ab"), st.floats(0, 5000)), min_size=1, max_size=12, unique=True
    ),
    st.dictionaries(st.sampled_from([("me", "a"), ("me", "b")]), st.floats(0, 100)),
)
def test_the_first_is_never_behind_another(jobs: list[tuple[int, str, float]], used: dict[Party, float]) -> None:
    queues = [queue(at, (at, waited), priority=priority, tag=tag) for at, (priority, tag, waited) in enumerate(jobs)]
    first = known(QueueOrder(queues, used, NOW).first())

    def rank(job_id: int) -> tuple[int, float, int]:
        priority, tag, waited = jobs[job_id]
        return -current_priority(priority, NOW - waited, NOW), used.get(("me", tag), 0.0), job_id

    assert rank(first[1].job_id) == min(map(rank, range(len(jobs))))


def test_a_lane_is_read_as_its_jobs_start_and_dropped_at_once() -> None:
    jobs = Jobs(*((each, 10.0) for each in range(1000)))
    lane = Lane(id=1, priority=0, user="me", tag="", need=Need())
    line = QueueOrder([LaneQueue(lane=lane, jobs=iter(jobs))], {}, NOW)
    for started in range(3):
        assert jobs.taken == started + 1
        line.advance()
    one, other = queue(1, (10, 9), (11, 9)), queue(2, (20, 1))
    line = QueueOrder([one, other], {}, NOW)
    line.drop()
    assert order(line) == [20], "a lane that is dropped is not asked again"


def test_only_the_first_of_very_many_lanes_are_considered() -> None:
    def many() -> list[LaneQueue]:
        return [queue(each, (each, float(each))) for each in range(MOST_LANES + 20)]

    assert order(QueueOrder(many(), {}, NOW)) == list(range(MOST_LANES))
    assert [each.job_id for each in full_order(many(), {}, NOW)] == list(range(MOST_LANES + 20))
    # Very many lanes with devices do not hide one without.
    queues = [queue(each, (each, 500.0), priority=9) for each in range(1, MOST_LANES + 20)]
    assert 777 in order(QueueOrder([*queues, queue(777, (777, 0.0), devices=0)], {}, NOW))


def test_use_weighs_half_after_each_half_life() -> None:
    use = WeightedUse(seconds=80.0, at=NOW)
    assert weight(use, NOW) == 80.0
    assert weight(use, NOW + USE_HALF_LIFE_S) == pytest.approx(40.0)
    assert weight(use, NOW + 3 * USE_HALF_LIFE_S) == pytest.approx(10.0)
    assert weight(use, NOW - 500.0) == 80.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=10), st.floats(0, 1e6))
def test_added_use_weighs_as_each_piece(pieces: list[tuple[float, float]], rest: float) -> None:
    use, now, apart = WeightedUse(), 0.0, []
    for seconds, elapsed in pieces:
        now += elapsed
        use = add_use(use, seconds, now)
        apart.append(WeightedUse(seconds=seconds, at=now))
    assert weight(use, now + rest) == pytest.approx(sum(weight(each, now + rest) for each in apart), rel=1e-6, abs=1e-6)
