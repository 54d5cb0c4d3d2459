"""Moves the GPU memory of PyTorch tensors to pinned host memory, and back.

What moves is the storage behind each tensor: it is copied, and its GPU memory is given back to the driver. Tensors,
parameters and views of them stay the same objects, so every reference to them holds afterwards, and all bytes are the
same. Only their addresses on the GPU may differ.

- Tensors that share a storage are moved once. Of a sharded tensor (DTensor), this process's part is moved.
- Storages that PyTorch does not own, such as memory of another library, stay where they are.
- The program must not use the tensors between `park` and `bring_back`: they are empty. If it has to, because it is
  ended there, `stay_in_ram` makes them tensors of the CPU.
"""

import gc
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuyard.scripting.pinned_memory import PinnedMemory

_ALIGNED = 64  # where each storage begins in host memory, so that the CPU can compute with it


class TensorParking:
    """`things`: modules, optimisers, tensors, and lists, tuples and dicts of them. Their tensors are looked up at each
    call, since an optimiser makes some in its first step."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._things = tuple(things)
        self._memory = PinnedMemory()
        self._parked: list[tuple[Any, int]] = []  # storages and their sizes, in the order of their bytes in memory

    @property
    def is_parked(self) -> bool:
        return bool(self._parked)

    def reserve(self) -> int:
        """Allocate the host memory for all present tensors. Return its size."""
        self._memory.reserve(sum(_aligned(storage.nbytes()) for storage in self._storages()))
        return self._memory.size

    def park(self) -> int:
        """Move the tensors out. Return how many bytes of GPU memory they held."""
        torch: Any = importlib.import_module("torch")
        storages = [(storage, storage.nbytes()) for storage in self._storages()]
        self._memory.reserve(sum(_aligned(size) for _, size in storages))
        _wait_for_devices(torch, storages)
        for host, device in self._copies(torch, storages):
            host.copy_(device, non_blocking=True)
        _wait_for_devices(torch, storages)
        self._parked = storages
        try:
            for storage, _ in storages:
                storage.resize_(0)
            torch.cuda.empty_cache()
        except RuntimeError:  # a signal handler of the program may raise one too
            self.bring_back()
            raise
        return sum(size for _, size in storages)

    def bring_back(self) -> None:
        """Move the tensors back. Raises torch.OutOfMemoryError if there is not enough GPU memory; then all are out."""
        torch: Any = importlib.import_module("torch")
        try:
            for storage, size in self._parked:
                storage.resize_(size)
        except RuntimeError:
            for storage, _ in self._parked:
                storage.resize_(0)
            torch.cuda.empty_cache()
            raise
        for host, device in self._copies(torch, self._parked):
            device.copy_(host, non_blocking=True)
        _wait_for_devices(torch, self._parked)
        self._parked = []

    def stay_in_ram(self) -> int | None:
        """Make the parked tensors tensors of the CPU, with the same bytes: also those that are not among `things`, such
        as views. This needs no GPU, and is for good. Return how many could not be changed, and are empty; None if no
        tensors are parked."""
        if not self._parked:
            return None
        torch: Any = importlib.import_module("torch")
        in_ram, begin = {}, 0
        for storage, size in self._parked:
            in_ram[storage._cdata] = self._memory.storage(begin, size)  # noqa: SLF001 - the storage's identity
            begin += _aligned(size)
        with torch.no_grad():  # of sharded tensors, this yields their parts themselves
            found = [*_tensors(torch, self._things), *_tensors(torch, _all_tensors(torch))]
            left = sum(not _change_storage(torch, each, in_ram) for each in found)
        self._parked, self._things = [], ()
        return left

    def _copies(self, torch: Any, storages: Iterable[tuple[Any, int]]) -> Iterator[tuple[Any, Any]]:
        """Yield parts of the host memory, each with the bytes on the device that belong there."""
        begin = 0
        for storage, size in storages:
            on_device, done = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), 0
            for host in self._memory.slices(begin, size):
                yield host, on_device[done : done + len(host)]
                done += len(host)
            begin += _aligned(size)

    def _storages(self) -> list[Any]:
        """Return the storages on GPUs behind all tensors, each once."""
        torch: Any = importlib.import_module("torch")
        found: dict[tuple[Any, int], Any] = {}
        for tensor in _tensors(torch, self._things):
            if tensor.is_cuda and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.resizable():
                    found[storage.device, storage.data_ptr()] = storage
        return list(found.values())


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED


def _all_tensors(torch: Any) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def _change_storage(torch: Any, tensor: Any, storages: Mapping[int, Any]) -> bool:
    """Give the tensor the storage that stands for its own, if there is one. Return False if that is impossible."""
    try:
        storage = storages.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
    except RuntimeError:  # it has none
        return True
    if storage is None:
        return True
    if tensor.is_conj() or tensor.is_neg():  # their bytes are not their values
        return False
    try:
        changed = torch.empty(0, dtype=tensor.dtype)
        tensor.data = changed.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    except (RuntimeError, TypeError):
        return False
    return True


def _wait_for_devices(torch: Any, storages: Iterable[tuple[Any, int]]) -> None:
    for device in {storage.device for storage, _ in storages}:
        torch.cuda.synchronize(device)


def _tensors(torch: Any, thing: Any) -> Iterator[Any]:
    if isinstance(thing, torch.Tensor):
        yield thing.to_local() if hasattr(thing, "to_local") else thing  # of a sharded tensor, this process's part
        if thing.is_leaf and thing.grad is not None:  # PyTorch warns if others are asked
            yield from _tensors(torch, thing.grad)
    elif isinstance(thing, torch.nn.Module):
        yield from _tensors(torch, [*thing.parameters(), *thing.buffers()])
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _tensors(torch, [thing.param_groups, list(thing.state.values())])
    elif isinstance(thing, dict):
        yield from _tensors(torch, list(thing.values()))
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _tensors(torch, each)
