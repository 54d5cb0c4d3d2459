"""`GPUScheduler`: devices of one's own for a script, across processes and users, and what scripts ask about GPUs.

with GPUScheduler(num_gpus=2) as gpu_ids:
    model.to(f"cuda:{gpu_ids[0]}")

Every GPU number here, taken or given, is the one that PyTorch has for the GPU in this process: 0 is the first that
CUDA_VISIBLE_DEVICES shows. Only the configuration file counts as `gpuyard devices` does, for all processes alike.
"""

import atexit
import functools
import inspect
import math
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.core.device_names import banned_ids, check_possible, find_devices
from gpuyard.core.lease import Lease, Need
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError
from gpuyard.leases.ledger import HeldLease, open_ledger
from gpuyard.probes.local_machine import snapshot
from gpuyard.scripting.torch_device import TorchDeviceSelection
from gpuyard.scripting.wait_messages import WaitMessages
from gpuyard.visible_devices import process_numbers
from gpuyard.wait_for_devices import Acquisition, enclosing_lease

P = ParamSpec("P")
R = TypeVar("R")

# What a script may change at run time: numbers or ids, and parts of names, that nothing is placed on.
BANNED_GPUS: list[int | str] = []
BANNED_GPU_NAMES: list[str] = []

_SHORTEST_POLL_S = 0.05

_forgotten: "weakref.WeakSet[HeldLease]" = weakref.WeakSet()


_DEFERRED = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


