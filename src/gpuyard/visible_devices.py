"""The environment variables that select devices for a program, and the numbers of devices in this process.

On a machine with devices of several vendors, a program sees its own devices, and none of another vendor. On a machine
with one vendor only that vendor's variables are set.

- An integer in CUDA_VISIBLE_DEVICES is a position in the driver's own list, which includes banned, leased and unhealthy
  cards. With CUDA_DEVICE_ORDER=PCI_BUS_ID the list is in the order of the PCI bus, as in NVML. It lacks cards that this
  user may not open; split cards (MIG) come after all others. Parts of a split card have no integer, only a UUID.
- A variable that is set again is read from scratch: an outer CUDA_VISIBLE_DEVICES changes no number in it.
- ROCR_VISIBLE_DEVICES takes ROCm's own ids (`GPU-…`), or positions in the kernel's topology; HIP_VISIBLE_DEVICES
  numbers the devices that it has left, and so does GPU_DEVICE_ORDINAL for OpenCL. HIP reads CUDA_VISIBLE_DEVICES
  instead if HIP_VISIBLE_DEVICES is empty or not set.
- Only CUDA knows for sure how it numbers devices in this process. If PyTorch has initialized it, PyTorch is asked, else
  a short-lived child process the driver: CUDA initialized in this process would not survive a later fork."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpuyard.model.machine_snapshot import Device, Snapshot, Vendor
from gpuyard.probes.kernel_files import cards_of_compute_driver

_ASK_DRIVER = (
    "import ctypes\n"
    "cuda = ctypes.CDLL('libcuda.so.1')\n"
    "count = ctypes.c_int()\n"
    "assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0\n"
    "for place in range(count.value):\n"
    "    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()\n"
    "    assert cuda.cuDeviceGet(ctypes.byref(device), place) == 0\n"
    "    ask = getattr(cuda, 'cuDeviceGetUuid_v2', cuda.cuDeviceGetUuid)\n"
    "    assert ask(uuid, device) == 0\n"
    "    print(bytes(uuid).hex())\n"
)
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_CUDA, _ROCR, _HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_ORDINAL, _ZE = "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"
_CUDA_VENDORS = (Vendor.NVIDIA, Vendor.SIMULATED)
# CUDA, ROCr and HIP stop reading at an impossible number; an empty value would let HIP read CUDA_VISIBLE_DEVICES.
# Intel's driver takes an empty mask for no mask, and ignores entries for cards that it does not have.
_NOTHING_VISIBLE = {_CUDA: "-1", _HIP: "-1"}
_NO_ZE_DEVICE = "9999"
_HIDDEN = {_CUDA: "-1", _ROCR: "-1", _HIP: "-1", _ORDINAL: "-1", _ZE: _NO_ZE_DEVICE}


def visible_variables(chosen: Sequence[Device], seen: Snapshot, *, by_uuid: bool = False) -> dict[str, str]:
    """Return the environment in which a program sees exactly the chosen devices of the machine, in that order. With
    `by_uuid`, whole NVIDIA cards are named by UUID too."""
    if not chosen and not seen.is_mixed:
        return dict(_NOTHING_VISIBLE)
    variables = dict(_HIDDEN) if seen.is_mixed else {}
    if cuda := [device for device in chosen if device.vendor in _CUDA_VENDORS]:
        order = _cuda_order(seen)
        by_uuid = by_uuid or any(device.parent is not None for device in cuda)  # parts of a card have no integer
        names = [
            device.id if (by_uuid and _has_driver_id(device)) or device.id not in order else str(order.index(device.id))
            for device in cuda
        ]
        variables[_CUDA] = ",".join(names)
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if amd := [device for device in chosen if device.vendor is Vendor.AMD]:
        rocr = _rocr_numbers(seen)
        variables[_ROCR] = ",".join(device.id if _has_driver_id(device) else str(rocr[device.id]) for device in amd)
        # An inherited value would now select other devices or none.
        variables[_HIP] = ",".join(str(number) for number in range(len(amd)))
        if seen.is_mixed:
            variables[_ORDINAL] = variables[_HIP]
    if intel := [device for device in chosen if device.vendor is Vendor.INTEL]:
        variables[_ZE] = ",".join(str(_index(device, seen)) for device in intel)
    return variables


def visible_devices(seen: Snapshot) -> list[Device]:
    """Return the usable devices that the environment of this process does not hide."""
    if all(name not in os.environ for name in (_CUDA, _ROCR, _HIP, _ZE)):
        return list(seen.usable_devices())
    numbers = process_numbers(seen)
    return [device for device in seen.usable_devices() if device.id in numbers]


def named_visible(visible: str, seen: Snapshot) -> list[Device]:
    """Return the usable devices that CUDA_VISIBLE_DEVICES with this value shows, and all that are not CUDA's."""
    ids = [device.id for device in seen.devices if device.vendor in _CUDA_VENDORS]
    shown = _read_variable(visible, dict(enumerate(_cuda_order(seen))), ids).values()
    return [device for device in seen.usable_devices() if device.vendor not in _CUDA_VENDORS or device.id in shown]


