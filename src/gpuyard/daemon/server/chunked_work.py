"""Long requests are done piece by piece, and others are served in between."""

import asyncio
from typing import TypeVar

from gpuyard.control.user_requests import InPieces

T = TypeVar("T")


async def in_pieces(pieces: InPieces[T]) -> T:
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)
