"""The memory of a CUDA card through PyTorch, within a budget that PyTorch's own allocator keeps.

- The budget caps all that PyTorch reserves on the card: buffers, the renderer's tensors, and its cache. At the cap it
  gives up its cache and tries again, and only then raises what becomes DeviceFull. What the driver takes for the
  process itself, some hundred MB, is not in it.
- All buffers are made on one stream, so that what one leaves another can have. They are used on other streams without
  `record_stream`: whoever frees one has waited on the host for all that used it.
- Copies go by a stream of the calling thread's own. They come from pinned memory, so the card fetches them by itself
  while others render, and nobody holds the GIL while waiting for them.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from gpuyard.core.units import format_size
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.residency.memory.device_memory import Mark, TransferLane, as_device_full

_MB = 1048576
# With expandable segments PyTorch maps memory in such steps, and looks at its cap before it has rounded up to them.
_STEP = 20 * _MB
_TYPES = {
    "b1": "bool",
    "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
    "f2": "float16", "f4": "float32", "f8": "float64",
    "c8": "complex64", "c16": "complex128",
}  # fmt: skip


class CudaBuffer:
    """Bytes on the card. To free it is to let go of them: an array that a renderer kept stays whole, and keeps them."""

    __slots__ = ("nbytes", "tensor")

    def __init__(self, tensor: Any, nbytes: int) -> None:
        self.tensor, self.nbytes = tensor, nbytes


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
    """Card `number`, as PyTorch counts them in this process. One at a time for each card: the cap is the process's."""

    def __init__(self, number: int, nbytes: int) -> None:
        import torch

        self.name = f"cuda:{number}"
        self._torch, self._number = torch, number
        self._device = torch.device("cuda", number)
        self._cap(nbytes)
        torch.cuda.reset_peak_memory_stats(number)
        self._making = torch.cuda.Stream(device=self._device)
        self._own = threading.local()
        self._pages: list[Any] = []

    def _cap(self, nbytes: int) -> None:
        cuda = self._torch.cuda
        # Versions of PyTorch differ in which of the two the fraction is of; of the larger one it is never too much.
        total = max(cuda.mem_get_info(self._number)[1], cuda.get_device_properties(self._number).total_memory)
        if nbytes > total:
            asked, there = format_size(nbytes / _MB), format_size(total / _MB)
            raise UserError(f"{asked} is more than {self.name} has", hint=f"it has {there}")
        if nbytes <= _STEP:
            raise UserError(
                f"{format_size(nbytes / _MB)} is too small a budget for {self.name}",
                hint=f"PyTorch takes memory in steps of {format_size(_STEP / _MB)}",
            )
        cuda.set_per_process_memory_fraction((nbytes - _STEP) / total, self._number)

    def page(self, nbytes: int) -> memoryview:
        """Pinned; where no more can be, such as the system lends any program: copies of it are right, and slower."""
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
            with torch.cuda.stream(self._making):
                return CudaBuffer(torch.empty(nbytes, dtype=torch.uint8, device=self._device), nbytes)
        except RuntimeError as error:
            # In no variable: an error that its own traceback leads back to keeps all that is on the way there.
            raise as_device_full(error) or error from None

    def free(self, buffer: CudaBuffer) -> None:
        buffer.tensor = None

    def upload(self, views: Sequence[memoryview], buffer: CudaBuffer, *, after: Mark = None) -> None:
        with self._side_stream(after):
            for on_card, on_host in self._pairs(buffer, views):
                on_card.copy_(on_host, non_blocking=True)

    def download(self, buffer: CudaBuffer, views: Sequence[memoryview]) -> None:
        with self._side_stream():
            for on_card, on_host in self._pairs(buffer, views):
                on_host.copy_(on_card, non_blocking=True)

    @contextlib.contextmanager
    def _side_stream(self, after: Mark = None) -> Iterator[None]:
        """What is queued inside is done at the end."""
        cuda = self._torch.cuda
        if not hasattr(self._own, "stream"):
            self._own.stream = cuda.Stream(device=self._device)
        stream = self._own.stream
        with cuda.stream(stream):
            # Where a script asks for deterministic algorithms, PyTorch fills new memory, on the stream it is made on.
            stream.wait_stream(self._making)
            if after is not None:
                stream.wait_event(after)
            try:
                yield
            finally:
                _wait_for(self._torch, stream)

    def _pairs(self, buffer: CudaBuffer, views: Sequence[memoryview]) -> Iterator[tuple[Any, Any]]:
        start = 0
        for view in views:
            if view.nbytes:
                on_host = self._torch.frombuffer(view, dtype=self._torch.uint8)
                yield buffer.tensor[start : start + view.nbytes], on_host
            start += view.nbytes

    def view(
        self, buffer: CudaBuffer, *, dtype: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> Any:
        kind, itemsize = self._type(dtype), int(dtype[1:])
        if offset % itemsize:
            raise ValueError(f"an array of {dtype} cannot begin at byte {offset}")
        whole = buffer.tensor[: buffer.nbytes // itemsize * itemsize].view(kind)
        return whole.as_strided(shape, strides, offset // itemsize)

    def _type(self, dtype: str) -> Any:
        kind = getattr(self._torch, _TYPES.get(dtype, ""), None)
        if kind is None:
            raise EnvironmentFault(
                f"PyTorch {self._torch.__version__} has no type for arrays of '{dtype}'",
                hint="a loader of your own can give another type; from 2.3 PyTorch has the unsigned ones",
            )
        return kind

    def clone(self, array: Any) -> Any:
        return array.clone()

    @contextlib.contextmanager
    def lane(self) -> Iterator[TransferLane]:
        stream = self._torch.cuda.Stream(device=self._device)
        with self._torch.cuda.device(self._device), self._torch.cuda.stream(stream):
            yield _StreamLane(self._torch, stream)

    def used(self) -> int:
        return int(self._torch.cuda.memory_allocated(self._number))

    def peak(self) -> int:
        return int(self._torch.cuda.max_memory_allocated(self._number))

    def reserved_peak(self) -> int:
        """With PyTorch's cache: the most that the card ever lent it. Never more than the budget."""
        return int(self._torch.cuda.max_memory_reserved(self._number))

    def empty_cache(self) -> None:
        self._torch.cuda.empty_cache()

    def close(self) -> None:
        """The cap goes, and so does whatever nobody uses any more."""
        self._pages.clear()
        self.empty_cache()
        self._torch.cuda.set_per_process_memory_fraction(1.0, self._number)


def _wait_for(torch: Any, stream: Any) -> None:
    """Asleep: waiting for a stream itself would keep a core busy."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()
