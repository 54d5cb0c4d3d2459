"""Backups of the queue's database: made while the daemon runs, and restored while it does not.

A backup is one file, a database of the same schema, without secrets, of one moment. Nothing waits for it. A restored
queue never runs a job by itself: a job that had not finished is held, because it may have run since the backup was
made, or run on the machine that the backup comes from. The database before a restore is kept beside the new one."""

import contextlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.lifecycle import FINISHED, LIVE, WAITING
from gpuyard.store.damaged_rows import set_aside_in
from gpuyard.store.database import (
    SCHEMA_VERSION,
    QueueProgress,
    QueueRecord,
    are_pages_sound,
    convert_sqlite_errors,
    open_reader,
)
from gpuyard.system.private_files import open_trusted

NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MAGIC = b"SQLite format 3\0"


class BackupContent(Struct, frozen=True, kw_only=True):
    """What a backup holds. `unfinished` jobs ran or waited."""

    finished: int
    unfinished: int
    estimates: int
    bytes: int


class Restored(Struct, frozen=True, kw_only=True):
    """`aside` is the database before, if there was one; `begun` are held jobs that have begun since the backup."""

    content: BackupContent
    aside: str | None
    begun: list[int]


def back_up(database: Path, target: Path, *, overwrite: bool = False) -> BackupContent:
    """Write a backup that only this user can read. Raises UserError if `target` exists and `overwrite` is not set."""
    if os.path.lexists(target) and not overwrite:
        raise UserError(f"{target} exists", hint="name another file, or add --force to replace it")
    if not database.exists():
        raise UserError("there is no queue yet", hint="`gpuyard submit` makes one")
    draft = database.with_name(f".{os.urandom(8).hex()}.backup")
    with contextlib.closing(open_reader(database)) as reader, convert_sqlite_errors():
        try:
            os.close(os.open(draft, NEW_FILE, 0o600))
        except OSError as error:
            raise EnvironmentFault(f"{draft} cannot be written: {error.strerror}") from error
        try:
            with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy:
                # Not with VACUUM INTO: SQLite 3.40 fails for generated columns of a table without row ids.
                reader.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
                copy.execute("PRAGMA secure_delete = ON")
                copy.execute("BEGIN")
                copy.execute("INSERT OR IGNORE INTO dropped_secrets SELECT spec FROM secrets")
                copy.execute("DELETE FROM secrets")
                copy.execute("COMMIT")
                found = _count(copy, os.path.getsize(draft))
            _write(draft, target, overwrite=overwrite)
            return found
        finally:
            os.unlink(draft)


def _write(draft: Path, target: Path, *, overwrite: bool) -> None:
    """Copy the draft to a folder that may be another user's: no link is followed, and no file of others changed."""
    beside = target.with_name(f".{os.urandom(8).hex()}.gpuyard")
    try:
        with open(os.open(beside, NEW_FILE, 0o600), "wb") as file, draft.open("rb") as content:
            shutil.copyfileobj(content, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            if not overwrite:
                os.link(beside, target)  # fails if the target exists by now
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links, as on a memory stick
            overwrite = True
        if overwrite:
            os.replace(beside, target)
    except OSError as error:
        hint = "name a file in a folder that exists, that you can write to and that has enough space"
        raise EnvironmentFault(f"{target} cannot be written: {error.strerror}", hint=hint) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def count_unfinished(database: Path) -> dict[str, int]:
    """Return the number of unfinished jobs by state; none without a database."""
    if not database.exists():
        return {}
    with convert_sqlite_errors(), contextlib.closing(open_reader(database)) as reader:
        counts = reader.execute("SELECT state, jobs FROM counts WHERE jobs > 0").fetchall()
        return {state: jobs for state, jobs in counts if state in LIVE | WAITING}


@contextlib.contextmanager
def checked_backup(source: Path, folder: Path, note: Callable[[str], None] = lambda _: None) -> Iterator[Path]:
    """Copy a backup into the queue's folder, and check it there, where no other user can change it any more. Yield the
    path of the copy, which is removed unless `restore` has used it. All its rows are read: those that cannot be are set
    aside in the copy, with a `note` of each."""
    draft = folder / f".{os.urandom(8).hex()}.restore"
    try:
        _copy_trusted(source, draft)
        try:
            _check(source, draft)
            for each in set_aside_in(draft):
                note(each)
        except sqlite3.DatabaseError as error:
            raise UserError(f"{source} is damaged: {error}", hint="use another backup") from error
        yield draft
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


def restore(draft: Path, database: Path, begun: Mapping[int, int]) -> Restored:
    """Replace the queue's database by a checked backup. The caller holds the daemon's lock. `begun` is the highest
    attempt that has begun for each job: later ones get higher numbers, and logs of their own."""
    record = QueueRecord(database.with_name("queue.record"))
    try:
        progress = QueueProgress(record.progress.generation + 1, record.progress.last_id)
        content, again = _prepare(draft, progress, begun)
        aside = None
        if database.exists():  # it stays beside the new one, with what its write-ahead log holds
            aside = f"{database}.before-restore-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
            with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(sqlite3.connect(database)) as before:
                before.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            os.link(database, aside)
            for suffix in ("-wal", "-shm"):  # of a damaged database: it could not be moved into its file
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{database}{suffix}", f"{aside}{suffix}")
        os.replace(draft, database)
        record.write(progress)
    finally:
        record.close()
    return Restored(content=content, aside=aside, begun=again)


def _copy_trusted(source: Path, draft: Path) -> None:
    try:
        with open(open_trusted(str(source), "copy it to a folder of yours"), "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{source} is not a backup of gpuyard", hint="`gpuyard backup FILE` makes one")
            file.seek(0)
            with open(os.open(draft, NEW_FILE, 0o600), "wb") as copy:
                shutil.copyfileobj(file, copy)
    except FileNotFoundError as error:
        raise UserError(f"there is no file {source}", hint="name the file that `gpuyard backup` wrote") from error
    except OSError as error:
        raise EnvironmentFault(f"{source} cannot be copied to {draft.parent}: {error.strerror}") from error


def _check(source: Path, draft: Path) -> None:
    """Raise UserError unless it has the tables and triggers of this version, and nothing else."""
    with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy:
        version = copy.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{source} has schema {version}, and this gpuyard reads schema {SCHEMA_VERSION}",
                hint="restore it with the version of gpuyard that made it",
            )
        with contextlib.closing(sqlite3.connect(":memory:")) as empty:
            empty.executescript((resources.files("gpuyard.store") / "schema.sql").read_text(encoding="utf-8"))
            query = "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name, sql"
            own, found = (each.execute(query).fetchall() for each in (empty, copy))
        if found != own or not are_pages_sound(copy):
            raise UserError(f"{source} is damaged, or not a backup of gpuyard", hint="use another backup")


