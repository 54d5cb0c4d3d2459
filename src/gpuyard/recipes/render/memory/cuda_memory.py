"""The memory of a CUDA GPU through PyTorch, within a budget that PyTorch's allocator enforces.

- The budget caps all memory that PyTorch reserves on the GPU. At the cap PyTorch empties its cache and retries, and
  only then raises the error that becomes DeviceFull. The driver's own memory for the process does not count.
- All buffers are allocated on one stream, so that memory freed by one can be reused by another. They are used on other
  streams without `record_stream`: the caller of `free` has waited on the host for all work that used the buffer.
- Each thread copies on a stream of its own, from pinned memory, in the background, without the GIL."""

import contextlib
import ctypes
import mmap
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.units import MB, format_size
from gpuyard.recipes.render.memory.device_memory import NUMBER_TYPES, Mark, TransferLane, as_device_full

_HUGE_PAGE = 2 * MB
_USE_HUGE_PAGES, _FILL = 14, 23  # MADV_HUGEPAGE, MADV_POPULATE_WRITE (Linux 5.14)
_LIBC = ctypes.CDLL(None)  # its calls release the interpreter lock; those of the module `mmap` do not
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def slab_size(page_nbytes: int) -> int:
    """Return the size of a slab in whole huge pages: 16 pages of the pool, at most 16 MB, for which other calls
    wait."""
    wanted = max(page_nbytes, min(16 * page_nbytes, 16 * MB))
    return -(-wanted // _HUGE_PAGE) * _HUGE_PAGE


class PinnedSlabs:
    """Pinned memory on huge pages, in slabs that are filled and pinned with one call each. Any thread may take pages.

    While the driver pins memory, kernel launches wait for its lock, for each page of the system. On an H200, four
    threads render 224 pictures per second while PyTorch pins memory, 466 while slabs on huge pages are pinned (ADR 87).
    If a slab cannot be filled or pinned, none is tried again."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        # Its own thread: CUDA keeps the error of a refused call, and PyTorch raises it at the thread's next kernel.
        self._pinner = ThreadPoolExecutor(1, "gpuyard-pin")
        self._lock = threading.Lock()
        self._slabs: list[tuple[mmap.mmap, int, int]] = []  # with the address and size of what is pinned
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)  # by size
        self._is_refused = False

    def page(self, nbytes: int) -> memoryview | None:
        """Return pinned memory, valid until `close`, or None if no more can be pinned this way."""
        with self._lock:
            pages = self._free[nbytes]
            if not pages and not self._is_refused:
                slab = self._pinner.submit(self._make, slab_size(nbytes)).result()
                self._is_refused = slab is None
                if slab is not None:
                    pages += (slab[at : at + nbytes] for at in range(0, slab.nbytes - nbytes + 1, nbytes))
            return pages.pop() if pages else None

    def _make(self, nbytes: int) -> memoryview | None:
        try:
            mapping = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return None  # there is not enough address space or memory
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        skipped = -start % _HUGE_PAGE
        for advice in (_USE_HUGE_PAGES, _FILL):
            _LIBC.madvise(start + skipped, nbytes, advice)
        with self._torch.cuda.device(self._device):
            if int(self._torch.cuda.cudart().cudaHostRegister(start + skipped, nbytes, 0)):
                return None
        self._slabs.append((mapping, start + skipped, nbytes))
        return memoryview(mapping)[skipped : skipped + nbytes]

    def close(self) -> None:
        """Unpin and free all slabs. Views that are left read zeros from then on."""
        with self._lock:
            self._is_refused = True
            self._free.clear()
            self._pinner.submit(self._unpin).result()
            self._pinner.shutdown()

    def _unpin(self) -> None:
        with self._torch.cuda.device(self._device):
            for _, start, nbytes in self._slabs:
                self._torch.cuda.cudart().cudaHostUnregister(start)
                _LIBC.madvise(start, nbytes, 4)  # MADV_DONTNEED
        self._slabs.clear()


class CudaBuffer:
    """Bytes on the GPU. Freeing drops the reference: an array that a renderer kept stays valid and keeps the memory."""

    __slots__ = ("_typed", "nbytes", "tensor")

    def __init__(self, tensor: Any, nbytes: int) -> None:
        self.tensor, self.nbytes = tensor, nbytes
        self._typed: dict[str, Any] = {}

    def as_type(self, dtype: str, kind: Any) -> Any:
        """Return all bytes as a tensor of a type. Made once per type, because arrays are made for every picture."""
        typed = self._typed.get(dtype)
        if typed is None:
            itemsize = int(dtype[1:])
            typed = self._typed[dtype] = self.tensor[: self.nbytes // itemsize * itemsize].view(kind)
        return typed

    def free(self) -> None:
        self._typed.clear()
        self.tensor = None


class _StreamLane:
    def __init__(self, torch: Any, stream: Any) -> None:
        self._torch, self._stream = torch, stream

    def mark(self) -> Mark:
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def finish(self) -> None:
        _wait_for(self._torch, self._stream)


class CudaMemory:
    """GPU `number` in PyTorch's numbering. At most one instance per GPU, because the cap is per process."""

    def __init__(self, number: int, nbytes: int) -> None:
        import torch

        cuda, self.name = torch.cuda, f"cuda:{number}"
        # PyTorch versions apply the fraction to one or the other; with the larger one, it is never too much.
        total = max(cuda.mem_get_info(number)[1], cuda.get_device_properties(number).total_memory)
        size = format_size(nbytes / MB)
        if nbytes > total:
            raise UserError(f"{size} is more than {self.name} has", hint=f"it has {format_size(total / MB)}")
        # With expandable segments, PyTorch maps memory in these steps, and checks the cap before it rounds up to them.
        step = 20 * MB
        if nbytes <= step:
            hint = f"PyTorch takes memory in steps of {format_size(step / MB)}"
            raise UserError(f"{size} is too small a budget for {self.name}", hint=hint)
        cuda.set_per_process_memory_fraction((nbytes - step) / total, number)
        cuda.reset_peak_memory_stats(number)
        self._torch, self._number = torch, number
        self._device = torch.device("cuda", number)
        self._allocation_stream = cuda.Stream(device=self._device)
        self._own = threading.local()
        self._slabs = PinnedSlabs(torch, self._device)
        self._pages: list[Any] = []  # outside of slabs

    def page(self, nbytes: int) -> memoryview:
        """Return pinned memory; ordinary memory, which copies more slowly, if no more can be pinned."""
        if (page := self._slabs.page(nbytes)) is not None:
            return page
        torch = self._torch
        try:
            owner = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            owner = torch.empty(nbytes, dtype=torch.uint8)
        self._pages.append(owner)
        view: memoryview = owner.numpy().data
        return view

    def allocate(self, nbytes: int) -> CudaBuffer:
        torch = self._torch
        try:
            with torch.cuda.stream(self._allocation_stream):
                return CudaBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device), nbytes)
        except RuntimeError as error:
            # Not kept in a variable: a cycle of error, traceback and frame would keep all objects of the frames alive.
            raise as_device_full(error) or error from None

    def free(self, buffer: CudaBuffer) -> None:
        buffer.free()

    def upload(self, views: Sequence[memoryview], buffer: CudaBuffer, *, after: Mark = None) -> None:
        self._copy(*self._parts(buffer, views), after)

    def download(self, buffer: CudaBuffer, views: Sequence[memoryview]) -> None:
        on_gpu, on_host = self._parts(buffer, views)
        self._copy(on_host, on_gpu)

    def _copy(self, targets: Sequence[Any], sources: Sequence[Any], after: Mark = None) -> None:
        """Copy on the thread's own stream, and wait for that."""
        cuda = self._torch.cuda
        if not hasattr(self._own, "stream"):
            self._own.stream = cuda.Stream(device=self._device)
        stream = self._own.stream
        with cuda.stream(stream):
            # With deterministic algorithms, PyTorch fills new memory, on the stream that allocated it.
            stream.wait_stream(self._allocation_stream)
            if after is not None:
                stream.wait_event(after)
            try:
                # All in one call: with a call for each of the hundreds of pages of an asset, this thread would compete
                # for the interpreter with the threads that render.
                if targets:
                    self._torch._foreach_copy_(targets, sources, non_blocking=True)
            finally:
                _wait_for(self._torch, stream)

    def _parts(self, buffer: CudaBuffer, views: Sequence[memoryview]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the buffer's parts and the views as tensors, without empty ones."""
        used = [view for view in views if view.nbytes]
        sizes = [view.nbytes for view in used]
        on_host = [self._torch.frombuffer(view, dtype=self._torch.uint8) for view in used]
        return (buffer.tensor[: sum(sizes)].split(sizes) if used else ()), on_host

    def view(
        self, buffer: CudaBuffer, *, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> Any:
        itemsize = int(dtype[1:])
        if offset % itemsize:
            raise ValueError(f"an array of {dtype} cannot start at byte {offset}")
        # PyTorch's names are numpy's.
        kind = getattr(self._torch, np.dtype(dtype).name if dtype in NUMBER_TYPES else "", None)
        if kind is None:
            hint = "your own loader can return another type; PyTorch has unsigned types from 2.3 on"
            raise EnvironmentFault(f"PyTorch {self._torch.__version__} has no type for arrays of '{dtype}'", hint=hint)
        return buffer.as_type(dtype, kind).as_strided(shape, strides, offset // itemsize)

    def clone(self, array: Any) -> Any:
        return array.clone()

    @contextlib.contextmanager
    def lane(self) -> Iterator[TransferLane]:
        stream = self._torch.cuda.Stream(device=self._device)
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(stream):
            yield _StreamLane(self._torch, stream)

    def used(self) -> int:
        return self._allocated("current")

    def peak(self) -> int:
        return self._allocated("peak")

    def _allocated(self, which: str) -> int:
        """Read one figure. `memory_allocated` sorts all of PyTorch's statistics, while other threads wait for the
        interpreter."""
        stats = self._torch.cuda.memory_stats_as_nested_dict(self._number)
        return int(stats["allocated_bytes"]["all"][which])

    def empty_cache(self) -> None:
        self._torch.cuda.empty_cache()

    def close(self) -> None:
        """Remove the cap, and free all memory that is no longer used."""
        self._slabs.close()
        self._pages.clear()
        self.empty_cache()
        self._torch.cuda.set_per_process_memory_fraction(1.0, self._number)


def _wait_for(torch: Any, stream: Any) -> None:
    """Wait for a stream with a blocking event: `stream.synchronize` would keep a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()
