"""Device ids in the numbering that CUDA uses in this process, and the variables that show a program its devices.

CUDA numbers what CUDA_VISIBLE_DEVICES lets it see, in an order of its own; only CUDA itself knows it for sure. Where
PyTorch has set CUDA up in this process, it is asked. Otherwise a short-lived child asks the driver, so that nothing is
set up here that a later fork could not bear.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache

from gpuyard.core.model import Device, Vendor

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
_VARIABLES = {
    Vendor.NVIDIA: "CUDA_VISIBLE_DEVICES",
    Vendor.SIMULATED: "CUDA_VISIBLE_DEVICES",
    Vendor.AMD: "ROCR_VISIBLE_DEVICES",
    Vendor.INTEL: "ZE_AFFINITY_MASK",
}
_CUDAS_OWN = (Vendor.NVIDIA, Vendor.SIMULATED)
# Both stop reading at a number that cannot be. Level Zero has no way to say "none".
_NOTHING_VISIBLE = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


def visible_variables(devices: Sequence[Device]) -> dict[str, str]:
    """The environment in which a program sees exactly these devices, whatever the enumeration order."""
    if not devices:
        return dict(_NOTHING_VISIBLE)
    variables: dict[str, str] = {}
    for device in devices:
        name = _VARIABLES.get(device.vendor)
        if name is not None:
            variables[name] = ",".join(filter(None, [variables.get(name), _visible_name(device)]))
    if "CUDA_VISIBLE_DEVICES" in variables:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if "ROCR_VISIBLE_DEVICES" in variables:
        # HIP counts what ROCr has left, so a list from outside would now mean other devices or none.
        left = variables["ROCR_VISIBLE_DEVICES"].count(",") + 1
        variables["HIP_VISIBLE_DEVICES"] = ",".join(map(str, range(left)))
    return variables


def visible_devices(devices: Sequence[Device]) -> list[Device]:
    """Those that CUDA sees in this process, and those that are not CUDA's."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return list(devices)
    numbers = cuda_numbers([device.id for device in devices], devices)
    return [
        device
        for device, number in zip(devices, numbers, strict=True)
        if number is not None or device.vendor not in _CUDAS_OWN
    ]


def named_visible(visible: str, devices: Sequence[Device]) -> list[Device]:
    """Those that a CUDA_VISIBLE_DEVICES of that value names, in their vendor's order, and those that are not CUDA's."""
    shown = _listed(visible, [device.id for device in devices if device.vendor in _CUDAS_OWN])
    return [device for device in devices if device.vendor not in _CUDAS_OWN or device.id in shown]


def cuda_numbers(ids: Sequence[str], devices: Sequence[Device]) -> list[int | None]:
    """For each id its number for CUDA in this process; `None` for one that CUDA does not see here."""
    order = _torch_order() or _order(devices)
    places = {_bare(device_id): place for place, device_id in enumerate(order)}
    return [places.get(_bare(device_id)) for device_id in ids]


def _visible_name(device: Device) -> str:
    """A vendor takes ids of its own making; what we had to make up goes by number."""
    is_vendors_own = device.id.startswith(("GPU-", "MIG-", "SIM-")) and "#" not in device.id
    by_number = device.vendor is Vendor.INTEL or not is_vendors_own
    return str(device.index) if by_number and device.index is not None else device.id


def _order(devices: Sequence[Device]) -> list[str]:
    ids = [device.id for device in devices if device.vendor in _CUDAS_OWN]
    is_simulated = any(device.vendor is Vendor.SIMULATED for device in devices)
    told = () if is_simulated else _driver_order(_relevant_environment())
    return list(told) or _listed(os.environ.get("CUDA_VISIBLE_DEVICES"), ids)


def _listed(visible: str | None, ids: Sequence[str]) -> list[str]:
    """As CUDA reads its variable: numbers or beginnings of ids, up to the first that is neither."""
    if visible is None:
        return list(ids)
    chosen = []
    for word in (word.strip() for word in visible.split(",")):
        by_number = ids[int(word)] if word.isdecimal() and int(word) < len(ids) else None
        found = by_number or next((device_id for device_id in ids if word and device_id.startswith(word)), None)
        if found is None:
            break
        chosen.append(found)
    return chosen


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
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return tuple((name, os.environ[name]) for name in names if name in os.environ)


def _bare(device_id: str) -> str:
    """The digits of a UUID, which everybody writes in another way."""
    return device_id.lower().removeprefix("gpu-").removeprefix("mig-").replace("-", "")
