"""What the queue learns from suspensions, and that it outlasts the daemon."""

from collections.abc import Iterator

import pytest

from gpuyard.policy.preempt import MoveRates
from gpuyard.queue.suspend_jobs import LearnedRates
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore

GB = 1024.0


@pytest.fixture
def store() -> Iterator[JobStore]:
    database, _ = open_database(None)
    yield JobStore(database)
    database.close()


def move(learned: LearnedRates, store: JobStore, job_id: int, gigabytes: float, seconds: float) -> None:
    """End a move that began at 100 s."""
    with store.transaction():
        learned.end(job_id, gigabytes * GB, seconds, 100.0 + seconds, is_resumed=False, is_parked=False)


def test_a_rate_is_learned_and_known_to_the_next_daemon(store: JobStore) -> None:
    learned = LearnedRates(store)
    assert learned.rates == MoveRates()
    learned.begin(1, 100.0, is_resumed=False)
    move(learned, store, 1, 35.0, 9.0)
    assert learned.rates.out_mb_s > MoveRates().out_mb_s
    assert LearnedRates(store).rates == learned.rates


def test_programs_side_by_side_teach_what_they_reach_together(store: JobStore) -> None:
    learned = LearnedRates(store)
    for job_id in (1, 2):
        learned.begin(job_id, 100.0, is_resumed=False)
    move(learned, store, 1, 40.0, 4.0)
    assert learned.rates == MoveRates(), "the other is still moving"
    move(learned, store, 2, 40.0, 5.0)
    assert learned.rates.together_mb_s > MoveRates().together_mb_s
    assert learned.rates.out_mb_s == MoveRates().out_mb_s


@pytest.mark.parametrize("why", ["one failed", "one began later", "one was resumed"])
def test_a_mixed_group_teaches_nothing(store: JobStore, why: str) -> None:
    learned = LearnedRates(store)
    learned.begin(1, 100.0, is_resumed=False)
    learned.begin(2, 104.0 if why == "one began later" else 100.0, is_resumed=why == "one was resumed")
    if why == "one failed":
        learned.fail(2, is_resumed=False)
    else:
        with store.transaction():
            learned.end(2, 40 * GB, 1.0, 105.0, is_resumed=why == "one was resumed", is_parked=False)
    move(learned, store, 1, 40.0, 5.0)
    assert learned.rates == MoveRates()


def test_what_cannot_be_read_and_a_move_of_an_earlier_daemon_teach_nothing(store: JobStore) -> None:
    with store.transaction():
        store.set_setting("move_rates", '{"out_mb_s": "fast"}')
    assert LearnedRates(store).rates == MoveRates()
    learned = LearnedRates(store)
    move(learned, store, 1, 40.0, 5.0)
    assert learned.rates == MoveRates()
