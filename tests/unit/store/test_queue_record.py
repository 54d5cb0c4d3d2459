"""The record beside the database shows whether the database is older than the queue was."""

import contextlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.store.database import Database, QueueProgress, QueueRecord, compare, open_database, open_reader
from gpuyard.store.job_store import JobStore
from tests.unit.store.sample_queue import fill

FILES = ("queue.db", "queue.db-wal", "queue.record")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@contextlib.contextmanager
def opened(home: Path) -> Iterator[tuple[Database, str | None]]:
    database, notice = open_database(home / "queue.db")
    try:
        yield database, notice
    finally:
        database.close()


def notice_of(home: Path) -> str | None:
    with opened(home) as (_, notice):
        return notice


def copy(home: Path, to: Path, *names: str) -> Path:
    """Copy the files of an open database as they are at this moment, as a crash would leave them."""
    to.mkdir()
    for name in names:
        shutil.copy(home / name, to / name)
    return to


def count_in(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM jobs").fetchone()[0])


def has_unsaved(database: Database) -> bool:
    return database.has_unsaved


def test_a_queue_that_was_closed_or_killed_has_no_notice(home: Path, tmp_path: Path) -> None:
    assert notice_of(home) is None
    with opened(home) as (database, _):
        fill(JobStore(database))
        killed = copy(home, tmp_path / "killed", *FILES)
    assert notice_of(home) is None
    assert notice_of(killed) is None
    assert not (home / "queue.db-wal").exists()


def test_a_save_puts_all_jobs_into_the_file(home: Path, tmp_path: Path) -> None:
    with opened(home) as (database, _):
        store = JobStore(database)
        fill(store)
        assert has_unsaved(database)
        assert database.save()
        saved = copy(home, tmp_path / "saved", "queue.db", "queue.record")
        assert count_in(saved / "queue.db") == sum(store.counts().values()) > 0
        assert not has_unsaved(database)
        with database.transaction():
            pass
        assert not has_unsaved(database), "a transaction without changes"
    assert notice_of(saved) is None


def test_a_reader_only_delays_a_save(home: Path) -> None:
    with opened(home) as (database, _), contextlib.closing(open_reader(home / "queue.db")) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM jobs").fetchone()
        fill(JobStore(database))
        assert not database.save()
        assert has_unsaved(database)
        reader.execute("COMMIT")
        assert database.save()


def remove_log(saved: Path, home: Path) -> None:
    (home / "queue.db-wal").unlink()


def remove_all(saved: Path, home: Path) -> None:
    for name in ("queue.db", "queue.db-wal"):
        (home / name).unlink()


def empty(saved: Path, home: Path) -> None:
    remove_log(saved, home)
    (home / "queue.db").write_bytes(b"")


def put_back(saved: Path, home: Path) -> None:
    remove_log(saved, home)
    shutil.copy(saved / "queue.db", home)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (remove_log, "the write-ahead log of the queue's database (queue.db-wal) was removed"),
        (remove_all, "the queue's database was missing or empty, and gpuyard started a new one"),
        (empty, "the queue's database was missing or empty, and gpuyard started a new one"),
        (put_back, "the queue's database is an older copy"),
    ],
)
def test_lost_changes_are_noticed_once_and_ids_are_not_given_again(
    home: Path, tmp_path: Path, harm: Callable[[Path, Path], None], said: str
) -> None:
    with opened(home) as (database, _):
        store = JobStore(database)
        fill(store)
        assert database.save()
        saved = copy(home, tmp_path / "saved", "queue.db", "queue.record")
        with store.transaction():
            store.start_submission("", 5)
        assert database.save()
        with store.transaction():
            _, last = store.start_submission("", 1)
        killed = copy(home, tmp_path / "killed", *FILES)
    harm(saved, killed)
    with opened(killed) as (database, notice):
        assert notice is not None
        assert notice.startswith(said)
        assert f"job ids up to {last} were given" in notice
        assert JobStore(database).start_submission("", 1)[1] == last + 1
    assert notice_of(killed) is None


def test_without_a_record_a_copied_database_is_a_queue(home: Path, tmp_path: Path) -> None:
    with opened(home) as (database, _):
        fill(JobStore(database))
    assert notice_of(copy(home, tmp_path / "copy", "queue.db")) is None


def test_a_daemon_that_was_killed_between_a_save_and_its_record_has_lost_nothing() -> None:
    recorded = QueueProgress(7, 12, has_unsaved=True)
    assert compare(recorded, QueueProgress(8, 12), was_new=False, has_log=False) is None
    assert compare(recorded, QueueProgress(7, 12), was_new=False, has_log=True) is None
    assert compare(recorded, QueueProgress(7, 12), was_new=False, has_log=False) is not None


@pytest.mark.parametrize("content", [b"", b"nonsense", b"1 2 3\n", b"\xff" * 200])
def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "queue.record").write_bytes(content)
    record = QueueRecord(tmp_path / "queue.record")
    assert record.progress == QueueProgress()
    record.write(QueueProgress(3, 4, has_unsaved=True))
    record.write(QueueProgress(4, 0))
    record.close()
    again = QueueRecord(tmp_path / "queue.record")
    assert again.progress == QueueProgress(4, 4), "the highest id stays"
    again.close()
