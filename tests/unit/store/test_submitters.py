"""Which jobs a process has submitted, and which of them a wait has not reported yet."""

import pytest

from gpuyard.model.lifecycle import JobState
from gpuyard.store.specs_and_code import _join_nearest
from tests.unit.store import QueueDb


def submit(queue_db: QueueDb, count: int, *processes: str) -> None:
    """Add jobs that these processes have submitted."""
    queue_db.add(count)
    newest = queue_db.db.value("SELECT max(id) FROM submissions")
    queue_db.store.submitters.add(newest, processes)


def end(queue_db: QueueDb, job_id: int, at: float) -> None:
    queue_db.store.change_states([job_id], JobState.CANCELLED, at, reason=None)


def test_the_nearest_process_that_has_submitted_jobs_is_found(queue_db: QueueDb) -> None:
    submit(queue_db, 2, "script", "shell")
    submit(queue_db, 1, "shell")
    found = queue_db.store.submitters
    assert found.nearest(["wrapper", "shell"]) == "shell"
    assert found.nearest(["another"]) is None
    assert found.unreported("script") == [(1, 2)]
    assert found.unreported("shell") == [(1, 3)]


def test_reported_jobs_return_when_they_have_run_again(queue_db: QueueDb) -> None:
    submit(queue_db, 3, "shell")
    submit(queue_db, 1, "shell")
    found = queue_db.store.submitters
    for job_id in (1, 2, 3, 4):
        end(queue_db, job_id, at=10.0)
    found.mark_reported("shell", [(1, 2)], 20.0, is_complete=False)
    assert found.unreported("shell") == [(1, 4)], "a part of a submission was reported"
    found.mark_reported("shell", [(1, 4)], 20.0, is_complete=True)
    assert found.unreported("shell") == []
    end(queue_db, 2, at=30.0)
    assert found.unreported("shell") == [(2, 2)]
    found.mark_reported("shell", [(2, 2)], 40.0, is_complete=True)
    assert found.unreported("shell") == []


def test_another_shell_cannot_mark_jobs_as_reported_and_processes_go_with_submissions(queue_db: QueueDb) -> None:
    submit(queue_db, 1, "shell")
    queue_db.store.submitters.mark_reported("another", [(1, 1)], 20.0, is_complete=True)
    assert queue_db.store.submitters.unreported("shell") == [(1, 1)]
    submit(queue_db, 1, "shell", "shell")
    queue_db.db.execute("DELETE FROM submissions")
    assert queue_db.store.submitters.nearest(["shell"]) is None


@pytest.mark.parametrize(
    ("most", "joined"),
    [(9, [(1, 1), (3, 4), (9, 9), (20, 22)]), (3, [(1, 4), (9, 9), (20, 22)]), (2, [(1, 9), (20, 22)]), (1, [(1, 22)])],
)
def test_of_many_ranges_the_nearest_are_joined(most: int, joined: list[tuple[int, int]]) -> None:
    assert _join_nearest([(1, 1), (3, 4), (9, 9), (20, 22)], most) == joined
