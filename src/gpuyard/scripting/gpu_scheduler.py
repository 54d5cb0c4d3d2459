"""GPUScheduler: reserve GPUs for a script, across processes and users.

with GPUScheduler(num_gpus=2) as gpu_ids:
    model.to(f"cuda:{gpu_ids[0]}")

GPU numbers are those that PyTorch uses in this process; see gpu_info. All GPUs of a reservation are of one vendor."""

import atexit
import difflib
import functools
import inspect
import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Never, ParamSpec, TypeAlias, TypeVar

from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.errors import UserError
from gpuyard.ledger.ledger import HeldLease, open_ledger
from gpuyard.ledger.neighbours import announce
from gpuyard.ledger.wait_for_devices import Acquisition, WaitMessages, enclosing_lease, print_to_stderr
from gpuyard.model.lease import FixedMemory, HostShare, Lease, Need, WholeDevice, check_several
from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.model.submit_options import MAX_PRIORITY
from gpuyard.model.units import parse_size
from gpuyard.policy.device_names import check_possible, choose_vendor, find_devices, refuse_while_silent
from gpuyard.policy.host_room import check_host
from gpuyard.scripting.gpu_info import (
    MEMORY_FREE_GB,
    POWER_W,
    DefaultThreshold,
    all_banned_devices,
    as_names,
    free_memory_mb,
    number_as_process,
    preferred_vendor,
    process_vendor,
    snapshot,
    torch_vendor,
    visible_devices,
)
from gpuyard.scripting.torch_device import TorchDeviceSelection
from gpuyard.visible_devices import process_numbers

# The lease is None if this process was started with it.
_Reservation: TypeAlias = tuple[HeldLease | None, TorchDeviceSelection]
P = ParamSpec("P")
R = TypeVar("R")

# A lease lasts until `release()` or the end of the process, also if the script drops its GPUScheduler.
_held_leases: set[HeldLease] = set()


