"""The write-ahead log moves into the database's file in another thread, and the loop's connection never waits."""

import contextlib
import errno
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.store.checkpoints import WalCheckpoints
from gpuyard.store.database import Database, open_database, open_reader

_SALT = slice(16, 24)  # of the log's header: it is new in each round of the log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home" / "queue.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    database, _ = open_database(path)
    database.leave_disk_to(lambda: None)
    write(database, "first")
    yield database
    database.close()


@pytest.fixture
def checkpoints(database: Database) -> Iterator[WalCheckpoints]:
    with contextlib.closing(WalCheckpoints(database)) as checkpoints:
        yield checkpoints


def write(database: Database, name: str) -> None:
    with database.transaction():
        database.execute("INSERT INTO settings VALUES (?, '1')", (name,))


def names_in(path: Path) -> set[str]:
    """Return the settings in a file, without its log."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as file:
        return {name for (name,) in file.execute("SELECT name FROM settings")} - {"next_id", "generation"}


def names_after_kill(path: Path, to: Path) -> set[str]:
    """Return the settings that a daemon would find if this one was killed now."""
    to.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", to / f"queue.db{suffix}")
    found, _ = open_database(to / "queue.db")
    with contextlib.closing(found):
        assert found.value("PRAGMA integrity_check") == "ok"
        return set(found.column("SELECT name FROM settings")) - {"next_id", "generation"}


def salt_of(path: Path) -> bytes:
    return Path(f"{path}-wal").read_bytes()[_SALT]


@pytest.mark.parametrize("is_truncated", [False, True])
def test_an_emptied_log_is_all_in_file(
    path: Path, database: Database, checkpoints: WalCheckpoints, *, is_truncated: bool
) -> None:
    for number in range(100):
        write(database, str(number))
    before = checkpoints.log_bytes
    assert before <= Path(f"{path}-wal").stat().st_size < 2 * before
    assert "99" not in names_in(path)
    checkpoints.copy()
    write(database, "meanwhile")
    assert checkpoints.empty(7, is_truncated=is_truncated)
    assert names_in(path) == {"first", "meanwhile", *map(str, range(100))}
    assert database.progress().generation == 7
    assert checkpoints.log_bytes < before
    assert (Path(f"{path}-wal").stat().st_size < before) == is_truncated


def test_no_writer_begins_the_log_anew_meanwhile(path: Path, database: Database, checkpoints: WalCheckpoints) -> None:
    """It would wait for the disk, and SQLite up to 3.51.2 may lose changes if a checkpoint runs meanwhile."""
    salt = salt_of(path)
    checkpoints.copy()  # all of it
    write(database, "meanwhile")
    assert salt_of(path) == salt
    assert checkpoints.empty(7, is_truncated=True)
    assert salt_of(path) != salt


def test_the_first_write_afterwards_begins_no_new_log(
    path: Path, database: Database, checkpoints: WalCheckpoints
) -> None:
    """A new log's header is synced by its first writer, which must not be the loop."""
    assert checkpoints.empty(7, is_truncated=True)
    salt = salt_of(path)
    write(database, "next")
    assert salt_of(path) == salt


def test_a_kill_at_any_point_loses_nothing(
    path: Path, tmp_path: Path, database: Database, checkpoints: WalCheckpoints
) -> None:
    checkpoints.copy()
    assert names_after_kill(path, tmp_path / "copied") == {"first"}
    write(database, "meanwhile")
    assert names_after_kill(path, tmp_path / "written") == {"first", "meanwhile"}
    assert checkpoints.empty(7, is_truncated=True)
    assert names_after_kill(path, tmp_path / "emptied") == {"first", "meanwhile"}
    write(database, "later")
    assert names_after_kill(path, tmp_path / "later") == {"first", "meanwhile", "later"}


def test_a_reader_only_delays_it(path: Path, database: Database, checkpoints: WalCheckpoints) -> None:
    with contextlib.closing(open_reader(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT 1 FROM jobs").fetchone()
        for number in range(3):
            write(database, str(number))
            checkpoints.copy()
            assert not checkpoints.empty(number, is_truncated=True)
        reader.execute("COMMIT")
    checkpoints.copy()
    assert checkpoints.empty(7, is_truncated=True)
    assert names_in(path) == {"first", "0", "1", "2"}


def test_a_writer_only_delays_it(path: Path, database: Database, checkpoints: WalCheckpoints) -> None:
    checkpoints.copy()
    with database.transaction():
        database.execute("INSERT INTO settings VALUES ('second', '1')")
        assert not checkpoints.empty(1, is_truncated=True)
    assert checkpoints.empty(2, is_truncated=True)
    assert names_in(path) == {"first", "second"}


def test_a_copy_that_failed_does_not_keep_the_log_from_being_emptied(
    path: Path, database: Database, checkpoints: WalCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("gpuyard.store.checkpoints._sync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoints.copy()
    write(database, "meanwhile")
    checkpoints.copy()
    assert checkpoints.empty(7, is_truncated=False)
    assert names_in(path) == {"first", "meanwhile"}


def test_a_database_that_left_the_disk_to_others_makes_no_checkpoints_or_syncs(path: Path, database: Database) -> None:
    def level() -> int:
        return int(database.value("PRAGMA synchronous"))

    normal = 1
    with database.transaction(is_synced=True):
        assert level() == normal
    with database.transaction():
        pass
    assert database.commits_to_sync == 1
    assert database.value("PRAGMA wal_autocheckpoint") == 0
    database.leave_disk_to(None)
    assert database.value("PRAGMA wal_autocheckpoint") == 1000
    with database.transaction(is_synced=True):
        assert level() > normal
    assert database.commits_to_sync == 1


def test_each_commit_is_announced_and_one_during_a_save_is_still_to_be_saved(path: Path, database: Database) -> None:
    commits: list[int] = []
    database.leave_disk_to(lambda: commits.append(database.changes))
    write(database, "a")
    with pytest.raises(ZeroDivisionError), database.transaction(is_synced=True):
        raise ZeroDivisionError
    assert len(commits) == 1
    assert database.commits_to_sync == 0
    changes, generation = database.changes, database.generation + 1
    write(database, "meanwhile")
    database.note_saved(generation, changes)
    assert has_unsaved(database)
    database.note_saved(generation, database.changes)
    assert not has_unsaved(database)
    assert database.generation == generation


def has_unsaved(database: Database) -> bool:
    return database.has_unsaved
