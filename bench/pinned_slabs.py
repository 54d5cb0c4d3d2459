"""Pinned memory on huge pages: large anonymous mappings, filled in one call and pinned in one call each.

A pinned page costs the driver a lock that kernel launches need too, and a fault for each 4 kB when it is filled. This
is for comparison with PyTorch's pinned memory, which is a call of the driver for every few MB of 4 kB pages.
"""

import ctypes
import mmap
import threading
from typing import Any

_MB = 1048576
_HUGE = 2 * _MB
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_LIBC = ctypes.CDLL(None, use_errno=True)  # its calls release the interpreter lock; those of `mmap` do not
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PinnedSlabs:
    """Hands out pages of slabs. `cudart` is PyTorch's `torch.cuda.cudart()`. Never freed before `close`."""

    def __init__(self, cudart: Any, slab_nbytes: int = 64 * _MB) -> None:
        self._cudart, self._slab_nbytes = cudart, slab_nbytes
        self._lock = threading.Lock()
        self._slabs: list[tuple[mmap.mmap, int]] = []
        self._free: list[memoryview] = []

    def page(self, nbytes: int) -> memoryview:
        """Return pinned memory. Several threads fill and pin slabs at the same time."""
        with self._lock:
            left = self._free.pop() if self._free else memoryview(b"")
        if left.nbytes < nbytes:
            left = self._make(max(nbytes, self._slab_nbytes))
        with self._lock:
            self._free.append(left[nbytes:])
        return left[:nbytes]

    def _make(self, nbytes: int) -> memoryview:
        mapping = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = memoryview(mapping)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        skipped = -start % _HUGE
        _advise(start + skipped, nbytes, mmap.MADV_HUGEPAGE)
        _advise(start + skipped, nbytes, _POPULATE_WRITE)
        result = int(self._cudart.cudaHostRegister(start + skipped, nbytes, 0))
        if result:
            raise MemoryError(f"cudaHostRegister of {nbytes} bytes: error {result}")
        with self._lock:
            self._slabs.append((mapping, start + skipped))
        return view[skipped : skipped + nbytes]

    def close(self) -> None:
        """Unpin everything. The memory goes with its last view."""
        with self._lock:
            self._free.clear()
            for _, start in self._slabs:
                self._cudart.cudaHostUnregister(start)
            self._slabs.clear()


def _advise(start: int, nbytes: int, advice: int) -> None:
    if _LIBC.madvise(start, nbytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise {advice} failed")
