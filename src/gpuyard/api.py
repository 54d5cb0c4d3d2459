"""`GPUScheduler`: devices of one's own for a script, across processes and users, and what scripts ask about GPUs.

with GPUScheduler(num_gpus=2) as gpu_ids:
    model.to(f"cuda:{gpu_ids[0]}")
"""

import atexit
import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from gpuyard.acquire import Acquisition
from gpuyard.config import lease_dir, load_config
from gpuyard.core.model import Device, Need, Snapshot
from gpuyard.core.units import parse_size
from gpuyard.errors import UserError
from gpuyard.leases.folder import prepare
from gpuyard.leases.ledger import HeldLease, Ledger
from gpuyard.probes.local import snapshot
from gpuyard.visibility import cuda_numbers, visible_devices

P = ParamSpec("P")
R = TypeVar("R")

# What a script may change at run time: indexes or ids, and parts of names, that nothing is placed on.
BANNED_GPUS: list[int | str] = []
BANNED_GPU_NAMES: list[str] = []

_forgotten: "weakref.WeakSet[HeldLease]" = weakref.WeakSet()


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
        max_wait_time: float = math.inf,
        poll_interval: float = 10,
        specific_gpus: Sequence[int | str] | None = None,
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
        self._is_exclusive = vram is None
        self._power_w = power_threshold_w if vram is None else None
        self._utilization = utilization_threshold_percent if vram is None else None
        self._max_wait_s = max_wait_time
        self._poll_interval_s = poll_interval
        self._specific = None if specific_gpus is None else tuple(specific_gpus)
        self._mutex_timeout_s = timeout
        self._num_gpus = num_gpus
        self._ignores_health = debug_mode
        self._priority = priority
        self._label = label or os.path.basename(sys.argv[0] or "python")
        self._own = threading.local()

    def acquire(self) -> list[int]:
        """Waits for the GPUs and takes them; `release()` gives back those taken last in this thread."""
        first = snapshot()
        need = self._need(first)
        ledger = Ledger(prepare(lease_dir()))
        waiting = Acquisition(
            ledger,
            snapshot,
            need,
            priority=self._priority,
            label=self._label,
            mutex_timeout_s=self._mutex_timeout_s,
        )
        held = waiting.wait(self._max_wait_s, self._poll_interval_s)
        _forgotten.add(held)
        self._stack().append(held)
        try:
            return _numbers(held, first)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives back what this thread took last; nothing where it holds nothing."""
        stack = self._stack()
        if stack:
            stack.pop().release()

    def __enter__(self) -> list[int]:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call takes the GPUs and gives them back."""

        @functools.wraps(function)
        def with_gpus(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return with_gpus

    def _stack(self) -> list[HeldLease]:
        stack: list[HeldLease] = self._own.__dict__.setdefault("held", [])
        return stack

    def _need(self, seen: Snapshot) -> Need:
        """Only of what CUDA sees in this process: a GPU that is hidden from it would be of no use."""
        names = self._specific
        seen_here = visible_devices(seen.usable_devices())
        only = tuple(device.id for device in seen_here) if names is None else find_devices(names, seen)
        if len(only) < self._num_gpus:
            plural = "" if self._num_gpus == 1 else "s"
            raise UserError(
                f"{self._num_gpus} GPU{plural} asked for, and this process can have {len(only)}",
                hint="`gpuyard devices` shows all; CUDA_VISIBLE_DEVICES may hide some",
            )
        return Need(
            devices=self._num_gpus,
            memory_mb=None if self._ignores_health and self._is_exclusive else self._memory_mb,
            is_exclusive=self._is_exclusive,
            only=only,
            banned=banned_devices(seen),
            max_power_w=self._power_w,
            max_utilization_percent=self._utilization,
            ignores_health=self._ignores_health,
        )


def find_devices(names: Sequence[int | str], seen: Snapshot) -> tuple[str, ...]:
    """The ids of devices given as indexes, ids, or beginnings of ids."""
    return tuple(_find(name, seen).id for name in names)


def banned_devices(seen: Snapshot) -> tuple[str, ...]:
    """Those that the script or the configuration file bans."""
    config = load_config().devices
    # A script may also have put new lists into the module that it knows them by.
    known_as = sys.modules.get("gpu_scheduler.gpu_info")
    banned = {*BANNED_GPUS, *getattr(known_as, "BANNED_GPUS", ()), *config.banned}
    names = {*BANNED_GPU_NAMES, *getattr(known_as, "BANNED_GPU_NAMES", ()), *config.banned_names}
    return tuple(
        device.id
        for device in seen.devices
        if device.index in banned or device.id in banned or any(name in (device.name or "") for name in names)
    )


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
    specific_gpus: Sequence[int | str] | None = None,
) -> list[int]:
    """The numbers of the GPUs that are free by these bounds and that nobody holds a lease on."""
    from gpuyard.core.placement import View, choose

    seen = snapshot()
    leases = Ledger(prepare(lease_dir())).leases()
    free = []
    for device in seen.usable_devices():
        if specific_gpus is not None and device.id not in find_devices(specific_gpus, seen):
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


def _find(name: int | str, seen: Snapshot) -> Device:
    text = str(name)
    for device in seen.usable_devices():
        if text in (str(device.index), device.id) or (len(text) > 4 and device.id.startswith(text)):
            return device
    known = ", ".join(f"{device.index} ({device.id})" for device in seen.usable_devices()) or "none"
    raise UserError(f"there is no GPU '{name}'", hint=f"there are: {known}")


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


def _numbers(held: HeldLease, seen: Snapshot) -> list[int]:
    ids = [share.device_id for share in held.lease.shares]
    devices = {device.id: device for device in seen.devices}
    numbers = cuda_numbers(ids, seen.devices)
    chosen = []
    for device_id, number in zip(ids, numbers, strict=True):
        index = devices[device_id].index
        chosen.append(number if number is not None else -1 if index is None else index)
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
