"""Where a loader writes to: memory that somebody else has, in pieces of any size, which are not known beforehand."""

from typing import Any, Protocol

import numpy as np


class Sink(Protocol):
    """One run of bytes, which may lie in several places."""

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Writable views of bytes, in order, together exactly so many."""
        ...


def put(sink: Sink, offset: int, array: np.ndarray[Any, Any]) -> None:
    """The bytes of a dense array. numpy copies them, as it lets other threads run meanwhile."""
    content = array.reshape(-1).view(np.uint8)
    done = 0
    for view in sink.views(offset, array.nbytes):
        np.copyto(np.frombuffer(view, np.uint8), content[done : done + view.nbytes])
        done += view.nbytes