class GPUScheduler:
    """Reserves GPUs for a `with` block, for each call of a decorated function, or from `acquire()` to `release()`.

    It returns a list of GPU numbers as PyTorch uses them in this process. Without `vram` the script gets whole GPUs,
    and only GPUs with at least the given free memory and at most the given power draw and utilization. With
    `vram="8G"` it gets that much memory on each GPU and shares the GPUs with others. Each `with` makes a reservation
    of its own, also in another thread. On a machine with GPUs of several vendors, `vendor="amd"` selects the vendor;
    by default those that PyTorch is built for if it is imported, else those of the vendor with the largest GPU.
    Several GPUs are the best-linked ones that are free; `linked` waits for GPUs that NVLink or XGMI joins, `same_node`
    for GPUs of one NUMA node.
    `ram="8G"` and `cpus=4` reserve RAM and CPUs of the machine, too.

    A script that has to wait prints a line to stderr when the wait starts and when it ends, unless `quiet` is set.
    `progress(line)` gets these lines in place of stderr, and another line whenever the reason changes.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the names and the order that existing scripts use
        self,
        memory_free_threshold_gb: float = MEMORY_FREE_GB,
        power_threshold_w: float | None = POWER_W,
        utilization_threshold_percent: float | None = 1,
        max_wait_time: float | None = math.inf,
        poll_interval: float = 10,
        specific_gpus: Sequence[int | str] | int | str | None = None,
        timeout: float = 10,
        num_gpus: int = 1,
        debug_mode: bool = False,  # noqa: FBT001, FBT002
        *,
        vram: str | float | None = None,
        priority: int = 0,
        label: str | None = None,
        quiet: bool = False,
        progress: Callable[[str], None] | None = None,
        vendor: str | None = None,
        linked: bool = False,
        same_node: bool = False,
        ram: str | float | None = None,
        cpus: float | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise TypeError(_describe_unknown(next(iter(unknown))))
        if not poll_interval >= 0:
            raise UserError(f"poll_interval is {poll_interval}", hint="give seconds, such as 10")
        self._poll_interval_s = max(0.05, poll_interval)
        self._num_gpus = _whole_number("num_gpus", num_gpus)
        if num_gpus < 1:
            raise UserError(f"num_gpus is {num_gpus}", hint="request at least one GPU")
        self._priority = _whole_number("priority", priority)
        if abs(priority) > MAX_PRIORITY:
            raise UserError(f"priority is {priority}", hint=f"give a number from -{MAX_PRIORITY} to {MAX_PRIORITY}")
        self._vram_mb, ram_mb = _size_mb("vram", vram), _size_mb("ram", ram)
        if cpus is not None and not 0 < cpus < math.inf:
            raise UserError(f"cpus is {cpus}", hint="give a number such as 4")
        share = HostShare(ram_mb=ram_mb, cpus=None if cpus is None else float(cpus))
        self._host_share = None if share == HostShare() else share
        limits = (None, None) if vram is not None else (power_threshold_w, utilization_threshold_percent)
        self._memory_gb, self._power_w, self._utilization = memory_free_threshold_gb, *limits
        self._max_wait_s = math.inf if max_wait_time is None else max_wait_time
        self._specific, self._mutex_timeout_s, self._ignores_health = as_names(specific_gpus), timeout, debug_mode
        if vendor is not None and vendor not in {*Vendor}:
            raise UserError(f"vendor is {vendor!r}", hint=f"give one of {', '.join(Vendor)}")
        self._vendor = None if vendor is None else Vendor(vendor)
        given = [name for name, is_given in (("linked", linked), ("same_node", same_node)) if is_given]
        check_several(num_gpus, "num_gpus=2", given)
        self._is_linked, self._is_on_one_node = linked, same_node
        self._label = label or os.path.basename(sys.argv[0] or "python")
        self._write = progress or ((lambda _: None) if quiet else print_to_stderr)
        self._writes_changes = progress is not None
        self._thread = threading.local()

    def acquire(self) -> list[int]:
        """Wait for the GPUs, reserve them and return their numbers. `release()` ends this thread's last reservation."""
        seen = snapshot()
        here = number_as_process(seen)
        need = self._need(seen, here)
        ledger = open_ledger()
        enclosing = enclosing_lease(ledger, need, seen)
        if enclosing is not None:
            return self._enter(None, enclosing, seen)
        announce(ledger.folder)
        acquisition = Acquisition(
            ledger, snapshot, need, priority=self._priority, label=self._label, mutex_timeout_s=self._mutex_timeout_s
        )
        messages = WaitMessages(need, here, self._write, writes_changes=self._writes_changes)
        held: HeldLease | None = None
        try:
            held = acquisition.wait(self._max_wait_s, self._poll_interval_s, messages.report_wait)
            _held_leases.add(held)
            messages.report_end(held.lease)
            return self._enter(held, held.lease, seen)
        except BaseException:
            if held is not None:
                _end(held)
            raise

    def _enter(self, held: HeldLease | None, lease: Lease, seen: Snapshot) -> list[int]:
        """Make the first GPU PyTorch's current device, and return the numbers of all."""
        ids = [share.device_id for share in lease.shares]
        device = seen.device(ids[0])

        def number() -> int | None:
            is_torchs = not seen.is_mixed or torch_vendor() in (None, device and device.vendor)
            return process_numbers(seen).get(ids[0]) if is_torchs else None

        reservation = (held, TorchDeviceSelection(number))
        try:
            self._stack().append(reservation)
            reservation[1].start()
            numbers = process_numbers(seen)
            _check_visible(ids, numbers)
            return [numbers[device_id] for device_id in ids]
        except BaseException:
            if self._stack()[-1:] == [reservation]:
                self.release()
            raise

    def release(self) -> None:
        """End this thread's last reservation, if it has any."""
        stack = self._stack()
        if not stack:
            return
        held, selection = stack.pop()
        if held is not None:
            if self._host_share is not None and self._host_share.ram_mb is not None:
                from gpuyard.ledger.ledger_status import warn_about_own_ram

                warn_about_own_ram(self._label, self._host_share.ram_mb, self._write)
            _end(held)
        selection.end()

    def __enter__(self) -> list[int]:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function: each call reserves the GPUs and releases them."""
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(is_deferred(function) for is_deferred in kinds):
            raise UserError(
                f"GPUScheduler cannot decorate {function.__name__}: its body runs after the call has returned",
                hint="write `with GPUScheduler() as gpu_ids:` inside it",
            )

        @functools.wraps(function)
        def with_gpus(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return with_gpus

    def _stack(self) -> list[_Reservation]:
        stack: list[_Reservation] = self._thread.__dict__.setdefault("reservations", [])
        return stack

    def _need(self, seen: Snapshot, here: Snapshot) -> Need:
        banned = all_banned_devices(seen, here)
        need = Need(
            devices=self._num_gpus, memory=WholeDevice() if self._vram_mb is None else FixedMemory(self._vram_mb),
            banned=banned, vendor=self._vendor, is_linked=self._is_linked, is_on_one_node=self._is_on_one_node,
            max_power_w=self._power_w and float(self._power_w), max_utilization_percent=self._utilization,
            ignores_health=self._ignores_health, ignores_idle_power=isinstance(self._power_w, DefaultThreshold),
            host=self._host_share,
        )  # fmt: skip
        check_host(need, seen.host, load_config().host.limits)
        preferred = preferred_vendor(here)
        refuse_while_silent(self._vendor or (preferred if self._specific is None else None), here)
        is_named = self._specific is not None
        need, suitable = choose_vendor(
            need, self._candidates(here), here, banned=banned, preferred=preferred, names_devices=is_named
        )
        if need.is_exclusive and not self._ignores_health:
            need = replace(need, memory=WholeDevice(free_memory_mb(self._memory_gb, suitable, self._num_gpus)))
        check_possible(need, suitable, here)
        return replace(need, only=tuple(device.id for device in suitable))

    def _candidates(self, here: Snapshot) -> list[Device]:
        """Return the devices to choose from; CUDA has to see them in this process."""
        if self._specific is None:
            return visible_devices(here)
        if not self._specific:
            raise UserError(
                "specific_gpus is an empty list",
                hint="leave it out to wait for any GPU (find_free_gpus() may have found none)",
            )
        vendor = self._vendor or process_vendor(here)
        requested = dict.fromkeys(find_devices(self._specific, here, vendor))
        visible = {device.id: device for device in visible_devices(here)}
        _check_visible(requested, visible)
        return [visible[device_id] for device_id in requested]


def _describe_unknown(name: str) -> str:
    names = list(inspect.signature(GPUScheduler).parameters)[:-1]
    near = sorted((each for each in names if name in each), key=len) or difflib.get_close_matches(name, names, n=1)
    which = f"did you mean {near[0]}?" if near else f"its parameters are {', '.join(names)}"
    return f"GPUScheduler has no parameter {name}: {which}"


def _whole_number(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}: give a whole number, such as {name}=2") from None


def _check_visible(requested: Iterable[str], visible: Container[str]) -> None:
    hidden = [device_id for device_id in requested if device_id not in visible]
    if hidden:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES hides {', '.join(hidden)} from this process",
            hint="unset it before CUDA is first used, or request GPUs that it shows",
        )


def _size_mb(name: str, size: str | float | None) -> float | None:
    size_mb = parse_size(size) if isinstance(size, str) else size
    if size_mb is not None and not 0 < size_mb < math.inf:
        raise UserError(f"{name} is {size}", hint='give a size such as "8G"')
    return None if size_mb is None else float(size_mb)


@atexit.register
def _release_all() -> None:
    """Remove the files of leases that are still held; the kernel would only release their locks."""
    for held in list(_held_leases):
        _end(held)


def _end(held: HeldLease) -> None:
    held.release()
    _held_leases.discard(held)
