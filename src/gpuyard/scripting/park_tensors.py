"""The side of a program that can park its GPU memory: it answers requests (`system/parking_protocol.py`) in a thread,
fulfils them where the program calls `point`, and moves PyTorch tensors to pinned host memory and back.

- The thread never touches the GPU. A program that has parked stays in `point` until its memory is back, and that is
kept. A connection that is closed too early is undone.
- A signal handler of the program may raise an exception in `point`. If memory is out then, it stays in RAM for good:
the driver may have frozen the process, and the memory on the device may belong to others.
- What moves is the storage behind each tensor, once; of a sharded tensor (DTensor), this process's part. Tensors and
views stay the same objects with the same bytes; only their addresses on the GPU may differ. Storages that PyTorch does
not own stay where they are.
- The program must not use the tensors between `park` and `bring_back`: they are empty. If it has to, because it is
ended there, `stay_in_ram` makes them tensors of the CPU."""

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from gpuyard.system import user_sockets
from gpuyard.system.parking_protocol import HOLD, KEEP, LONGEST_LINE, NEXT, PARK, PARKED, REFUSED, RETURN, RETURNED

_LEFT = "a signal ended its step while its memory was parked"


class ParkListener:
    """`park` moves the GPU memory out and returns how many bytes that were; `bring_back` moves it back. Both are called
    in the thread that calls `point`. If one raises RuntimeError, OSError or MemoryError, the memory stays where it
    was. `stay_in_ram` is called there when another exception leaves `point`. It lets the program use in RAM what is
    out, without a call of the device, and returns whether anything was out."""

    def __init__(
        self,
        path: str,
        park: Callable[[], int],
        bring_back: Callable[[], None],
        stay_in_ram: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raises OSError or GpuyardError if the socket cannot be made."""
        self._park, self._bring_back, self._stay_in_ram = park, bring_back, stay_in_ram
        self._path, self._pid = path, os.getpid()
        # Guards what follows. It is entered itself, not by its condition: that is Python code, which a signal may
        # interrupt before it has released the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reached = 0  # the number of the point where the program is, or was last
        self._is_at_point = False
        self._stop_at: int | None = None  # the point that the program shall not leave
        self._shall_park = False  # there
        self._is_parked = self._is_moving = False
        self._is_over = False  # it has left a point while its memory was out, and parks no more
        self._parked_bytes = 0
        self._refusal: str | None = None  # why the last move failed; it is not repeated before the next request
        self._wake = socket.socketpair()
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self._socket = user_sockets.bind(path)
        self._socket.listen()
        threading.Thread(target=self._serve, name="gpuyard-park", daemon=True).start()

    def point(self) -> None:
        """Count a point. Park now if that was asked for, and return when the memory is back."""
        if os.getpid() != self._pid or self._is_over:  # a forked child has no GPU memory of its own
            return
        with self._lock:
            self._reached += 1
            if self._stop_at is None and not self._is_parked:
                return
            self._is_at_point = True
        try:
            while (shall_park := self._next_move()) is not None:
                self._move(shall_park=shall_park)
        except BaseException:  # a signal handler raised it
            try:
                self._interrupt()
            finally:  # a second signal may have interrupted that
                self._interrupt()
            raise
        finally:
            with self._lock:
                self._is_at_point = False

    def close(self) -> None:
        """Withdraw the registration. Nothing happens in a forked child."""
        if os.getpid() == self._pid:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _interrupt(self) -> None:
        """If memory is out, let it stay in RAM, and withdraw the registration: there is nothing left to park."""
        if self._stay_in_ram():
            self._is_over = True
            self.close()
        self._is_parked = False
        self._end_move("interrupted")

    def _next_move(self) -> bool | None:
        """Wait until there is something to do. Return whether to park or to bring back; None: leave the point."""
        with self._lock:
            while True:
                shall_be_parked = self._shall_park and self._stop_at == self._reached
                if self._is_parked != shall_be_parked and self._refusal is None:
                    self._is_moving = True
                    return shall_be_parked
                if self._stop_at != self._reached and not self._is_parked:
                    self._is_at_point = False
                    return None
                # A signal that comes just before a wait begins does not interrupt it: its handler runs after the wait.
                self._changed.wait(0.5)

    def _move(self, *, shall_park: bool) -> None:
        refusal = None
        try:
            if shall_park:
                self._parked_bytes = self._park()
            else:
                self._bring_back()
        except (RuntimeError, OSError, MemoryError) as error:  # no training ends for this
            refusal = str(error) or type(error).__name__
        with self._lock:
            self._is_parked = self._is_parked if refusal is not None else shall_park
        self._end_move(refusal)

    def _end_move(self, refusal: str | None) -> None:
        with self._lock:
            self._is_moving, self._refusal = False, refusal
        self._wake[1].send(b"x")

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                if user_sockets.is_same_user(connection):
                    self._handle(connection)

    def _handle(self, connection: socket.socket) -> None:
        """Fulfil the requests of a connection, and undo them if it ends without `keep`."""
        with self._lock:
            before = (self._stop_at, self._shall_park)
        try:
            connection.settimeout(5.0)
            with connection.makefile("rb") as lines:
                request = _read_request(lines)
                connection.settimeout(None)
                while request != [KEEP]:
                    answer = self._fulfil(request, connection)
                    connection.sendall(f"{' '.join(answer.split())[:LONGEST_LINE]}\n".encode())
                    request = _read_request(lines)
        except OSError:
            # A program that was parked before, and has not left that point, parks again; any other goes on.
            with self._lock:
                is_there = self._is_at_point and before[0] == self._reached
            self._ask(before[0] if is_there else None, shall_park=before[1] and is_there)
            return
        if not self._shall_park:
            self._ask(None, shall_park=False)

    def _fulfil(self, request: list[bytes], connection: socket.socket) -> str:
        """Return the answer, once the program has done what it is asked."""
        if self._is_over:
            return RETURNED if request == [RETURN] else f"{REFUSED} {_LEFT}"
        if request == [HOLD]:
            return f"{NEXT} {self._hold()}"
        if request == [RETURN]:
            self._ask(self._hold(), shall_park=False)
            self._wait(connection, lambda: not (self._is_parked or self._is_moving))
            return f"{REFUSED} {self._refusal}" if self._is_parked else RETURNED
        if request[:1] == [PARK] and len(request) > 1 and request[1].isdigit():
            number = int(request[1])
            if number < self._hold():
                return f"{REFUSED} it has passed point {number}"
            self._ask(number, shall_park=True)
            self._wait(connection, lambda: self._is_parked and self._reached == number)
            is_parked = self._is_parked and self._reached == number
            return f"{PARKED} {self._parked_bytes}" if is_parked else f"{REFUSED} {self._refusal or _LEFT}"
        return f"{REFUSED} an unknown request"

    def _hold(self) -> int:
        """Let the program not leave the point where it is, or its next. Return the number of that."""
        with self._lock:
            self._stop_at = self._reached if self._is_at_point else self._reached + 1
            return self._stop_at

    def _ask(self, stop_at: int | None, *, shall_park: bool) -> None:
        with self._lock:
            self._stop_at, self._shall_park, self._refusal = stop_at, shall_park, None
            self._changed.notify_all()

    def _wait(self, connection: socket.socket, is_done: Callable[[], bool]) -> None:
        """Wait until it is done, refused or impossible. Raises ConnectionAbortedError if the other side hangs up."""
        ready = select.poll()  # a program may have more files open than `select` can watch
        for each in (connection, self._wake[0]):
            ready.register(each, select.POLLIN)
        while True:
            with self._lock:
                if is_done() or self._is_over or (self._refusal is not None and not self._is_moving):
                    return
            if self._wake[0].fileno() not in dict(ready.poll()):
                raise ConnectionAbortedError
            self._wake[0].recv(LONGEST_LINE)


def _read_request(lines: IO[bytes]) -> list[bytes]:
    """Return the words of the next request. Raises ConnectionAbortedError at the end of the connection."""
    line = lines.readline(LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise ConnectionAbortedError
    return line.split()


class TensorParking:
    """Parks `things`: modules, optimisers, tensors, and containers of them, whose tensors each call looks up."""

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
            others = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
            found = [*_tensors(torch, self._things), *_tensors(torch, others)]
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
    """Return the size in host memory: the CPU can compute with storages that begin at multiples of 64 bytes."""
    return size + -size % 64


def _change_storage(torch: Any, tensor: Any, storages: Mapping[int, Any]) -> bool:
    """Give the tensor the storage that stands for its own, if there is one. Return False if that is impossible."""
    storage = None
    with contextlib.suppress(RuntimeError):  # it has none
        storage = storages.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the storage's identity
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
        """Return a storage of the bytes from `begin` on. It shares this memory, unless they are in several blocks."""
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
