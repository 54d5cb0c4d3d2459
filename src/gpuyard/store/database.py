"""Open the queue's database. A damaged file is set aside, never deleted; another schema is refused and left alone.

A record beside it (`stale_database_check.py`) shows whether the database is older than the queue was. A copy is kept
before a migration changes anything.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuyard.errors import EnvironmentFault, StoreFault, UnreadableRow
from gpuyard.store.stale_database_check import SET_GENERATION, QueueProgress, QueueRecord, compare
from gpuyard.system.write_files import sync

NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_database(connection: sqlite3.Connection, target: Path) -> None:
    """Copy the database of a connection while others use it; it needs no write-ahead log. The target has its name once
    it is complete and on disk, and that name is on disk at the end.

    Not with VACUUM INTO: SQLite 3.40 fails for generated columns of a table without row ids.
    """
    draft = target.with_name(f".{os.urandom(8).hex()}.copy")
    try:
        os.close(os.open(draft, NEW_FILE, 0o600))
    except OSError as error:
        raise EnvironmentFault(f"{target} cannot be written: {error.strerror}") from error
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
            copy.execute("PRAGMA secure_delete = ON")
            copy.execute("BEGIN")
            copy.execute("INSERT OR IGNORE INTO dropped_secrets SELECT spec FROM secrets")
            copy.execute("DELETE FROM secrets")
            copy.execute("COMMIT")
        sync(draft)
        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise
    sync(target.parent)


# By the version of the schema that it starts from.
STEPS: dict[int, str] = {}


def can_migrate(version: int, to: int) -> bool:
    return all(each in STEPS for each in range(version, to))


def migrate(connection: sqlite3.Connection, database: Path, version: int, to: int) -> None:
    """Bring the database to version `to` in one transaction, if `can_migrate`.

    The copy beside it is named after the version that it has.
    """
    steps = [STEPS[each] for each in range(version, to)]
    aside = database.with_name(f"{database.name}.schema-{version}")
    if not aside.exists():  # it does after a migration that failed: that changed nothing
        copy_database(connection, aside)
    try:
        connection.executescript(f"BEGIN IMMEDIATE; {' '.join(steps)} PRAGMA user_version = {to}; COMMIT;")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


# Rows that one transaction writes, or one query returns, before other requests are served: a few milliseconds of work.
PIECE = 200
# No schema was released yet.
SCHEMA_VERSION = 16
_VERSION_AT = 60  # of `user_version`, in the header of SQLite's file
_FILE_SUFFIXES = ("", "-wal", "-shm")
# Checking every page of a file of this size takes about a second. Damage in a larger file shows when it is read.
_MAX_CHECKED_BYTES = 64 * 1024 * 1024
_BUSY_TIMEOUT = "PRAGMA busy_timeout = 5000"
# SQLite's default.
_CHECKPOINT_PAGES = 1000
_DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# A text that is not UTF-8 (an error of Python's module without a code), malformed JSON, a value against a rule of its
# column.
_ROW_CODES = (None, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH)
_ROW_CHECKS = ("NULL value in", "CHECK constraint failed in", "TEXT value in", "NUMERIC value in", "non-")


class Database:
    """A connection with transactions that are committed whole or not at all."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        self._connection = connection
        self._record: QueueRecord | None = None
        self._saved_changes = 0  # `total_changes` when it was last saved
        self.has_unsaved = False
        # Of a daemon, whose loop must not wait for the disk: see `leave_disk_to`.
        self._on_commit: Callable[[], None] | None = None
        self._descriptors: list[int] = []
        self.commits_to_sync = 0

    @property
    def connection(self) -> sqlite3.Connection:
        return self._connection

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
        waits for the disk, or counts as one of `commits_to_sync`.
        """
        is_synced_later = is_synced and self._on_commit is not None
        is_synced = is_synced and not is_synced_later
        with convert_sqlite_errors():
            if is_synced:
                self.execute("PRAGMA synchronous = FULL")
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
                if not self.has_unsaved and self._connection.total_changes != self._saved_changes:
                    self.has_unsaved = True
                    self.note_last_id(0)
                self.commits_to_sync += is_synced_later
                if self._on_commit is not None:
                    self._on_commit()
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

    @property
    def changes(self) -> int:
        """The number of rows that were changed since it was opened."""
        return self._connection.total_changes

    @property
    def is_file(self) -> bool:
        """Whether it is a file with a record beside it, as a queue's is."""
        return self._record is not None

    def leave_disk_to(self, on_commit: Callable[[], None] | None) -> None:
        """Wait for the disk no more: make no checkpoints and no syncs, and call `on_commit` after each commit. The
        caller has to make the checkpoints, and to sync the log for `commits_to_sync`. None: as before."""
        self._on_commit = on_commit
        self.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES if on_commit is None else 0}")

    def open_descriptor(self, suffix: str = "") -> int:
        """Return a descriptor of one of its files. It is closed after the connection: SQLite's locks on a file, which
        hold for this process, end when any of its descriptors is closed."""
        self._descriptors.append(os.open(f"{self.path}{suffix}", os.O_RDONLY | os.O_CLOEXEC))
        return self._descriptors[-1]

    @property
    def generation(self) -> int:
        return 0 if self._record is None else self._record.progress.generation

    def note_saved(self, generation: int, changes: int) -> None:
        """Note that the file has this generation, with what was committed up to these `changes`."""
        self.has_unsaved = self.changes != changes
        self._saved_changes = changes
        if self._record is not None:
            self._record.write(QueueProgress(generation, 0, has_unsaved=self.has_unsaved))

    def keep_record(self, record: QueueRecord) -> None:
        """Note in the record from now on how far the queue has come."""
        self._record = record

    def note_last_id(self, job_id: int) -> None:
        if self._record is not None:
            self._record.write(QueueProgress(self._record.progress.generation, job_id, has_unsaved=True))

    def save(self) -> bool:
        """Move all changes from the write-ahead log into the file, so that a copy of the file is a copy of the queue.

        Return False if a reader or a full disk prevents that now. Takes milliseconds: call it when the queue is quiet.
        """
        if self._record is None or not self.has_unsaved:
            return True
        generation = self.generation + 1
        try:
            self.execute("PRAGMA busy_timeout = 0")
            self.execute(SET_GENERATION, (str(generation),))
            if self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:  # a reader prevents it
                return False
        except sqlite3.DatabaseError:
            return False
        finally:
            self.execute(_BUSY_TIMEOUT)
        self.note_saved(generation, self.changes)
        return True

    def progress(self) -> QueueProgress:
        """Return how far the queue has come, according to the database."""
        found = dict(
            self.execute("SELECT name, value FROM settings WHERE name IN ('generation', 'next_id')").fetchall()
        )
        return QueueProgress(int(found.get("generation", 0)), int(found["next_id"]) - 1)

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        self._close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _close(self) -> None:
        if self._record is None:
            self._connection.close()
            return
        is_saved, path, record = self.save(), self.path, self._record
        self._record = None
        self._connection.close()  # which saves, too, if no other process reads
        if not is_saved and not _size_of(Path(f"{path}-wal")):
            record.write(QueueProgress(record.progress.generation, 0))
        record.close()


