"""`python -m gpuyard.store.file_system_check FOLDER`: test locks between two processes, sockets and SQLite in a folder.

Prints `passed`, or what does not work. A program of its own, because a call may hang in a file system.
"""

import contextlib
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

from gpuyard.system import file_locks as owner_locks
from gpuyard.system import user_sockets
from gpuyard.system.file_locks import try_lock, unlock


def check_folder_works(folder: Path) -> str:
    """Return `passed`, or what does not work."""
    with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as name:
        try:
            problem = _check_locks(Path(name))
            if problem is None:
                with user_sockets.bind(path := f"{name}/socket") as listening:
                    listening.listen()
                    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
                        user_sockets.reach(path, link.connect)
                problem = _check_database(Path(name))
        except (OSError, sqlite3.Error) as error:
            problem = str(error)
        return problem or "passed"


def _check_locks(place: Path) -> str | None:
    path = place / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not (try_lock(descriptor) and owner_locks.try_hold(descriptor)):
            return "a new file cannot be locked"
        if _ask("locks", path) != "flock held, fcntl held":
            return "a second process does not see the locks of the first"
        unlock(descriptor)
        owner_locks.unhold(descriptor)
        return None if _ask("locks", path) == "flock free, fcntl free" else "locks outlast their release"
    finally:
        os.close(descriptor)


def _see_locks(path: Path) -> str:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    has_flock = not try_lock(descriptor)
    return f"flock {'held' if has_flock else 'free'}, fcntl {'held' if owner_locks.is_held(descriptor) else 'free'}"


def _check_database(place: Path) -> str | None:
    """Check the write-ahead log, whose index is memory that all processes share."""
    path = place / "db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        if database.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            return "SQLite cannot use a write-ahead log"
        database.execute("CREATE TABLE told (by TEXT)")
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO told VALUES ('the first')")
        if _ask("database", path) != "locked":
            return "SQLite lets two processes write at once"
        database.execute("COMMIT")
        has_read = _ask("database", path) == "read the first"
        if not has_read or database.execute("SELECT count(*) FROM told").fetchone() != (2,):
            return "SQLite does not show one process what another has written"
    return None


def _see_database(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA busy_timeout = 0")
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            return "locked" if error.sqlite_errorcode == sqlite3.SQLITE_BUSY else str(error)
        found = " ".join(row[0] for row in database.execute("SELECT by FROM told"))
        database.execute("INSERT INTO told VALUES ('the second')")
        database.execute("COMMIT")
        return f"read {found}"


def _ask(what: str, path: Path) -> str:
    """Return what a second process sees."""
    command = [sys.executable, "-P", "-m", "gpuyard.store.file_system_check", what, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    *what, last = sys.argv[1:]
    see = {"locks": _see_locks, "database": _see_database}[what[0]] if what else check_folder_works
    print(see(Path(last)))  # noqa: T201 - the caller reads it
