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
# A request of a new client takes this many turns of the event loop, from the connection to the response. They are short
# if nothing has arrived.
_TURNS = 6
# From the end of the task of a submission to its written answer.
_ANSWER_TURNS = 3


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
        for _ in range(_TURNS):
            await asyncio.sleep(0)


def call_after_answer(act: Callable[[], object]) -> None:
    """Call `act` when the submission that is stored now has been answered: its client need not wait for it."""
    _call_after_turns(asyncio.get_running_loop(), _ANSWER_TURNS, act)


def _call_after_turns(loop: asyncio.AbstractEventLoop, turns: int, act: Callable[[], object]) -> None:
    if turns:
        loop.call_soon(_call_after_turns, loop, turns - 1, act)
    else:
        act()


class ThreadedReader:
    """Runs one query at a time, over a read-only connection: queries take at most one core from the jobs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "gpuyard-search")
        self._search: Search | None = None

    async def search(self, query: Callable[[Search], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: query(self._open()))

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        return await self.search(lambda search: query(search.connection))

    def _open(self) -> Search:
        if self._search is None:
            self._search = Search(open_reader(self._path))
        return self._search

    def close(self) -> None:
        """Interrupt the running query, drop those that wait, and close the connection."""
        if self._search is not None:
            self._search.connection.interrupt()
        self._thread.shutdown(cancel_futures=True)
        if self._search is not None:
            self._search.connection.close()
