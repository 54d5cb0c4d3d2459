"""Opens the memory that assets are kept in: a card through PyTorch, or a simulated device on the host.

While it is open its budget is leased in the ledger, so that queued jobs and other scripts see it. Simulated GPUs
(GPUYARD_SIMULATE) are leased like real ones, and their memory is the host's. Nothing is leased where the memory is on
the host and no GPU is simulated, nor for a card that no probe knows of.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from msgspec import Struct

from gpuyard.config import simulated_devices
from gpuyard.core.snapshot import Vendor
from gpuyard.core.units import format_size
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.installation import find_installation
from gpuyard.probes.local_machine import snapshot
from gpuyard.residency.memory.device_memory import DeviceMemory
from gpuyard.scripting.gpu_scheduler import GPUScheduler
from gpuyard.visible_devices import visible_devices

KINDS = ("auto", "cuda", "host")

_MB = 1048576
# Segments that grow, so that gaps between assets can be used for others; and many threads to pin RAM, which is slow.
_SETTING = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
_SETTING_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


_WITHOUT_A_CARD = "VRAM is simulated in RAM, and renderers get numpy's arrays"


class _NoCard(Struct, frozen=True, kw_only=True):
    why: str
    remedy: str


@contextlib.contextmanager
def open_device(nbytes: int, kind: str = "auto", *, label: str = "render") -> Iterator[DeviceMemory]:
    """So many bytes on one device, for the time of the block; waits in the ledger's line until they can be had.

    `kind` is `cuda`, `host`, or `auto`: a card where PyTorch sees one, else the host.
    """
    if kind not in KINDS:
        raise UserError(f"there is no device of kind '{kind}'", hint=f"there are: {', '.join(KINDS)}")
    if nbytes <= 0:
        raise UserError(f"a VRAM budget of {format_size(nbytes / _MB)} holds nothing", hint="write it as 8G")
    need_numpy()
    torch = torch_with_a_card(kind)
    with _leased(nbytes, torch, label) as number:
        memory = _opened(number, nbytes, is_cuda=torch is not None)
        with contextlib.closing(memory):
            yield memory


def need_numpy() -> None:
    """EnvironmentFault where it is missing."""
    try:
        import numpy  # noqa: F401, ICN001 - only whether it is there
    except ImportError as error:
        raise EnvironmentFault(
            "numpy is not installed: it comes with gpuyard's extra `render`",
            hint=f"install it with: {find_installation().with_extra('render')}",
        ) from error


def _opened(number: int, nbytes: int, *, is_cuda: bool) -> DeviceMemory:
    if is_cuda:
        from gpuyard.residency.memory.cuda_memory import CudaMemory

        return CudaMemory(number, nbytes)
    from gpuyard.residency.memory.host_memory import HostMemory

    return HostMemory(nbytes)


def torch_with_a_card(kind: str) -> Any:
    """PyTorch where the memory is to be a card's, and `None` where it is to be the host's."""
    if kind == "host" or (kind == "auto" and simulated_devices()):
        return None
    if simulated_devices():
        raise UserError("simulated GPUs have no CUDA", hint="unset GPUYARD_SIMULATE, or ask for the host's memory")
    found = _find_torch()
    if not isinstance(found, _NoCard):
        return found
    if kind == "auto":
        return None
    raise EnvironmentFault(found.why, hint=f"{found.remedy}; or ask for the device 'auto': {_WITHOUT_A_CARD}")


def want_of_a_card(kind: str) -> tuple[str, str] | None:
    """Return why `auto` fell back to the host's memory and what to do about it, or None."""
    if kind != "auto" or simulated_devices():
        return None
    found = _find_torch()
    return (f"{found.why}: {_WITHOUT_A_CARD}", found.remedy) if isinstance(found, _NoCard) else None


def _find_torch() -> Any:
    """PyTorch, or why it has no card."""
    _set_allocator()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that its own need is missing
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        why = "PyTorch is not installed" if is_missing else f"PyTorch cannot be used: {error}"
        line = find_installation().with_extra("cuda")
        return _NoCard(why=why, remedy=f"for a GPU, install it with: {line}")
    if torch.cuda.is_available():
        return torch
    return _NoCard(
        why=f"PyTorch {torch.__version__} sees no GPU",
        remedy="`gpuyard devices` shows what the driver sees; CUDA_VISIBLE_DEVICES may hide it, and a PyTorch that was "
        "built for the CPU never sees one",
    )


def _set_allocator() -> None:
    """Unless somebody else did. PyTorch reads it once, when it sets CUDA up."""
    torch = sys.modules.get("torch")
    is_too_late = torch is not None and torch.cuda.is_initialized()
    if not is_too_late and not any(name in os.environ for name in _SETTING_NAMES):
        os.environ[_setting_name()] = _SETTING


def _setting_name() -> str:
    """From 2.9 PyTorch warns of the old name; before, it knows no other."""
    try:
        numbers = metadata.version("torch").split(".")
        is_new = (int(numbers[0]), int(numbers[1])) >= (2, 9)
    except (metadata.PackageNotFoundError, ValueError, IndexError):
        is_new = True
    return _SETTING_NAMES[0] if is_new else _SETTING_NAMES[1]


@contextlib.contextmanager
def _leased(nbytes: int, torch: Any, label: str) -> Iterator[int]:
    """The number of the device, as PyTorch counts them."""
    ids = _candidates(torch)
    if not ids:
        yield 0
        return
    # Quiet: `gpuyard render` says in its own words what it waits for.
    with GPUScheduler(vram=nbytes / _MB, label=label, specific_gpus=ids, quiet=True) as numbers:
        yield numbers[0]


def _candidates(torch: Any) -> list[str]:
    """The devices that the memory can be on: PyTorch's for one vendor sees no other vendor's."""
    if torch is not None:
        vendor = Vendor.AMD if getattr(torch.version, "hip", None) else Vendor.NVIDIA
    elif simulated_devices():
        vendor = Vendor.SIMULATED
    else:
        return []
    seen = snapshot()
    visible = [device.id for device in visible_devices(seen) if device.vendor is vendor]
    # Where all are hidden from this process, GPUScheduler says so.
    return visible or [device.id for device in seen.usable_devices() if device.vendor is vendor]
