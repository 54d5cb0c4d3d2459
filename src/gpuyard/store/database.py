"""Open the queue's database. A damaged file is set aside, never deleted; another schema is refused and left alone.

The database alone cannot show that it is older than the queue was: it may be a copy of last week, or its write-ahead
log may have been deleted. So a small record beside it (`QueueRecord`) says how far the queue had come.
"""

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, StoreFault, UnreadableRow

# Rows that one transaction writes, or one query returns, before other requests are served: a few milliseconds of work.
PIECE = 200
# No schema was released yet, so there are no migrations.
SCHEMA_VERSION = 16
_FILE_SUFFIXES = ("", "-wal", "-shm")
_BUSY_TIMEOUT = "PRAGMA busy_timeout = 5000"
SET_GENERATION = "INSERT OR REPLACE INTO settings VALUES ('generation', ?)"


class QueueProgress(Struct, frozen=True):
    """`generation` is in the database, too, and goes up whenever it is saved (`Database.save`). `has_unsaved`: changes
    were committed since, so that there must be a write-ahead log."""

    generation: int = 0
    last_id: int = 0
    has_unsaved: bool = False


class QueueRecord:
    """Written with one `pwrite`, without a sync, when new jobs or the first change after a save are committed."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            found = re.match(rb"(\d{12}) (\d{12}) ([01])\n", os.pread(self._file, 100, 0))
        except OSError as error:
            raise EnvironmentFault(f"{path} cannot be used: {error.strerror}", hint="move it away") from error
        self.progress = QueueProgress(int(found[1]), int(found[2]), found[3] == b"1") if found else QueueProgress()

    def write(self, progress: QueueProgress) -> None:
        """Keep the highest job id that was ever recorded. Nothing depends on a record that cannot be written."""
        last_id = max(progress.last_id, self.progress.last_id)
        self.progress = QueueProgress(progress.generation, last_id, progress.has_unsaved)
        content = f"{progress.generation:012d} {last_id:012d} {progress.has_unsaved:d}\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._file, content.encode(), 0)

    def close(self) -> None:
        os.close(self._file)


class Database:
    """A connection with transactions that are committed whole or not at all."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.execute = connection.execute
        self.executemany = connection.executemany
        self.connection = connection
        self.record: QueueRecord | None = None
        self._saved_changes = 0  # `total_changes` when it was last saved
        self.has_unsaved = False
        # Of a daemon, whose loop must not wait for the disk: see `leave_disk_to`.
        self._on_commit: Callable[[], None] | None = None
        self._descriptors: list[int] = []
        self.commits_to_sync = 0

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    @property
    def path(self) -> Path:
        return Path(self.execute("PRAGMA database_list").fetchone()[2])

    @contextlib.contextmanager
    def transaction(self, *, is_synced: bool = False) -> Iterator[None]:
        """Commit the block's changes, or roll them back if it raises. What is committed survives a crash of this
        process; with `is_synced` also a power cut: the commit waits for the disk, or counts as one of
        `commits_to_sync`."""
        is_synced_later = is_synced and self._on_commit is not None
        is_synced = is_synced and not is_synced_later
        with convert_sqlite_errors():
            if is_synced:
                self.execute("PRAGMA synchronous = FULL")
            self.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.execute("COMMIT")
                if not self.has_unsaved and self.connection.total_changes != self._saved_changes:
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
        return self.connection.total_changes

    def leave_disk_to(self, on_commit: Callable[[], None] | None) -> None:
        """Wait for the disk no more: make no checkpoints and no syncs, and call `on_commit` after each commit. The
        caller has to make the checkpoints, and to sync the log for `commits_to_sync`. None: as before."""
        self._on_commit = on_commit
        self.execute(f"PRAGMA wal_autocheckpoint = {1000 if on_commit is None else 0}")  # 1000 is SQLite's default

    def open_descriptor(self, suffix: str = "") -> int:
        """Return a descriptor of one of its files. It is closed after the connection: SQLite's locks on a file, which
        hold for this process, end when any of its descriptors is closed."""
        self._descriptors.append(os.open(f"{self.path}{suffix}", os.O_RDONLY | os.O_CLOEXEC))
        return self._descriptors[-1]

    @property
    def generation(self) -> int:
        return 0 if self.record is None else self.record.progress.generation

    def note_saved(self, generation: int, changes: int) -> None:
        """Note that the file has this generation, with what was committed up to these `changes`."""
        self.has_unsaved = self.changes != changes
        self._saved_changes = changes
        if self.record is not None:
            self.record.write(QueueProgress(generation, 0, has_unsaved=self.has_unsaved))

    def note_last_id(self, job_id: int) -> None:
        if self.record is not None:
            self.record.write(QueueProgress(self.record.progress.generation, job_id, has_unsaved=True))

    def save(self) -> bool:
        """Move all changes from the log into the file. Return False if a reader or a full disk prevents that now."""
        if self.record is None or not self.has_unsaved:
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
        query = "SELECT name, value FROM settings WHERE name IN ('generation', 'next_id')"
        found = dict(self.execute(query).fetchall())
        return QueueProgress(int(found.get("generation", 0)), int(found["next_id"]) - 1)

    def rollback(self) -> None:
        if self.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        if self.record is None:
            self.connection.close()
        else:
            is_saved, path, record = self.save(), self.path, self.record
            self.record = None
            self.connection.close()  # which saves, too, if no other process reads
            if not is_saved and not _size_of(Path(f"{path}-wal")):
                record.write(QueueProgress(record.progress.generation, 0))
            record.close()
        while self._descriptors:
            os.close(self._descriptors.pop())


