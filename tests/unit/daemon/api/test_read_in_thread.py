"""The read-only database connection is closed with the daemon, even during a query."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.daemon.api.slow_requests import ThreadedReader
from gpuyard.store.database import Database, open_database

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT begun() UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened, _ = open_database(tmp_path / "queue.db")
    with contextlib.closing(opened):
        yield opened


def test_the_database_is_a_single_file_again_if_its_reader_is_closed_first(database: Database) -> None:
    path, reader = database.path, ThreadedReader(database.path)
    database.execute("UPDATE settings SET value = '7' WHERE name = 'next_id'")
    assert asyncio.run(reader.read(lambda connection: connection.execute("SELECT value FROM settings").fetchall()))
    reader.close()
    database.close()
    assert [each.name for each in path.parent.glob("queue.db*")] == ["queue.db"]


def test_an_endless_query_is_interrupted(database: Database) -> None:
    begun = threading.Event()

    def begin() -> int:
        begun.set()
        return 0

    def ask(connection: sqlite3.Connection) -> None:
        connection.create_function("begun", 0, begin)
        connection.execute(ENDLESS)

    async def ask_and_close() -> None:
        reader = ThreadedReader(database.path)
        asked = asyncio.ensure_future(reader.read(ask))
        assert await asyncio.to_thread(begun.wait, 60.0)
        reader.close()
        with pytest.raises(sqlite3.OperationalError, match="interrupted"):
            await asked

    asyncio.run(ask_and_close())
