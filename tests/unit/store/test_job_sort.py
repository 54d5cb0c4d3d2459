"""Pages of jobs in an order that a user chose."""

from typing import get_args

import pytest

from gpuyard.model.job import Attempt, Started
from gpuyard.model.lifecycle import JobState
from gpuyard.schema.requests import JobOrder
from gpuyard.store.search_jobs import SORT_VALUES, JobFilter, PageRange
from tests.unit.store.test_job_search import ALL, NOW, Queue, queue  # noqa: F401 - fixtures are found where they are named


def _end(queue: Queue, job_id: int, started_at: float, ended_at: float, **more: object) -> None:  # noqa: F811
    attempt = Attempt(
        job_id=job_id, number=1, phase=Started(at=started_at, keeper_pid=9), boot_id="b",
        devices=(str(more["device"]),), reserved_mb=float(str(more["reserved_mb"])),
    )  # fmt: skip
    with queue.store.transaction():
        queue.store.start_attempt(attempt)
        queue.store.change_state(job_id, JobState.FAILED, ended_at=ended_at, reason=str(more["reason"]))


@pytest.fixture
def three(queue: Queue) -> Queue:  # noqa: F811
    """A job that waits, and two that have failed."""
    queue.add("python train.py", name="vit", priority=3, submitted_at=NOW - 50)
    queue.add("bash run.sh", submitted_at=NOW - 500)
    queue.add("python eval.py", name="Alpha", priority=-1, submitted_at=NOW - 500)
    _end(queue, 2, NOW - 400, NOW - 100, reason="ValueError: loss is NaN", device="GPU-1", reserved_mb=900)
    _end(queue, 3, NOW - 400, NOW - 390, reason="killed", device="GPU-2", reserved_mb=500)
    return queue


def _ids(queue: Queue, order: str, **wanted: object) -> list[int]:  # noqa: F811
    return queue.search.sorted(JobFilter(**wanted), ALL, order, NOW).ids  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "ids"),
    [
        ("id", [1, 2, 3]), ("-id", [3, 2, 1]), ("priority", [3, 2, 1]), ("-priority", [1, 2, 3]),
        ("name", [3, 2, 1]), ("-name", [1, 2, 3]), ("state", [1, 3, 2]), ("-state", [3, 2, 1]),
        ("time", [3, 1, 2]), ("-time", [2, 1, 3]), ("reason", [3, 2, 1]), ("-reason", [2, 3, 1]),
        ("gpu", [2, 3, 1]), ("-gpu", [3, 2, 1]), ("memory", [3, 2, 1]), ("-memory", [2, 3, 1]),
    ],
)  # fmt: skip
def test_jobs_are_sorted_by_a_column_and_those_without_a_value_are_last(
    three: Queue, order: str, ids: list[int]
) -> None:
    assert _ids(three, order) == ids


def test_a_sorted_list_is_filtered_and_paged(three: Queue) -> None:
    assert _ids(three, "-time", states=(JobState.FAILED,)) == [2, 3]
    assert _ids(three, "id", search="python") == [1, 3]
    page = three.search.sorted(JobFilter(), PageRange(offset=1, count=1), "-id", NOW)
    assert (page.ids, page.total) == ([2], 3)


def test_every_order_of_a_request_can_be_sorted_by(three: Queue) -> None:
    orders = set(get_args(JobOrder)) - {"queue", "newest"}
    assert orders == {f"{sign}{key}" for key in SORT_VALUES for sign in ("", "-")}
    assert all(sorted(_ids(three, order)) == [1, 2, 3] for order in orders)
