"""Write a copy of a database, as it is at one moment, to a file that only this user can read."""

import contextlib
import os
import sqlite3
from pathlib import Path

from gpuyard.errors import EnvironmentFault

NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def copy_database(connection: sqlite3.Connection, target: Path) -> None:
    """Copy the database of a connection while others use it; it needs no write-ahead log. Raises EnvironmentFault if
    the target exists.

    Not with VACUUM INTO: SQLite 3.40 fails for generated columns of a table without row ids.
    """
    try:
        os.close(os.open(target, NEW_FILE, 0o600))
    except OSError as error:
        raise EnvironmentFault(f"{target} cannot be written: {error.strerror}") from error
    try:
        with contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copy:
            connection.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    except BaseException:
        os.unlink(target)
        raise