def _prepare(draft: Path, progress: QueueProgress, begun: Mapping[int, int]) -> tuple[BackupContent, list[int]]:
    """Hold all unfinished jobs. Return what there is, and the held jobs that have begun since the backup was made."""
    with convert_sqlite_errors(), contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as copy:
        copy.execute("PRAGMA synchronous = FULL")
        copy.execute("BEGIN")
        query = "SELECT id, attempts FROM jobs WHERE ended_at IS NULL"
        again = [job_id for job_id, attempts in copy.execute(query) if begun.get(job_id, 0) > attempts]
        at = copy.execute("SELECT max(coalesce(ended_at, started_at, submitted_at)) FROM jobs").fetchone()[0]
        lost = json.dumps({"kind": "lost", "status": None, "reason": "it ran when the backup was made"})
        copy.execute("UPDATE attempts SET ended_at = ?, outcome = ? WHERE ended_at IS NULL", (at, lost))
        copy.execute(
            "UPDATE jobs SET state = 'held', due_at = NULL, reason = CASE WHEN state = 'held' THEN reason ELSE "
            "'restored from a backup: `gpuyard release` runs it' END WHERE ended_at IS NULL"
        )
        since = "restored from a backup, and it has begun since: `gpuyard release` runs it a second time"
        copy.executemany("UPDATE jobs SET reason = ? WHERE id = ?", [(since, job_id) for job_id in again])
        numbers = [(number, job_id) for job_id, number in begun.items()]
        copy.executemany("UPDATE jobs SET attempts = max(attempts, ?) WHERE id = ?", numbers)
        copy.execute(
            "INSERT INTO events (job, at, kind, text) SELECT id, ?, 'held', reason FROM jobs WHERE ended_at IS NULL",
            (at,),
        )
        next_id = int(copy.execute("SELECT value FROM settings WHERE name = 'next_id'").fetchone()[0])
        settings = [("generation", progress.generation), ("next_id", max(next_id, progress.last_id + 1))]
        copy.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", [(name, str(n)) for name, n in settings])
        copy.execute("COMMIT")
        return _count(copy, os.path.getsize(draft)), again


def _count(connection: sqlite3.Connection, size: int) -> BackupContent:
    jobs = dict(connection.execute("SELECT state, jobs FROM counts").fetchall())
    finished = sum(count for state, count in jobs.items() if state in FINISHED)
    estimates = connection.execute("SELECT count(*) FROM profiles").fetchone()[0]
    return BackupContent(finished=finished, unfinished=sum(jobs.values()) - finished, estimates=estimates, bytes=size)
