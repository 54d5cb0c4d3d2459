"""The variables that show a program its devices, and the numbers that devices have in this process.

CUDA, by NVIDIA's documents and by what others have measured:
- An integer in CUDA_VISIBLE_DEVICES is a place in the driver's own list, however many cards gpuyard itself would use: a
  card that is banned, leased or ill counts. With CUDA_DEVICE_ORDER=PCI_BUS_ID the list is in the order of the PCI bus,
  which is NVML's. Cards that this user may not open are not in it; cards that are split (MIG) come behind all others.
- A variable that is set anew is read from scratch: an outer CUDA_VISIBLE_DEVICES changes no number in it.
- Parts of a split card have no integer, and go by UUID.

ROCm: ROCR_VISIBLE_DEVICES takes ids of ROCm's own (`GPU-…`), or places in the order of the kernel's topology;
HIP_VISIBLE_DEVICES counts what ROCR_VISIBLE_DEVICES has left.

Only CUDA knows for sure how it counts in this process. Where PyTorch has set it up here, PyTorch is asked. Otherwise a
short-lived child asks the driver, so that nothing is set up here that a later fork could not bear.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from gpuyard.core.snapshot import Device, Snapshot, Vendor

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
_DRIVER_MAY_TAKE_S = 30.0
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
_CUDA, _ROCR, _HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_CUDAS_OWN = (Vendor.NVIDIA, Vendor.SIMULATED)
# Both stop reading at a number that cannot be. Level Zero has no way to say "none".
_NOTHING_VISIBLE = {_CUDA: "-1", _HIP: "-1"}


def visible_variables(chosen: Sequence[Device], seen: Snapshot, *, by_uuid: bool = False) -> dict[str, str]:
    """Return the environment in which a program sees exactly the chosen devices of the machine, in that order.

    `by_uuid` names whole NVIDIA cards by their UUIDs too.
    """
    if not chosen:
        return dict(_NOTHING_VISIBLE)
    variables: dict[str, str] = {}
    if cuda := [device for device in chosen if device.vendor in _CUDAS_OWN]:
        variables[_CUDA] = ",".join(_cuda_names(cuda, seen, by_uuid=by_uuid))
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if amd := [device for device in chosen if device.vendor is Vendor.AMD]:
        places = _rocr_places(seen)
        variables[_ROCR] = ",".join(device.id if _is_rocms(device) else str(places[device.id]) for device in amd)
        # Set too, since one from outside would now mean other devices or none.
        variables[_HIP] = ",".join(str(place) for place in range(len(amd)))
    if intel := [device for device in chosen if device.vendor is Vendor.INTEL]:
        variables["ZE_AFFINITY_MASK"] = ",".join(str(_index(device, seen)) for device in intel)
    return variables


def visible_devices(seen: Snapshot) -> list[Device]:
    """Return the usable devices that the environment of this process does not hide."""
    if all(name not in os.environ for name in (_CUDA, _ROCR, _HIP)):
        return list(seen.usable_devices())
    numbers = process_numbers(seen)
    return [device for device in seen.usable_devices() if device.id in numbers]


def named_visible(visible: str, seen: Snapshot) -> list[Device]:
    """Return the usable devices that a CUDA_VISIBLE_DEVICES of that value shows, and those that are not CUDA's."""
    ids = [device.id for device in seen.devices if device.vendor in _CUDAS_OWN]
    shown = _read_variable(visible, dict(enumerate(_cuda_order(seen))), ids).values()
    return [device for device in seen.usable_devices() if device.vendor not in _CUDAS_OWN or device.id in shown]


def process_numbers(seen: Snapshot) -> dict[str, int]:
    """Return the number that each device has for programs' libraries in this process, by id; hidden ones are left out.

    PyTorch, CuPy and JAX count so. Devices of vendors that have no such count go by their index.
    """
    cuda = {_bare(device_id): number for number, device_id in _cuda_numbers(seen).items()}
    rocm = {device_id: number for number, device_id in _rocm_numbers(seen).items()}
    numbers: dict[str, int | None] = {}
    for device in seen.devices:
        if device.vendor in _CUDAS_OWN:
            numbers[device.id] = cuda.get(_bare(device.id))
        elif device.vendor is Vendor.AMD:
            numbers[device.id] = rocm.get(device.id)
        else:
            numbers[device.id] = _index(device, seen)
    return {device_id: number for device_id, number in numbers.items() if number is not None}


def _index(device: Device, seen: Snapshot) -> int:
    """Return its vendor's number for it, or its place among the vendor's devices where there is none."""
    if device.index is not None:
        return device.index
    return [other.id for other in seen.devices if other.vendor is device.vendor].index(device.id)


def _read_variable(visible: str | None, places: Mapping[int, str], ids: Sequence[str]) -> Mapping[int, str]:
    """Return the ids that a variable of that value shows, by their new numbers, as CUDA and ROCm read it.

    It holds numbers out of `places`, or beginnings of `ids`; reading stops at the first word that is neither.
    """
    if visible is None:
        return places
    chosen: list[str] = []
    for word in (word.strip() for word in visible.split(",")):
        by_number = places.get(int(word)) if word.isdecimal() else None
        found = by_number or next((device_id for device_id in ids if word and device_id.startswith(word)), None)
        if found is None:
            break
        chosen.append(found)
    return dict(enumerate(chosen))


# CUDA


