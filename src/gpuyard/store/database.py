"""Open the queue's database. A damaged file is set aside, never deleted; another schema is refused and left alone."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuyard.errors import EnvironmentFault, StoreFault

# No schema was released yet.
SCHEMA_VERSION = 9
_FILE_SUFFIXES = ("", "-wal", "-shm")
# Checking every page of a file of this size takes about a second. Damage in a larger file shows when it is read.
_MAX_CHECKED_BYTES = 64 * 1024 * 1024
_DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A connection with transactions that are committed whole or not at all."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @property
    def path(self) -> Path:
        return Path(self.execute("PRAGMA database_list").fetchone()[2])

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        """Commit the block's changes, or roll them back if it raises.

        What is committed survives a crash of this process. With `is_synced` it also survives a power cut: the commit
        waits for the disk.
        """
        with convert_sqlite_errors():
            if is_synced:
                self.execute("PRAGMA synchronous = FULL")
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
            finally:
                self.rollback()
                if is_synced:
                    self.execute("PRAGMA synchronous = NORMAL")

    def value(self, query: str, parameters: Sequence[Any] = ()) -> Any:
        """Return the first column of the first row, or None if there is no row."""
        row = self.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def column(self, query: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self.execute(query, parameters).fetchall()]

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def convert_sqlite_errors() -> Iterator[None]:
    """Raise SQLite's errors as StoreFault."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in _DAMAGE_CODES:
            raise StoreFault(
                f"the queue's database is damaged: {error}",
                hint="restart the daemon with `gpuyard daemon restart`: it sets the damaged file aside",
                is_damage=True,
            ) from error
        raise StoreFault(
            f"the queue's database cannot be written: {error}", hint="free some disk space, then try again"
        ) from error


def open_database(path: Path | None) -> tuple[Database, str | None]:
    """Return the database at `path` (None: in memory), and a notice for the user if a damaged file was set aside.

    Raises EnvironmentFault if another version of gpuyard made the file.
    """
    if path is None:
        return _connect(":memory:"), None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _connect(str(path)), None
    except StoreFault as error:
        if not error.is_damage:
            raise
        aside = _set_aside(path)
        notice = f"the queue's database was damaged: gpuyard set aside the file as {aside} and started an empty one"
        return _connect(str(path)), notice
    except OSError as error:
        raise EnvironmentFault(f"{path.parent} cannot be used: {error.strerror}") from error


def open_reader(path: Path) -> sqlite3.Connection:
    """Return a read-only connection. Its reads do not block the writer."""
    with convert_sqlite_errors():
        name = f"file:{quote(os.fsencode(path))}?mode=ro"
        connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        with _closed_on_error(connection):
            connection.execute("PRAGMA busy_timeout = 5000")
        return connection


def _connect(name: str) -> Database:
    with convert_sqlite_errors():
        connection = sqlite3.connect(name, isolation_level=None, cached_statements=256)
        with _closed_on_error(connection):
            if name != ":memory:":
                os.chmod(name, 0o600)
            _prepare(connection, name)
        return Database(connection)


@contextlib.contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _prepare(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("PRAGMA busy_timeout = 5000")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if name != ":memory:" and os.path.getsize(name) < _MAX_CHECKED_BYTES:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreFault(f"the queue's database is damaged: {found}", is_damage=True)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        schema = (resources.files("gpuyard.store") / "schema.sql").read_text(encoding="utf-8")
        connection.executescript(f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif version > SCHEMA_VERSION:
        raise EnvironmentFault(
            f"a newer gpuyard made {name}: it has schema {version}, and this version reads schema {SCHEMA_VERSION}",
            hint="use the newer gpuyard",
        )
    elif version < SCHEMA_VERSION:
        raise EnvironmentFault(
            f"an unreleased gpuyard made {name}: it has schema {version}, and this version reads schema "
            f"{SCHEMA_VERSION}",
            hint=f"to start with an empty queue, move it away: mv {name} {name}.schema-{version}",
        )


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    names = (f"{path.name}.damaged-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(target for name in names if not (target := path.with_name(name)).exists())
    for suffix in _FILE_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    return aside
