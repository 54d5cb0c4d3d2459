"""Migrations: SQL that turns a released schema into the next. A copy of the database is kept before anything changes.

No schema was released yet, so there are none (ADR 42).
"""

import sqlite3
from pathlib import Path

from gpuyard.store.copy_database import copy_database

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
