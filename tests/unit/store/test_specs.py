"""Secrets that were dropped: which jobs lack them, and what stays of those that were supplied."""

from collections import deque

import pytest

from tests.unit.store import QueueDb


@pytest.fixture
def dropped(queue_db: QueueDb) -> list[int]:
    """Jobs of an array that have ended, whose secrets were dropped."""
    environment = {"HOME": "/", "A_TOKEN": "a", "B_TOKEN": "b"}
    ids = queue_db.add(3, environment=environment, secrets=("A_TOKEN", "B_TOKEN"), is_array=True)
    for job_id in ids:
        queue_db.finish(job_id, 200.0)
    for _ in queue_db.store.specs.drop_secrets():
        pass
    return ids


def test_a_job_that_may_run_without_its_secrets_speaks_for_itself(queue_db: QueueDb, dropped: list[int]) -> None:
    specs, (first, second, third) = queue_db.store.specs, dropped
    assert specs.supply([first], {}, allow_missing=True) == {}
    assert specs.supply([second], {}, allow_missing=False) == {second: ("A_TOKEN", "B_TOKEN")}
    assert specs.supply([first], {"A_TOKEN": "new"}, allow_missing=True) == {}
    assert specs.supply([second], {}, allow_missing=False) == {second: ("B_TOKEN",)}
    assert specs.supply([second, third], {"B_TOKEN": "too"}, allow_missing=False) == {}
    assert queue_db.job(third).spec.environment == {"HOME": "/", "A_TOKEN": "new", "B_TOKEN": "too"}
    assert specs.supply([first], {}, allow_missing=False) == {}


def test_secrets_stay_until_all_jobs_of_an_array_have_ended(queue_db: QueueDb) -> None:
    first, second = queue_db.add(2, environment={"A_TOKEN": "a"}, secrets=("A_TOKEN",), is_array=True)
    queue_db.finish(second, 200.0)
    deque(queue_db.store.specs.drop_secrets())
    assert queue_db.job(first).spec.environment == {"A_TOKEN": "a"}
    queue_db.finish(first, 201.0)
    deque(queue_db.store.specs.drop_secrets())
    assert queue_db.job(first).spec.environment == {}