def _cuda_names(chosen: Sequence[Device], seen: Snapshot, *, by_uuid: bool) -> list[str]:
    """A list with a part in it goes by UUID as a whole: CUDA has no integer for a part."""
    order = _cuda_order(seen)
    by_uuid = by_uuid or any(device.parent is not None for device in chosen)
    return [
        device.id if (by_uuid and _has_uuid(device)) or device.id not in order else str(order.index(device.id))
        for device in chosen
    ]


def _has_uuid(device: Device) -> bool:
    """Other ids are made up here, and CUDA does not know them."""
    return device.id.startswith(("GPU-", "MIG-", "SIM-")) and "#" not in device.id


def _cuda_order(seen: Snapshot) -> list[str]:
    """Return the driver's list in PCI order: whole cards, then the first part of each card that is split.

    A card that is gone from the driver's list keeps its index in ours, which another may have by now: that one counts.
    """
    first_parts: dict[str, str] = {}
    for device in seen.devices:
        if device.parent is not None:
            first_parts.setdefault(device.parent, device.id)
    cards = [device for device in seen.devices if device.vendor in _CUDAS_OWN and device.parent is None]
    by_index = {card.index: card.id for card in sorted(cards, key=lambda card: card.healthy) if card.index is not None}
    ids = [by_index[index] for index in sorted(by_index)]
    return [
        *(each for each in ids if each not in first_parts),
        *(first_parts[each] for each in ids if each in first_parts),
    ]


def _cuda_numbers(seen: Snapshot) -> Mapping[int, str]:
    """Return the ids of CUDA's devices by their numbers in this process."""
    ids = [device.id for device in seen.devices if device.vendor in _CUDAS_OWN]
    by_torch = _torch_order()
    if not {_bare(device_id) for device_id in ids}.isdisjoint(map(_bare, by_torch)):
        return dict(enumerate(by_torch))
    is_real = any(device.vendor is Vendor.NVIDIA for device in seen.devices)
    by_driver = _driver_order(_relevant_environment()) if is_real else ()
    return dict(enumerate(by_driver)) or _read_variable(os.environ.get(_CUDA), dict(enumerate(_cuda_order(seen))), ids)


def _torch_order() -> list[str]:
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return []
    properties = [cuda.get_device_properties(place) for place in range(cuda.device_count())]
    return [str(getattr(each, "uuid", "")) for each in properties] if hasattr(properties[0], "uuid") else []


@lru_cache(maxsize=4)
def _driver_order(environment: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    base: Mapping[str, str] = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    try:
        result = subprocess.run(
            [sys.executable, "-S", "-c", _ASK_DRIVER],
            env={**base, **dict(environment)},
            capture_output=True,
            text=True,
            timeout=_DRIVER_MAY_TAKE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ()
    return tuple(result.stdout.split()) if result.returncode == 0 else ()


def _relevant_environment() -> tuple[tuple[str, str], ...]:
    names = (_CUDA, "CUDA_DEVICE_ORDER")
    return tuple((name, os.environ[name]) for name in names if name in os.environ)


def _bare(device_id: str) -> str:
    """The digits of a UUID, which everybody writes in another way."""
    return device_id.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")


# ROCm


def _is_rocms(device: Device) -> bool:
    """ROCr knows cards by these ids; "#" stands behind the ids of partitions, which only we tell apart so."""
    return device.id.startswith("GPU-") and "#" not in device.id


def _rocr_places(seen: Snapshot) -> dict[str, int]:
    """Return each AMD device's number for ROCr, by id: its place in the kernel's topology, else its index."""
    in_kernel = _kernel_places()
    amd = [device for device in seen.devices if device.vendor is Vendor.AMD]
    at_place = Counter(device.pci_bus_id for device in amd)
    return {
        device.id: in_kernel.get(device.pci_bus_id or "", _index(device, seen))
        if at_place[device.pci_bus_id] == 1
        else _index(device, seen)
        for device in amd
    }


def _kernel_places() -> dict[str, int]:
    """Return the places of AMD's cards in the kernel's topology by PCI bus id, but for cards in several partitions.

    A node whose GPU this user may not use gives no `gpu_id`, and ROCr leaves it out.
    """
    try:
        nodes = [entry for entry in _TOPOLOGY.iterdir() if entry.name.isdecimal()]
    except OSError:
        return {}
    found = [_read_node(node) for node in sorted(nodes, key=lambda entry: int(entry.name))]
    cards = [bus_id for bus_id in found if bus_id is not None]
    return {bus_id: place for place, bus_id in enumerate(cards) if cards.count(bus_id) == 1}


def _read_node(node: Path) -> str | None:
    """Return the PCI bus id of a node of the kernel's topology, and None where it is no GPU that this user may use."""
    try:
        if not int((node / "gpu_id").read_text()):
            return None
        lines = (line.split() for line in (node / "properties").read_text().splitlines())
    except (OSError, ValueError):
        return None
    properties = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}
    place = properties.get("location_id", 0)
    return f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _rocm_numbers(seen: Snapshot) -> Mapping[int, str]:
    """Return the ids of AMD's devices by their numbers for HIP in this process."""
    places = {place: device_id for device_id, place in sorted(_rocr_places(seen).items(), key=lambda item: item[1])}
    left = _read_variable(os.environ.get(_ROCR), places, list(places.values()))
    is_cudas = any(device.vendor in _CUDAS_OWN for device in seen.devices)
    hip = os.environ.get(_HIP, None if is_cudas else os.environ.get(_CUDA))
    return _read_variable(hip, left, list(left.values()))
