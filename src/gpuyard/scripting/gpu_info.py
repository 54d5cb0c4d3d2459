"""Queries about GPUs for scripts: their names, memory, power and utilization, and which of them are free.

Every GPU number here and in GPUScheduler is the one that PyTorch uses in this process: 0 is the first GPU that
CUDA_VISIBLE_DEVICES shows. Only the configuration file numbers GPUs as `gpuyard devices` does.

On a machine with GPUs of several vendors, everything here is about those of one: the vendor that PyTorch is built for
if it is imported, else the configured one, else the one with the largest GPU.

Where no probe sees a GPU but PyTorch in this process does, as in a container without NVML, the GPUs are PyTorch's:
their names, ids and sizes are known, and their load and free memory are not."""

import math
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from gpuyard.config import load_config
from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.ledger import open_ledger
from gpuyard.ledger.measured_usage import LEASE_VARIABLE
from gpuyard.model.lease import Need, WholeDevice
from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.model.units import format_count
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.device_names import banned_ids, choose_vendor, find_devices
from gpuyard.policy.device_state import capacity
from gpuyard.policy.machine import Machine, tiny_mb
from gpuyard.policy.placement import choose
from gpuyard.probes.local_machine import snapshot as read_machine
from gpuyard.visible_devices import process_numbers

# A script may change these at run time: numbers or ids, and parts of names, of GPUs that are never used.
BANNED_GPUS: list[int | str] = []
BANNED_GPU_NAMES: list[str] = []
_OWN_LISTS: dict[str, list[Any]] = {"BANNED_GPUS": BANNED_GPUS, "BANNED_GPU_NAMES": BANNED_GPU_NAMES}


class DefaultThreshold(int):
    """The default of a threshold bends to what the GPUs can show; a number that a caller gives is kept."""


MEMORY_FREE_GB, POWER_W = DefaultThreshold(20), DefaultThreshold(80)


