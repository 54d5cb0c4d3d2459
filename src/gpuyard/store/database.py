"""Opens the queue's database: its schema is brought up to date, and a damaged one is set aside, never deleted."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import quote

from gpuyard.errors import EnvironmentFault, StoreFault

_COMPANIONS = ("", "-wal", "-shm")
# A look at every page takes about a second for this much; a larger one is believed until it errs.
_CHECKED_BYTES = 64 * 1024 * 1024
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A connection whose transactions either happen as a whole or not at all."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        self._connection = connection

    @property
    def is_changing(self) -> bool:
        return self._connection.in_transaction

    @property
    def path(self) -> Path:
        """Of its file."""
        return Path(self.execute("PRAGMA database_list").fetchone()[2])

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        """`is_synced` waits for the disk, so that not even a power cut takes it back; a crash of ours never does."""
        try:
            if is_synced:
                self.execute("PRAGMA synchronous = FULL")
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
            finally:
                self.undo()
                if is_synced:
                    self.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.DatabaseError as error:
            raise fault(error) from error

    def undo(self) -> None:
        if self._connection.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def faults_told() -> Iterator[None]:
    """For reads outside of a transaction: what SQLite complains of becomes a StoreFault."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise fault(error) from error


def fault(error: sqlite3.DatabaseError) -> StoreFault:
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _DAMAGED:
        return StoreFault(
            f"the queue's database is damaged: {error}", hint="restart: gpuyard daemon stop", is_damage=True
        )
    return StoreFault(f"the queue's database cannot be written: {error}", hint="free some disk space, then try again")


def open_database(path: Path | None) -> tuple[Database, str | None]:
    """The database at `path` (in memory where there is none), and what a person should know about it."""
    if path is None:
        return _opened(":memory:"), None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _opened(str(path)), None
    except StoreFault as error:
        if not error.is_damage:
            raise
        aside = _set_aside(path)
        notice = f"the queue's database was damaged; it was set aside as {aside}, and an empty one begun"
        return _opened(str(path)), notice
    except OSError as error:
        raise EnvironmentFault(f"{path.parent} cannot be used: {error.strerror}") from error


def open_reader(path: Path) -> sqlite3.Connection:
    """Another connection, that cannot change anything; what it reads holds nobody up."""
    try:
        name = f"file:{quote(os.fsencode(path))}?mode=ro"
        connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        with _closed_on_error(connection):
            connection.execute("PRAGMA busy_timeout = 5000")
        return connection
    except sqlite3.DatabaseError as error:
        raise fault(error) from error


def _opened(name: str) -> Database:
    try:
        connection = sqlite3.connect(name, isolation_level=None, cached_statements=256)
        with _closed_on_error(connection):
            if name != ":memory:":
                os.chmod(name, 0o600)
            _prepare(connection, name)
        return Database(connection)
    except sqlite3.DatabaseError as error:
        raise fault(error) from error


@contextlib.contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[None]:
    """Close the connection if the block raises; otherwise the caller goes on with it."""
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
    if name != ":memory:" and os.path.getsize(name) < _CHECKED_BYTES:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreFault(f"the queue's database is damaged: {found}", is_damage=True)
    _migrate(connection)


def _migrate(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    steps = migrations()
    if version > len(steps):
        raise EnvironmentFault(
            f"the queue's database has schema {version}, and this gpuyard knows up to {len(steps)}",
            hint="a newer gpuyard made it: use that one",
        )
    for number, script in enumerate(steps[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")


def migrations() -> list[str]:
    """One script for each schema, from the first on."""
    folder = resources.files("gpuyard.store") / "migrations"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(folder / name).read_text(encoding="utf-8") for name in names]


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    names = (f"{path.name}.damaged-{stamp}{again}" for again in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(place for name in names if not (place := path.with_name(name)).exists())
    for ending in _COMPANIONS:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{ending}", f"{aside}{ending}")
    return aside