@contextlib.contextmanager
def convert_sqlite_errors() -> Iterator[None]:
    """Raise SQLite's errors as StoreFault."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", None)
        code = None if code is None else code & 0xFF
        # A text that is not UTF-8 (an error of Python's module without a code), malformed JSON, a value against a rule
        # of its column.
        if code in {None, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH}:
            # The error of a text that cannot be decoded has all of it.
            why = "a text is not UTF-8" if code is None else str(error)
            raise UnreadableRow(f"a row of the queue's database cannot be read: {why}", hint="see daemon.log") from None
        if code in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}:
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
    damaged file was set aside, or it is older than `queue.record`. Raises EnvironmentFault if another version of
    gpuyard made the file."""
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
    database.record = record
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
    rules = ("NULL value in", "CHECK constraint failed in", "TEXT value in", "NUMERIC value in", "non-")
    return found == "ok" or found.startswith(rules)


def _prepare(connection: sqlite3.Connection, name: str) -> None:
    connection.execute(_BUSY_TIMEOUT)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    # Checking every page of 64 MB takes about a second. Damage in a larger file shows when it is read.
    if name != ":memory:" and os.path.getsize(name) < 64 * 1024 * 1024 and not are_pages_sound(connection):
        raise StoreFault("the queue's database is damaged", is_damage=True)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    refuse_schema(name, version)
    if version == 0:
        schema = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
        connection.executescript(f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")


def refuse_schema(name: str, version: int | None = None) -> None:
    """Raise EnvironmentFault if the database has another schema: `version`, or what its header says."""
    stop = "" if version is not None else "`gpuyard daemon stop`, then "
    if version is None:
        try:
            with open(name, "rb") as file:
                version = int.from_bytes(file.read(64)[60:])  # where SQLite's header has it
        except OSError:
            return  # there is none
    what = f"it has schema {version}, and this version reads schema {SCHEMA_VERSION}"
    if version > SCHEMA_VERSION:
        raise EnvironmentFault(f"a newer gpuyard made {name}: {what}", hint="use the newer gpuyard")
    if version and version < SCHEMA_VERSION:
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


def compare(recorded: QueueProgress, found: QueueProgress, *, was_new: bool, has_log: bool) -> str | None:
    """Return what is wrong with a database, for a notice, or None. `found` is the progress according to the database;
    `was_new`: there was none, or an empty file; `has_log`: it has a write-ahead log with content."""
    if was_new and recorded.last_id:
        return "the queue's database was missing or empty, and gpuyard started a new one"
    # With a higher generation in the database the save was complete, and the daemon was killed before it recorded that.
    if recorded.has_unsaved and not has_log and found.generation == recorded.generation:
        return "the write-ahead log of the queue's database (queue.db-wal) was removed"
    if found.generation < recorded.generation or found.last_id < recorded.last_id:
        return "the queue's database is an older copy"
    return None
