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
    """A sequence of bytes on pages of `size` bytes, each taken when it is first used: so one part is read while memory
    for the next is pinned. Any thread may use them."""

    def __init__(self, nbytes: int, size: int, take: Callable[[], memoryview]) -> None:
        self.nbytes = nbytes
        self._size, self._take = size, take
        self._pages: list[memoryview | None] = [None] * -(-nbytes // size)
        self._lock = threading.Lock()

    @property
    def pages(self) -> list[memoryview]:
        """The pages that were taken so far."""
        return [page for page in self._pages if page is not None]

    def _page(self, number: int) -> memoryview:
        with self._lock:
            page = self._pages[number]
            if page is None:
                page = self._pages[number] = self._take()
            return page

    def views(self, offset: int, nbytes: int) -> list[memoryview]:
        """Return views of these bytes, in order."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of {self.nbytes}")
        found = []
        while nbytes:
            page = self._page(offset // self._size)
            start = offset % self._size
            part = page[start : start + nbytes]
            found.append(part)
            offset, nbytes = offset + part.nbytes, nbytes - part.nbytes
        return found


class PagePool:
    """Reuses pages that were given back; new ones are made with `make`."""

    def __init__(self, make: Callable[[int], memoryview], size: int) -> None:
        self._make, self.size = make, size
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def rounded(self, nbytes: int) -> int:
        """Round up to whole pages."""
        return -(-nbytes // self.size) * self.size

    def take(self, nbytes: int) -> Pages:
        return Pages(nbytes, self.size, self._page)

    def _page(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._make(self.size)

    def give_back(self, blob: Pages) -> None:
        with self._lock:
            self._free.extend(blob.pages)
