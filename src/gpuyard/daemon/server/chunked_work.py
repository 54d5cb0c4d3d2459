"""Run a long request in pieces, so that the daemon can serve others in between."""

import asyncio
from typing import TypeVar

from gpuyard.control.user_requests import InPieces

T = TypeVar("T")


async def run_in_pieces(pieces: InPieces[T]) -> T:
    """Exhaust the generator, with a turn of the event loop after each piece; return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)
