"""`GPUScheduler`: devices of one's own for a script, across processes and users, and what scripts ask about GPUs.

with GPUScheduler(num_gpus=2) as gpu_ids:
    model.to(f"cuda:{gpu_ids[0]}")
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
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from gpuyard.acquire import Acquisition, enclosing_lease
from gpuyard.config import load_config
from gpuyard.core.model import Device, Lease, Need, Snapshot
from gpuyard.core.naming import ban, check_possible, find_devices
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError
from gpuyard.leases.ledger import HeldLease, open_ledger
from gpuyard.probes.local import snapshot
from gpuyard.visibility import process_numbers, visible_devices

P = ParamSpec("P")
R = TypeVar("R")

# What a script may change at run time: indexes or ids, and parts of names, that nothing is placed on.
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
    ) -> None:
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
        self._own = threading.local()

    def acquire(self) -> list[int]:
        """Waits for the GPUs and takes them; `release()` gives back those taken last in this thread."""
        first = snapshot()
        need = self._need(first)
        ledger = open_ledger()
        around = enclosing_lease(ledger, need)
        if around is not None:
            self._stack().append(None)
            return _numbers(around, first)
        waiting = Acquisition(
            ledger,
            snapshot,
            need,
            priority=self._priority,
            label=self._label,
            mutex_timeout_s=self._mutex_timeout_s,
            max_foreign_load_percent=load_config().queue.max_foreign_load_percent,
        )
        held = waiting.wait(self._max_wait_s, self._poll_interval_s)
        _forgotten.add(held)
        self._stack().append(held)
        try:
            return _numbers(held.lease, first)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives back what this thread took last; nothing where it holds nothing."""
        stack = self._stack()
        held = stack.pop() if stack else None
        if held is not None:
            held.release()

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

    def _stack(self) -> list[HeldLease | None]:
        """What this thread holds, the last on top; `None` for what belongs to the lease around this process."""
        stack: list[HeldLease | None] = self._own.__dict__.setdefault("held", [])
        return stack

    def _need(self, seen: Snapshot) -> Need:
        banned = banned_devices(seen)
        only = [device for device in self._candidates(seen) if device.id not in banned]
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

    def _candidates(self, seen: Snapshot) -> list[Device]:
        """Only what CUDA sees in this process: a GPU that is hidden from it would be of no use."""
        visible = visible_devices(seen)
        if self._specific is None:
            return visible
        asked = dict.fromkeys(find_devices(self._specific, seen))
        hidden = [device_id for device_id in asked if device_id not in {device.id for device in visible}]
        if hidden:
            raise UserError(
                f"CUDA_VISIBLE_DEVICES hides {', '.join(hidden)} from this process",
                hint="unset it, or ask for GPUs that it shows",
            )
        return [device for device in visible if device.id in asked]


def banned_devices(seen: Snapshot) -> tuple[str, ...]:
    """Those that the script or the configuration file bans."""
    config = load_config().devices
    banned = [*config.banned, *_listed("BANNED_GPUS", BANNED_GPUS)]
    names = [*config.banned_names, *_listed("BANNED_GPU_NAMES", BANNED_GPU_NAMES)]
    return ban(banned, names, seen)


def _listed(name: str, own: list[Any]) -> list[Any]:
    """A script may also have put a new list into any of the modules that it knows it by."""
    homes = (sys.modules.get(module) for module in ("gpuyard", "gpu_scheduler", "gpu_scheduler.gpu_info"))
    return [*own, *(entry for home in homes if home is not None for entry in vars(home).get(name, ()))]


def get_gpu_info() -> list[dict[str, Any]]:
    """A dict for each GPU; memory in MB, power in W, utilization in percent, `None` for unknown."""
    return [_info(device) for device in snapshot().usable_devices()]


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
    from gpuyard.core.placement import View, choose

    seen = snapshot()
    leases = open_ledger().leases()
    names = _names(specific_gpus)
    asked = None if names is None else find_devices(names, seen)
    free = []
    for device in seen.usable_devices():
        if asked is not None and device.id not in asked:
            continue
        need = Need(
            memory_mb=memory_free_threshold_gb * 1024,
            only=(device.id,),
            banned=banned_devices(seen),
            max_power_w=power_threshold_w,
            max_utilization_percent=utilization_threshold_percent,
        )
        if choose(need, View(now=0.0, snapshot=seen, leases=leases)).claim and device.index is not None:
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


def _numbers(lease: Lease, seen: Snapshot) -> list[int]:
    ids = [share.device_id for share in lease.shares]
    numbers = process_numbers(seen)
    chosen = [numbers[device_id] for device_id in ids]
    _select_in_torch(chosen[0])
    return chosen


def _select_in_torch(number: int) -> None:
    """Only where PyTorch is in use already: importing it just to ask would cost seconds."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(number)


def _megabytes(size: str | float) -> float:
    return parse_size(size) if isinstance(size, str) else float(size)


@atexit.register
def _give_back_the_rest() -> None:
    """The kernel lets go anyway; this takes the files along."""
    for held in list(_forgotten):
        held.release()
