"""Write a copy of a database, as it is at one moment and without secrets, to a file that only this user can read."""

import contextlib
import os
import sqlite3
from pathlib import Path

from gpuyard.errors import EnvironmentFault
from gpuyard.system.atomic_files import sync

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
