"""Host memory that a GPU copies to and from at full speed: huge pages, allocated once by several threads, and pinned.

PyTorch's own pinned memory is rounded up to a power of two, and is allocated by one thread in small pages."""

import ctypes
import importlib
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class PinnedMemory:
    """Blocks of pinned memory. `reserve` adds what is missing; nothing is given back before the program ends."""

    def __init__(self) -> None:
        self.size = 0
        self.is_pinned = True
        self._blocks: list[tuple[mmap.mmap, Any]] = []  # mappings, each with a tensor of its bytes

    def reserve(self, size: int) -> None:
        """Have at least `size` bytes. If CUDA refuses to register them, they are used all the same, more slowly."""
        missing = size - self.size
        if missing <= 0:
            return
        missing += -missing % (2 << 20)  # a huge page
        torch: Any = importlib.import_module("torch")
        memory = mmap.mmap(-1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block = torch.frombuffer(memory, dtype=torch.uint8)
        _allocate(block.data_ptr(), missing)
        code = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), missing, 0)
        self.is_pinned = self.is_pinned and int(code) == 0
        self._blocks.append((memory, block))
        self.size += missing

    def slices(self, begin: int, size: int) -> Iterator[Any]:
        """Yield byte tensors that together are the `size` bytes from `begin` on."""
        for _, block in self._blocks:
            if begin < len(block) and size:
                part = block[begin : begin + size]
                yield part
                begin, size = begin + len(part), size - len(part)
            begin -= len(block)

    def storage(self, begin: int, size: int) -> Any:
        """Return a storage of its own for the `size` bytes from `begin` on. It shares this memory, unless they are in
        several blocks."""
        torch: Any = importlib.import_module("torch")
        parts, start = list(self.slices(begin, size)), begin
        if len(parts) > 1:
            return torch.cat(parts).untyped_storage()
        for memory, block in self._blocks:
            if start < len(block):
                return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).untyped_storage()
            start -= len(block)
        raise IndexError(f"no {size} bytes from {begin} on are reserved")


def _allocate(address: int, size: int) -> None:
    """Let the kernel allocate the pages on several threads. Kernels before 5.14 refuse; then CUDA does it, slowly."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)

    piece = 64 << 20

    def populate(start: int) -> None:
        length = ctypes.c_size_t(min(piece, size - start))
        libc.madvise(ctypes.c_void_p(address + start), length, 23)  # MADV_POPULATE_WRITE

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(populate, range(0, size, piece)))
