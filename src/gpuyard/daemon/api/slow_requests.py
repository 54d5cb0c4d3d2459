"""Slow requests do not delay others: they run in pieces, or query the database in a thread."""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gpuyard.queue.add_submission import InPieces
from gpuyard.store.database import open_reader
from gpuyard.store.search_jobs import Search

T = TypeVar("T")


async def run_in_pieces(pieces: InPieces[T], may_write: Callable[[], Awaitable[None]], *, rest: float = 0.0) -> T:
    """Exhaust the generator; return its result. Other requests are served after each piece, for `rest` times as long as
    it took. Each piece waits for `may_write`."""
    while True:
        await may_write()
        began = time.perf_counter()
        try:
            next(pieces)
        except StopIteration as done:
            result: T = done.value
            return result
        if rest:
            await asyncio.sleep(rest * (time.perf_counter() - began))
        for _ in range(6):  # turns of the loop that a request of a new client takes, from connection to response
            await asyncio.sleep(0)


def call_after_answer(act: Callable[[], object], turns: int = 3) -> None:
    """Call `act` when the submission that is stored now has been answered: its client need not wait for it. From the
    end of its task to the written answer the loop takes these turns."""
    if turns:
        asyncio.get_running_loop().call_soon(call_after_answer, act, turns - 1)
    else:
        act()


class ThreadedReader:
    """Runs one query at a time, over a read-only connection: queries take at most one core from the jobs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "gpuyard-search")
        self._search: Search | None = None

    async def search(self, query: Callable[[Search], T]) -> T:
        def run() -> T:
            if self._search is None:
                self._search = Search(open_reader(self._path))
            return query(self._search)

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await self.search(lambda search: query(search.connection))

    def close(self) -> None:
        """Interrupt the running query, drop those that wait, and close the connection."""
        if self._search is not None:
            self._search.connection.interrupt()
        self._thread.shutdown(cancel_futures=True)
        if self._search is not None:
            self._search.connection.close()