def process_numbers(seen: Snapshot) -> dict[str, int]:
    """Return the number of each visible device in this process, by id, as PyTorch, CuPy and JAX use it. Devices of
    vendors without such numbers go by their index."""
    cuda = {_uuid_digits(device_id): number for number, device_id in _cuda_numbers(seen).items()}
    rocm = {device_id: number for number, device_id in _rocm_numbers(seen).items()}
    numbers: dict[str, int | None] = {}
    for device in seen.devices:
        if device.vendor in _CUDA_VENDORS:
            numbers[device.id] = cuda.get(_uuid_digits(device.id))
        elif device.vendor is Vendor.AMD:
            numbers[device.id] = rocm.get(device.id)
        elif device.vendor is not Vendor.INTEL or os.environ.get(_ZE) != _NO_ZE_DEVICE:
            numbers[device.id] = _index(device, seen)
    return {device_id: number for device_id, number in numbers.items() if number is not None}


def _index(device: Device, seen: Snapshot) -> int:
    """Return the vendor's index of the device, or its position among the vendor's devices if it has none."""
    if device.index is not None:
        return device.index
    return [other.id for other in seen.devices if other.vendor is device.vendor].index(device.id)


def _read_variable(visible: str | None, known: Mapping[int, str], ids: Sequence[str]) -> Mapping[int, str]:
    """Return the ids that a variable with this value shows, by their new numbers, as CUDA and ROCm read it. Entries are
    numbers from `known`, or prefixes of `ids`; reading stops at the first entry that is neither."""
    if visible is None:
        return known
    chosen: list[str] = []
    for entry in (entry.strip() for entry in visible.split(",")):
        by_number = known.get(int(entry)) if entry.isdecimal() else None
        found = by_number or next((device_id for device_id in ids if entry and device_id.startswith(entry)), None)
        if found is None:
            break
        chosen.append(found)
    return dict(enumerate(chosen))


# CUDA


def _has_driver_id(device: Device) -> bool:
    """Return whether CUDA or ROCr knows the device by its id; gpuyard makes up other ids, and marks some with "#"."""
    return device.id.startswith(("GPU-", "MIG-", "SIM-")) and "#" not in device.id


def _cuda_order(seen: Snapshot) -> list[str]:
    """Return the driver's list in PCI order: whole cards, then the first part of each card that is split. A card that
    has vanished from the driver keeps its index here; if another card has that index now, that one counts."""
    first_parts: dict[str, str] = {}
    for device in seen.devices:
        if device.parent is not None:
            first_parts.setdefault(device.parent, device.id)
    cards = [device for device in seen.devices if device.vendor in _CUDA_VENDORS and device.parent is None]
    by_index = {card.index: card.id for card in sorted(cards, key=lambda card: card.healthy) if card.index is not None}
    ids = [by_index[index] for index in sorted(by_index)]
    return [
        *(each for each in ids if each not in first_parts),
        *(first_parts[each] for each in ids if each in first_parts),
    ]


def _cuda_numbers(seen: Snapshot) -> Mapping[int, str]:
    """Return the ids of CUDA devices by their numbers in this process."""
    ids = [device.id for device in seen.devices if device.vendor in _CUDA_VENDORS]
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    is_used = cuda is not None and cuda.is_available() and cuda.is_initialized()
    properties = [cuda.get_device_properties(number) for number in range(cuda.device_count())] if is_used else []
    by_torch = [str(each.uuid) for each in properties if hasattr(each, "uuid")]
    if not {_uuid_digits(device_id) for device_id in ids}.isdisjoint(map(_uuid_digits, by_torch)):
        return dict(enumerate(by_torch))
    is_real = any(device.vendor is Vendor.NVIDIA and not device.is_simulated for device in seen.devices)
    names = (_CUDA, "CUDA_DEVICE_ORDER")
    relevant = tuple((name, os.environ[name]) for name in names if name in os.environ)
    by_driver = _driver_order(relevant) if is_real else ()
    return dict(enumerate(by_driver)) or _read_variable(os.environ.get(_CUDA), dict(enumerate(_cuda_order(seen))), ids)


@lru_cache(maxsize=4)
def _driver_order(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    base: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    try:
        result = subprocess.run(
            [sys.executable, "-S", "-c", _ASK_DRIVER],
            env={**base, **dict(environment)},
            capture_output=True,
            text=True,
            timeout=30.0,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ()
    return tuple(result.stdout.split()) if result.returncode == 0 else ()


def _uuid_digits(device_id: str) -> str:
    """Return the digits of a UUID, which tools write in different ways."""
    return device_id.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")


# ROCm


def _rocr_numbers(seen: Snapshot) -> dict[str, int]:
    """Return the number of each AMD device for ROCr, by id: its position in the kernel's topology, else its index.
    Cards in several partitions have no one position."""
    in_kernel = [bus_id for _, bus_id in cards_of_compute_driver(_TOPOLOGY)]
    amd = [device for device in seen.devices if device.vendor is Vendor.AMD]
    on_bus = [device.pci_bus_id for device in amd]
    return {
        device.id: in_kernel.index(device.pci_bus_id)
        if device.pci_bus_id and in_kernel.count(device.pci_bus_id) == on_bus.count(device.pci_bus_id) == 1
        else _index(device, seen)
        for device in amd
    }


def _rocm_numbers(seen: Snapshot) -> Mapping[int, str]:
    """Return the ids of AMD devices by their numbers for HIP in this process."""
    rocr = {number: device_id for device_id, number in sorted(_rocr_numbers(seen).items(), key=lambda item: item[1])}
    left = _read_variable(os.environ.get(_ROCR), rocr, list(rocr.values()))
    has_cuda = any(device.vendor in _CUDA_VENDORS for device in seen.devices)
    hip = os.environ.get(_HIP, None if has_cuda else os.environ.get(_CUDA))
    return _read_variable(hip, left, list(left.values()))