def get_gpu_info() -> list[dict[str, Any]]:
    """Return a dict for each GPU that this process sees, in the order of their numbers.

    Memory is in MB, power in W, utilization in percent; None means unknown.
    """
    return [
        {
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
        for device in _listed_devices(number_as_process(snapshot()))
    ]


def get_gpu_memory_usage() -> list[float | None]:
    """Return the used memory of each GPU in MB."""
    return [info["memory_used"] for info in get_gpu_info()]


def get_gpu_names() -> list[str | None]:
    return [info["name"] for info in get_gpu_info()]


def get_gpu_power_usage() -> list[float | None]:
    """Return the power draw of each GPU in W."""
    return [info["power_draw"] for info in get_gpu_info()]


def get_gpu_utilization() -> list[float | None]:
    """Return the utilization of each GPU in percent."""
    return [info["utilization"] for info in get_gpu_info()]


def get_total_num_gpus() -> int:
    return len(get_gpu_info())


def find_free_gpus(
    memory_free_threshold_gb: float = MEMORY_FREE_GB,
    power_threshold_w: float | None = POWER_W,
    utilization_threshold_percent: float | None = 1,
    specific_gpus: Sequence[int | str] | int | str | None = None,
) -> list[int]:
    """Return the numbers of the GPUs that are within these limits, without a lease, and neither drained nor faulty."""
    seen = snapshot()
    here = number_as_process(seen)
    contents = open_ledger().contents()
    closed = closed_devices(seen, contents.drains, (), contents.health_marks)
    view = Machine(now=0.0, snapshot=seen, leases=contents.leases, closed=closed)
    names = as_names(specific_gpus)
    requested = None if names is None else find_devices(names, here, process_vendor(here))
    banned = all_banned_devices(seen, here)
    listed = _listed_devices(here) if requested is None else visible_devices(here)
    allowed = [each for each in listed if each.id not in banned and (requested is None or each.id in requested)]
    needed_mb = free_memory_mb(memory_free_threshold_gb, allowed)
    need = Need(
        memory=WholeDevice(needed_mb),
        max_power_w=power_threshold_w and float(power_threshold_w),
        max_utilization_percent=utilization_threshold_percent,
        ignores_idle_power=isinstance(power_threshold_w, DefaultThreshold),
    )
    numbers = {each.index: choose(replace(need, only=(each.id,)), view).claim for each in allowed}
    return [number for number, claim in numbers.items() if claim and number is not None]


def snapshot() -> Snapshot:
    """Return the snapshot of this machine; if no probe sees a GPU, with those that PyTorch in this process sees."""
    seen = read_machine()
    return seen if seen.devices else replace(seen, devices=_torch_devices(seen))


def _torch_devices(seen: Snapshot) -> tuple[Device, ...]:
    """Return the GPUs of PyTorch if it is imported, and warn that no probe sees them. Raise EnvironmentFault if PyTorch
    does not tell their ids: a number alone names other GPUs in other processes."""
    vendor, cuda = torch_vendor(), getattr(sys.modules.get("torch"), "cuda", None)
    count = cuda.device_count() if vendor in (Vendor.NVIDIA, Vendor.AMD) and cuda is not None else 0
    if cuda is None or vendor is None or not count:
        return ()
    missing = "; ".join(str(problem) for problem in seen.problems if problem.vendor is vendor)
    text = f"PyTorch sees {format_count(count, 'GPU')}, and no probe does{f' ({missing})' if missing else ''}"
    hint = "`gpuyard doctor` says what is missing; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    each = [cuda.get_device_properties(number) for number in range(count)]
    if not all(getattr(card, "uuid", None) for card in each):
        raise EnvironmentFault(text, hint=hint)
    warnings.warn(f"{text}: their load and free memory are unknown; {hint}", stacklevel=4)
    found = []
    for number, card in enumerate(each):
        total_mb = round(card.total_memory / 1048576, 2)
        found.append(
            Device(id=f"GPU-{card.uuid}", vendor=vendor, index=number, name=card.name, memory_total_mb=total_mb)
        )
    return tuple(found)


def free_memory_mb(threshold_gb: float, devices: Sequence[Device], count: int = 1) -> float:
    """Return the memory that has to be free on a GPU: the default is no more than `count` of these have when idle."""
    if not isinstance(threshold_gb, DefaultThreshold):
        return threshold_gb * 1024
    sizes = [math.inf if (size := capacity(each)) is None else size - tiny_mb(each) for each in devices]
    return min([threshold_gb * 1024.0, *sorted(sizes, reverse=True)[count - 1 : count]])


def number_as_process(seen: Snapshot) -> Snapshot:
    """Return the snapshot with each device's number in this process as its index; hidden devices come last."""
    numbers = process_numbers(seen)
    devices = [replace(device, index=numbers.get(device.id)) for device in seen.devices]
    return replace(seen, devices=tuple(sorted(devices, key=lambda device: numbers.get(device.id, math.inf))))


def visible_devices(here: Snapshot) -> list[Device]:
    """Return the usable devices that this process sees; `here` comes from `number_as_process`."""
    return [device for device in here.usable_devices() if device.index is not None]


def _listed_devices(here: Snapshot) -> list[Device]:
    """Return the usable devices of this process's vendor: of one vendor, so that a position in a list is a number."""
    vendor = process_vendor(here)
    return [device for device in visible_devices(here) if vendor in (None, device.vendor)]


def process_vendor(here: Snapshot) -> Vendor | None:
    """Return the vendor of the GPUs that this process uses by default; None on a machine with one vendor."""
    if not here.is_mixed:
        return None
    need, _ = choose_vendor(Need(), visible_devices(here), here, preferred=preferred_vendor(here))
    return need.vendor


def preferred_vendor(here: Snapshot) -> Vendor | None:
    """Return the vendor that PyTorch is built for, else, but for a program that gpuyard started, the configured one."""
    built_for = torch_vendor()
    if any(device.vendor is built_for for device in visible_devices(here)):
        return built_for
    return None if LEASE_VARIABLE in os.environ else load_config().devices.vendor


def torch_vendor() -> Vendor | None:
    """Return the vendor that PyTorch in this process is built for; None if it is not imported, or built for none."""
    version = getattr(sys.modules.get("torch"), "version", None)
    builds = ((Vendor.AMD, "hip"), (Vendor.NVIDIA, "cuda"), (Vendor.INTEL, "xpu"))
    return next((vendor for vendor, name in builds if getattr(version, name, None)), None)


def all_banned_devices(seen: Snapshot, here: Snapshot) -> tuple[str, ...]:
    """Return the ids of the devices that the configuration file or this script bans."""
    numbers, names = _banned_entries("BANNED_GPUS"), _banned_entries("BANNED_GPU_NAMES")
    return (*load_config().devices.banned_ids(seen), *banned_ids(numbers, names, here))


def as_names(gpus: Sequence[int | str] | int | str | None) -> tuple[int | str, ...] | None:
    if gpus is None:
        return None
    return (gpus,) if isinstance(gpus, int | str) else tuple(gpus)


def _banned_entries(name: str) -> list[Any]:
    """Return the entries of a list, and those of the lists that a script has assigned in a module that exports it."""
    exporters = (__name__, "gpuyard", "gpu_scheduler", "gpu_scheduler.gpu_info")
    modules = [sys.modules[module] for module in exporters if module in sys.modules]
    return [*_OWN_LISTS[name], *(entry for module in modules for entry in vars(module).get(name, ()))]
