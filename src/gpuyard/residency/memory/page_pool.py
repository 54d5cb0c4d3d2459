"""Copies in RAM as lists of pages of one size, which are reused: memory never fragments."""

import threading
from collections.abc import Callable

SMALLEST, LARGEST = 1 << 12, 1 << 23
_PAGES_PER_BUDGET = 4096


def page_size(ram: int) -> int:
    """Return a power of two: small relative to the budget, but large enough for copies at full speed."""
    size = LARGEST
    while size > SMALLEST and size * _PAGES_PER_BUDGET > ram:
        size //= 2
    return size


class Pages:
    """A sequence of bytes on pages."""

    def __init__(self, pages: list[memoryview], nbytes: int) -> None:
        self.pages, self.nbytes = pages, nbytes

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return views of these bytes, in order."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        found = []
        while nbytes:
            page = self.pages[offset // self.pages[0].nbytes]
            start = offset % page.nbytes
            part = page[start : start + nbytes]
            found.append(part)
            offset, nbytes = offset + part.nbytes, nbytes - part.nbytes
        return found


class PagePool:
    """Reuses pages that were given back, and allocates new ones with `make`."""

    def __init__(self, make: Callable[[int], memoryview], size: int) -> None:
        self._make, self.size = make, size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def rounded(self, nbytes: int) -> int:
        """Round up to whole pages."""
        return -(-nbytes // self.size) * self.size

    def take(self, nbytes: int) -> Pages:
        count = self.rounded(nbytes) // self.size
        with self._lock:
            kept = len(self._free) - min(count, len(self._free))
            pages = self._free[kept:]
            del self._free[kept:]
        pages.extend(self._make(self.size) for _ in range(count - len(pages)))
        return Pages(pages, nbytes)

    def give_back(self, blob: Pages) -> None:
        with self._lock:
            self._free.extend(blob.pages)
