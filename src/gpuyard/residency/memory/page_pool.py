"""RAM copies as lists of pages of one size, which are used again and again: nothing is ever torn or lost in gaps."""

import threading
from collections.abc import Callable

SMALLEST, LARGEST = 1 << 12, 1 << 23
_PAGES_PER_BUDGET = 4096


def page_size(ram: int) -> int:
    """A power of two: small beside the budget, yet large enough for copies at full speed."""
    size = LARGEST
    while size > SMALLEST and size * _PAGES_PER_BUDGET > ram:
        size //= 2
    return size


class Pages:
    """One blob of bytes on pages."""

    def __init__(self, pages: list[memoryview], nbytes: int) -> None:
        self.pages, self.nbytes = pages, nbytes

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """These bytes, in order."""
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
    """Pages that were given back are taken first; new ones are made with `make`."""

    def __init__(self, make: Callable[[int], memoryview], size: int) -> None:
        self._make, self.size = make, size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def rounded(self, nbytes: int) -> int:
        """What a blob takes: whole pages."""
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
