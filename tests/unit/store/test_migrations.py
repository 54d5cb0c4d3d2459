"""A database of an earlier schema is copied before it is migrated; a migration that fails changes nothing."""

import contextlib
import os
import sqlite3
import stat
from pathlib import Path

import pytest

from gpuyard.errors import StoreFault
from gpuyard.store import database as migrations
from gpuyard.store.database import SCHEMA_VERSION, open_database

BEFORE = SCHEMA_VERSION - 2


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "queue.db"
    database, _ = open_database(path)
    with database.transaction():
        database.execute("INSERT INTO settings VALUES ('mine', 'kept')")
        database.execute(f"PRAGMA user_version = {BEFORE}")
    database.close()
    return path


def read(path: Path, query: str) -> object:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchone()[0]


def test_a_copy_is_kept_before_the_steps_are_done(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migrations.STEPS, BEFORE, "CREATE TABLE one (a);")
    monkeypatch.setitem(migrations.STEPS, BEFORE + 1, "UPDATE settings SET value = 'new' WHERE name = 'mine';")
    database, notice = open_database(old)
    assert (database.value("SELECT value FROM settings WHERE name = 'mine'"), notice) == ("new", None)
    assert database.value("PRAGMA user_version") == SCHEMA_VERSION
    database.close()
    copy = old.with_name(f"queue.db.schema-{BEFORE}")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert read(copy, "PRAGMA user_version") == BEFORE
    assert read(copy, "SELECT value FROM settings WHERE name = 'mine'") == "kept"


def test_the_copy_has_no_secrets_and_its_name_once_it_is_complete(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(sqlite3.connect(old)) as database, database:
        database.execute("INSERT INTO specs (id, body, command) VALUES (1, '{}', 'run')")
        database.execute("INSERT INTO secrets VALUES (1, 'hush-hush-hush')")
    copy, synced = old.with_name(f"queue.db.schema-{BEFORE}"), list[tuple[bool, bool]]()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), copy.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for version in (BEFORE, BEFORE + 1):
        monkeypatch.setitem(migrations.STEPS, version, "")
    open_database(old)[0].close()
    assert synced[:2] == [(False, False), (True, True)], "its content, and then its name in the folder"
    assert b"hush-hush-hush" not in copy.read_bytes()
    assert read(copy, "SELECT spec FROM dropped_secrets") == 1
    assert list(old.parent.glob(".*")) == []


def test_a_step_that_fails_leaves_the_database_as_it_was(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(migrations.STEPS, BEFORE, "UPDATE settings SET value = 'new';")
    monkeypatch.setitem(migrations.STEPS, BEFORE + 1, "INSERT INTO absent VALUES (1);")
    for _ in range(2):
        with pytest.raises(StoreFault, match="absent"):
            open_database(old)
        assert read(old, "PRAGMA user_version") == BEFORE
        assert read(old, "SELECT value FROM settings WHERE name = 'mine'") == "kept"
