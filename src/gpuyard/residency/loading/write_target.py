"""The target that a loader writes to: memory of the caller, in parts of any size."""

from typing import Any, Protocol

import numpy as np


class Sink(Protocol):
    """A sequence of bytes, possibly in several parts of memory."""

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return writable views in order, `nbytes` bytes in total."""
        ...


def write_array(sink: Sink, offset: int, array: np.ndarray[Any, Any]) -> None:
    """Write the bytes of a dense array. Uses numpy for the copy, because it releases the GIL."""
    content = array.reshape(-1).view(np.uint8)
    done = 0
    for view in sink.views(offset, array.nbytes):
        np.copyto(np.frombuffer(view, np.uint8), content[done : done + view.nbytes])
        done += view.nbytes
