"""Open the device memory for assets: a GPU through PyTorch, or a simulated device on the host. While it is open, its
budget is leased, also on simulated GPUs (GPUYARD_SIMULATE), whose memory is the host's. Without any, nothing is leased.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import msgspec

from gpuyard import GPUScheduler, Snapshot, snapshot
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.installation import find_installation
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.units import MB, format_size
from gpuyard.policy.device_names import choose_vendor
from gpuyard.recipes.render.memory.device_memory import DeviceMemory
from gpuyard.visible_devices import visible_devices

KINDS = ("auto", "cuda", "host")

_WITHOUT_GPU = "VRAM is simulated in RAM, and renderers get numpy arrays"


@contextlib.contextmanager
def open_device(
    nbytes: int, kind: str = "auto", *, ram_nbytes: int = 0, label: str = "render"
) -> Iterator[DeviceMemory]:
    """Open `nbytes` on one device, once they can be leased. `kind` is `cuda`, `host`, or `auto`: a GPU if PyTorch finds
    one."""
    if kind not in KINDS:
        raise UserError(f"there is no device of kind '{kind}'", hint=f"there are: {', '.join(KINDS)}")
    if nbytes <= 0:
        raise UserError(f"a VRAM budget of {format_size(nbytes / MB)} is too small", hint="write it as 8G")
    need_numpy()
    torch = torch_with_gpu(kind)
    with contextlib.ExitStack() as stack:
        ids, number = _candidates(torch), 0
        if ids:
            # Quiet: `gpuyard render` prints its own message while it waits.
            ram_mb = ram_nbytes / MB or None
            lease = GPUScheduler(vram=nbytes / MB, ram=ram_mb, label=label, specific_gpus=ids, quiet=True)
            number = stack.enter_context(lease)[0]  # in PyTorch's numbering
        memory: DeviceMemory
        if torch is not None:
            from gpuyard.recipes.render.memory.cuda_memory import CudaMemory

            memory = CudaMemory(number, nbytes)
        else:
            from gpuyard.recipes.render.memory.host_memory import HostMemory

            memory = HostMemory(nbytes)
        stack.callback(memory.close)
        yield memory


def need_numpy() -> None:
    try:
        import numpy  # noqa: F401, ICN001 - only to check
    except ImportError as error:
        hint = f"install it with: {find_installation().with_extra('render')}"
        raise EnvironmentFault("numpy is not installed: it comes with gpuyard's extra `render`", hint=hint) from error


def torch_with_gpu(kind: str) -> Any:
    """Return PyTorch if the memory is on a GPU, None if it is on the host."""
    if kind == "host" or (kind == "auto" and is_simulated()):
        return None
    if is_simulated():
        raise UserError("simulated GPUs have no CUDA", hint="unset GPUYARD_SIMULATE, or use the device 'host'")
    torch, why, remedy = _find_torch()
    if torch is None and kind != "auto":
        raise EnvironmentFault(why, hint=f"{remedy}; or use the device 'auto': {_WITHOUT_GPU}")
    return torch


def is_simulated() -> bool:
    """Whether simulated GPUs replace real ones (GPUYARD_SIMULATE)."""
    return bool(os.environ.get("GPUYARD_SIMULATE"))


def missing_gpu_advice(kind: str) -> tuple[str, str] | None:
    """Return why `auto` falls back to the host's memory and what to do about it, or None if it does not."""
    if kind != "auto" or is_simulated():
        return None
    torch, why, remedy = _find_torch()
    return (f"{why}: {_WITHOUT_GPU}", remedy) if torch is None else None


def _find_torch() -> tuple[Any, str, str]:
    """Return PyTorch, or None with the reason that there is no GPU and what to do about it. Configures its allocator
    before, unless the user has: expandable segments reuse the gaps between assets; many threads pin RAM, because that
    is slow. PyTorch 2.9 and later warns about the old name of the variable, earlier versions know only that."""
    names, loaded = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), sys.modules.get("torch")
    if not (loaded is not None and loaded.cuda.is_initialized()) and os.environ.keys().isdisjoint(names):
        is_old = False
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError, IndexError):
            numbers = metadata.version("torch").split(".")
            is_old = (int(numbers[0]), int(numbers[1])) < (2, 9)
        setting = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
        os.environ[names[is_old]] = setting
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "PyTorch is not installed" if is_missing else f"PyTorch cannot be used: {error}"
        return None, why, f"for a GPU, install it with: {find_installation().with_extra('cuda')}"
    if torch.cuda.is_available():
        return torch, "", ""
    remedy = (
        "`gpuyard devices` lists the driver's GPUs; CUDA_VISIBLE_DEVICES may hide them, and a PyTorch built for "
        "the CPU never finds one"
    )
    return None, f"PyTorch {torch.__version__} finds no GPU", remedy


def _candidates(torch: Any) -> list[str]:
    """Return the ids of the devices to choose from: a PyTorch build supports one vendor only."""
    if torch is not None:
        vendor = Vendor.AMD if getattr(torch.version, "hip", None) else Vendor.NVIDIA
    elif is_simulated():
        vendor = None
    else:
        return []
    machine = snapshot()
    vendor = vendor or machine.devices[0].vendor
    _, found = choose_vendor(Need(vendor=vendor), visible_devices(machine), machine)
    visible = [device.id for device in found]
    # If all are hidden from this process, GPUScheduler raises an error that says so.
    return visible or [device.id for device in machine.usable_devices() if device.vendor is vendor]


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """`why` explains a default; None if the user gave the budget."""

    mb: float
    why: str | None = None

    def text(self) -> str:
        return format_size(self.mb) + ("" if self.why is None else f" ({self.why})")


def choose_vram(device: str) -> Budget:
    machine = snapshot()
    _, devices = choose_vendor(Need(), visible_devices(machine), machine)
    free = [mb for each in devices if (mb := each.memory_free_mb) is not None]
    if not free or not (is_simulated() or torch_with_gpu(device) is not None):
        available = _available_ram_mb(machine, "--vram-budget")
        return Budget(mb=available * 0.25, why="a quarter of the available RAM")
    return Budget(mb=max(free) * 0.8, why="80% of the free memory of the device with the most")


def choose_ram() -> Budget:
    return Budget(mb=_available_ram_mb(snapshot(), "--ram-budget") * 0.5, why="half of the available RAM")


def _available_ram_mb(machine: Snapshot, option: str) -> float:
    if machine.host.memory_available_mb is None:
        raise EnvironmentFault("no probe can read the available RAM", hint=f"set the budget with {option}, such as 8G")
    return machine.host.memory_available_mb
