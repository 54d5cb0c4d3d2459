"""What takes a while to find in the database is found in a thread, over a connection that only reads."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gpuyard.store.database import open_reader
from gpuyard.store.job_search import Search

T = TypeVar("T")


class ThreadedReader:
    """One question at a time: however much is asked, it takes no more than one core from the jobs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "gpuyard-search")
        self._connection: sqlite3.Connection | None = None
        self._search: Search | None = None

    async def search(self, question: Callable[[Search], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: question(self._opened()[1]))

    async def read(self, question: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: question(self._opened()[0]))

    def _opened(self) -> tuple[sqlite3.Connection, Search]:
        if self._connection is None or self._search is None:
            self._connection = open_reader(self._path)
            self._search = Search(self._connection)
        return self._connection, self._search

    def close(self) -> None:
        """Interrupt the question that is being answered, drop those that wait, and close the connection."""
        if self._connection is not None:
            self._connection.interrupt()
        self._thread.shutdown(cancel_futures=True)
        if self._connection is not None:
            self._connection.close()