@contextlib.contextmanager
def convert_sqlite_errors() -> Iterator[None]:
    """Raise SQLite's errors as StoreFault."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)
        code = None if code is None else code & 0xFF
        if code in _ROW_CODES:
            # The error of a text that cannot be decoded has all of it.
            why = "a text is not UTF-8" if code is None else str(error)
            raise UnreadableRow(f"a row of the queue's database cannot be read: {why}", hint="see daemon.log") from None
        if code in _DAMAGE_CODES:
            raise StoreFault(
                f"the queue's database is damaged: {error}",
                hint="restart the daemon with `gpuyard daemon restart`: it sets the damaged file aside",
                is_damage=True,
            ) from error
        hint = "free some disk space, then try again"
        if code == sqlite3.SQLITE_CANTOPEN:
            hint = "see that `queue.db` in your state folder is a file, and that you can write to the folder"
        raise StoreFault(f"the queue's database cannot be written: {error}", hint=hint) from error


def open_database(path: Path | None) -> tuple[Database, str | None]:
    """Return the database at `path` (None: in memory), and a notice for the user if it is not what the queue was: a
    damaged file was set aside, or it is older than the record beside it, `queue.record`.

    Raises EnvironmentFault if another version of gpuyard made the file.
    """
    if path is None:
        return _connect(":memory:"), None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        was_new, has_log = not _size_of(path), _size_of(Path(f"{path}-wal")) > 0
        database, notice = _connect(str(path)), None
    except StoreFault as error:
        if not error.is_damage:
            raise
        aside, was_new, has_log = _set_aside(path), False, True
        notice = f"the queue's database was damaged: gpuyard set aside the file as {aside} and started an empty one"
        database = _connect(str(path))
    except OSError as error:
        raise EnvironmentFault(f"{path.parent} cannot be used: {error.strerror}") from error
    with _closed_on_error(database), convert_sqlite_errors():
        record = QueueRecord(path.with_name("queue.record"))
        older = compare(record.progress, database.progress(), was_new=was_new, has_log=has_log)
        last_id = _catch_up(database, record)
        if was_new or notice is not None:
            database.save()  # so that its file is a database even if its write-ahead log is lost
    if notice is None and older is not None:
        known = f"jobs up to {last_id} are known" if last_id else "it has no jobs"
        notice = (
            f"{older}: {known}, and job ids up to {record.progress.last_id} were given. Jobs may be missing, or be in "
            f"an earlier state. If you have a newer copy of {path.name}, stop the daemon (`gpuyard daemon stop`) and "
            "put it back"
        )
    return database, notice


def _catch_up(database: Database, record: QueueRecord) -> int:
    """Start a new generation, and never give a job id again. Return the last job id that the database knew."""
    recorded, found = record.progress, database.progress()
    generation, last_id = max(recorded.generation, found.generation) + 1, max(recorded.last_id, found.last_id)
    rows = [("generation", str(generation)), ("next_id", str(last_id + 1))]
    try:
        with database.transaction():
            database.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)
    except StoreFault:
        if last_id > found.last_id:
            raise
        generation = recorded.generation  # on a full disk a daemon can still watch its running jobs
    record.write(QueueProgress(generation, last_id, has_unsaved=True))
    database.keep_record(record)
    return found.last_id


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def open_reader(path: Path) -> sqlite3.Connection:
    """Return a read-only connection. Its reads do not block the writer."""
    with convert_sqlite_errors():
        name = f"file:{quote(os.fsencode(path))}?mode=ro"
        connection = sqlite3.connect(name, uri=True, isolation_level=None, check_same_thread=False)
        with _closed_on_error(connection):
            connection.execute(_BUSY_TIMEOUT)
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
def _closed_on_error(connection: sqlite3.Connection | Database) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def are_pages_sound(connection: sqlite3.Connection) -> bool:
    """Return whether SQLite can read all pages. A row that only breaks a rule of its columns is set aside by itself."""
    found: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    return found == "ok" or found.startswith(_ROW_CHECKS)


def _prepare(connection: sqlite3.Connection, name: str) -> None:
    connection.execute(_BUSY_TIMEOUT)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if name != ":memory:" and os.path.getsize(name) < _MAX_CHECKED_BYTES and not are_pages_sound(connection):
        raise StoreFault("the queue's database is damaged", is_damage=True)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    refuse_schema(name, version)
    if version == 0:
        schema = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
        connection.executescript(f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    elif version < SCHEMA_VERSION:
        migrate(connection, Path(name), version, SCHEMA_VERSION)


def refuse_schema(name: str, version: int | None = None) -> None:
    """Raise EnvironmentFault if this version of gpuyard cannot read the database. `version` is that of its schema;
    without it, it is read from the file's header, also while a daemon uses it."""
    stop = "" if version is not None else "`gpuyard daemon stop`, then "
    if version is None:
        try:
            with open(name, "rb") as file:
                version = int.from_bytes(file.read(_VERSION_AT + 4)[_VERSION_AT:])
        except OSError:
            return  # there is none
    what = f"it has schema {version}, and this version reads schema {SCHEMA_VERSION}"
    if version > SCHEMA_VERSION:
        raise EnvironmentFault(f"a newer gpuyard made {name}: {what}", hint="use the newer gpuyard")
    if version and not can_migrate(version, SCHEMA_VERSION):
        raise EnvironmentFault(
            f"an unreleased gpuyard made {name}: {what}",
            hint=f"to start with an empty queue, {stop}move it away: mv {name} {name}.schema-{version}",
        )


def _set_aside(path: Path) -> Path:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    names = (f"{path.name}.damaged-{stamp}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    aside = next(target for name in names if not (target := path.with_name(name)).exists())
    for suffix in _FILE_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    return aside