class GPUScheduler:
    """Takes GPUs for the time of a `with` block, of a decorated function, or from `acquire()` to `release()`.

    It answers with the list of GPU numbers as PyTorch counts them in this process. Without `vram` the GPUs are this
    script's alone, and are taken only while they have that much memory free and draw and do no more than that. With
    `vram="8G"` it takes that much memory on each, beside others. Not for one GPU in two threads at once: each `with`
    takes its own.

    One that has to wait prints a line to stderr when it begins to wait, and one when it goes on; not with `quiet`.
    `progress(line)` is called with these lines in place of stderr, and with a new one when the reason changes.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the names and the order that existing scripts use
        self,
        memory_free_threshold_gb: float = 20,
        power_threshold_w: float | None = 80,
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
    ) -> None:
        if not poll_interval >= 0:
            raise UserError(f"poll_interval is {poll_interval}", hint="write it in seconds, such as 10")
        if num_gpus < 1:
            raise UserError(f"num_gpus is {num_gpus}", hint="ask for at least one GPU")
        self._memory_mb = memory_free_threshold_gb * 1024 if vram is None else _megabytes(vram)
        if vram is not None and not 0 < self._memory_mb < math.inf:
            raise UserError(f"vram is {vram}", hint='write it as "8G"')
        self._is_exclusive = vram is None
        self._power_w = power_threshold_w if vram is None else None
        self._utilization = utilization_threshold_percent if vram is None else None
        self._max_wait_s = math.inf if max_wait_time is None else max_wait_time
        self._poll_interval_s = max(_SHORTEST_POLL_S, poll_interval)
        self._specific = _names(specific_gpus)
        self._mutex_timeout_s = timeout
        self._num_gpus = operator.index(num_gpus)
        self._ignores_health = debug_mode
        self._priority = operator.index(priority)
        self._label = label or os.path.basename(sys.argv[0] or "python")
        self._quiet = quiet
        self._progress = progress
        self._own = threading.local()

    def acquire(self) -> list[int]:
        """Waits for the GPUs and takes them; `release()` gives back those taken last in this thread."""
        seen = snapshot()
        here = _as_counted_here(seen)
        need = self._need(seen, here)
        ledger = open_ledger()
        around = enclosing_lease(ledger, need)
        if around is not None:
            return self._enter(None, around, seen)
        waiting = Acquisition(
            ledger,
            snapshot,
            need,
            priority=self._priority,
            label=self._label,
            mutex_timeout_s=self._mutex_timeout_s,
            max_foreign_load_percent=load_config().queue.max_foreign_load_percent,
        )
        report = WaitMessages(need, here, quiet=self._quiet, progress=self._progress)
        held = waiting.wait(self._max_wait_s, self._poll_interval_s, report.wait)
        _forgotten.add(held)
        try:
            report.go_on(held.lease)
        except BaseException:
            held.release()
            raise
        return self._enter(held, held.lease, seen)

    def _enter(self, held: HeldLease | None, lease: Lease, seen: Snapshot) -> list[int]:
        """Make the first GPU PyTorch's current one, and return the numbers of all."""
        ids = [share.device_id for share in lease.shares]

        def number() -> int | None:
            return process_numbers(seen).get(ids[0])

        entered = _Entered(held, TorchDeviceSelection(number))
        self._stack().append(entered)
        try:
            entered.selection.begin()
            numbers = process_numbers(seen)
            _check_visible(ids, numbers)
        except BaseException:
            self.release()
            raise
        return [numbers[device_id] for device_id in ids]

    def release(self) -> None:
        """Gives back what this thread took last; nothing where it holds nothing."""
        stack = self._stack()
        if not stack:
            return
        entered = stack.pop()
        if entered.held is not None:
            entered.held.release()
        entered.selection.end()

    def __enter__(self) -> list[int]:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call takes the GPUs and gives them back."""
        if any(is_deferred(function) for is_deferred in _DEFERRED):
            raise UserError(
                f"GPUScheduler cannot decorate {function.__name__}: its body runs after the call has returned",
                hint="write `with GPUScheduler() as gpu_ids:` inside it",
            )

        @functools.wraps(function)
        def with_gpus(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return with_gpus

    def _stack(self) -> list["_Entered"]:
        """What this thread holds, the last on top."""
        stack: list[_Entered] = self._own.__dict__.setdefault("held", [])
        return stack

    def _need(self, seen: Snapshot, here: Snapshot) -> Need:
        banned = (*banned_devices(seen), *_banned_by_script(here))
        only = [device for device in self._candidates(here) if device.id not in banned]
        check_possible(self._num_gpus, None if self._ignores_health else self._memory_mb, only)
        return Need(
            devices=self._num_gpus,
            memory_mb=None if self._ignores_health and self._is_exclusive else self._memory_mb,
            is_exclusive=self._is_exclusive,
            only=tuple(device.id for device in only),
            banned=banned,
            max_power_w=self._power_w,
            max_utilization_percent=self._utilization,
            ignores_health=self._ignores_health,
        )

    def _candidates(self, here: Snapshot) -> list[Device]:
        """Only what CUDA sees in this process: a GPU that is hidden from it would be of no use."""
        if self._specific is None:
            return _visible(here)
        if not self._specific:
            raise UserError(
                "specific_gpus is an empty list", hint="leave it out to wait for any GPU; find_free_gpus() found none?"
            )
        asked = dict.fromkeys(find_devices(self._specific, here))
        visible = {device.id: device for device in _visible(here)}
        _check_visible(asked, visible)
        return [visible[device_id] for device_id in asked]


class _Entered(NamedTuple):
    """`held` is None where the lease is the one around this process."""

    held: HeldLease | None
    selection: TorchDeviceSelection


def _as_counted_here(seen: Snapshot) -> Snapshot:
    """Return the snapshot with the devices in the order of their numbers in this process, which are their indexes.

    Those that are hidden from this process come last, and have none.
    """
    numbers = process_numbers(seen)
    devices = [replace(device, index=numbers.get(device.id)) for device in seen.devices]
    return replace(seen, devices=tuple(sorted(devices, key=lambda device: numbers.get(device.id, math.inf))))


def _check_visible(asked: Iterable[str], visible: Container[str]) -> None:
    hidden = [device_id for device_id in asked if device_id not in visible]
    if hidden:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES hides {', '.join(hidden)} from this process",
            hint="unset it before CUDA is first used, or ask for GPUs that it shows",
        )


def _visible(here: Snapshot) -> list[Device]:
    return [device for device in here.usable_devices() if device.index is not None]


def banned_devices(seen: Snapshot) -> tuple[str, ...]:
    """Return the ids of those that the configuration file bans."""
    config = load_config().devices
    return banned_ids(config.banned, config.banned_names, seen)


def _banned_by_script(here: Snapshot) -> tuple[str, ...]:
    return banned_ids(_listed("BANNED_GPUS", BANNED_GPUS), _listed("BANNED_GPU_NAMES", BANNED_GPU_NAMES), here)


def _listed(name: str, own: list[Any]) -> list[Any]:
    """A script may also have put a new list into any of the modules that it knows it by."""
    homes = (sys.modules.get(module) for module in ("gpuyard", "gpu_scheduler", "gpu_scheduler.gpu_info"))
    return [*own, *(entry for home in homes if home is not None for entry in vars(home).get(name, ()))]


def get_gpu_info() -> list[dict[str, Any]]:
    """A dict for each GPU that this process sees, in the order of their numbers.

    Memory is in MB, power in W, utilization in percent, `None` for unknown.
    """
    return [_info(device) for device in _visible(_as_counted_here(snapshot()))]


def get_gpu_memory_usage() -> list[float | None]:
    """Used memory of each GPU in MB."""
    return [info["memory_used"] for info in get_gpu_info()]


def get_gpu_names() -> list[str | None]:
    return [info["name"] for info in get_gpu_info()]


def get_gpu_power_usage() -> list[float | None]:
    return [info["power_draw"] for info in get_gpu_info()]


def get_gpu_utilization() -> list[float | None]:
    return [info["utilization"] for info in get_gpu_info()]


def get_total_num_gpus() -> int:
    return len(get_gpu_info())


def find_free_gpus(
    memory_free_threshold_gb: float = 20,
    power_threshold_w: float | None = 80,
    utilization_threshold_percent: float | None = 1,
    specific_gpus: Sequence[int | str] | int | str | None = None,
) -> list[int]:
    """The numbers of the GPUs that are free by these bounds and that nobody holds a lease on."""
    from gpuyard.core.scheduling.placement import PlacementView, choose

    seen = snapshot()
    here = _as_counted_here(seen)
    leases = open_ledger().leases()
    names = _names(specific_gpus)
    asked = None if names is None else find_devices(names, here)
    banned = (*banned_devices(seen), *_banned_by_script(here))
    free = []
    for device in _visible(here):
        if asked is not None and device.id not in asked:
            continue
        need = Need(
            memory_mb=memory_free_threshold_gb * 1024,
            only=(device.id,),
            banned=banned,
            max_power_w=power_threshold_w,
            max_utilization_percent=utilization_threshold_percent,
        )
        if choose(need, PlacementView(now=0.0, snapshot=seen, leases=leases)).claim and device.index is not None:
            free.append(device.index)
    return free


def _names(gpus: Sequence[int | str] | int | str | None) -> tuple[int | str, ...] | None:
    if gpus is None:
        return None
    return (gpus,) if isinstance(gpus, int | str) else tuple(gpus)


def _info(device: Device) -> dict[str, Any]:
    return {
        "gpu_id": device.index,
        "name": device.name,
        "memory_free": device.memory_free_mb,
        "memory_total": device.memory_total_mb,
        "memory_used": device.memory_used_mb,
        "power_draw": device.power_draw_w,
        "power_limit": device.power_limit_w,
        "utilization": device.utilization_percent,
        "uuid": device.id,
    }


def _megabytes(size: str | float) -> float:
    return parse_size(size) if isinstance(size, str) else float(size)


@atexit.register
def _give_back_the_rest() -> None:
    """The kernel lets go anyway; this takes the files along."""
    for held in list(_forgotten):
        held.release()
