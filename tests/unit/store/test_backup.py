"""What a restored queue does not repeat: the numbers of attempts that have run since the backup."""

from contextlib import closing
from pathlib import Path

from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.lifecycle import JobState
from gpuyard.store.backup import back_up, checked_backup, restore
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from tests.unit.store import QueueDb, end_attempt


def test_attempts_that_have_begun_since_the_backup_count_also_those_of_finished_jobs(tmp_path: Path) -> None:
    path, before = tmp_path / "queue.db", QueueDb(tmp_path / "queue.db")
    with closing(before.db):
        waiting, finished, other = before.add(3)
        before.run(finished)
        end_attempt(before.store, finished, 1, Outcome(kind=OutcomeKind.FAILED), 120.0)
        before.finish(finished, 120.0, JobState.FAILED)
        back_up(path, tmp_path / "backup")
    with checked_backup(tmp_path / "backup", tmp_path) as draft:
        restored = restore(draft, path, {waiting: 2, finished: 3, 99: 1})
    assert restored.begun == [waiting]
    database, _ = open_database(path)
    with closing(database):
        found = map(JobStore(database).job, (waiting, finished, other))
        assert [job and job.attempts for job in found] == [2, 3, 0]
