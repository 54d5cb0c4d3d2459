"""NVIDIA devices through `nvidia-smi`, for where NVML itself cannot be loaded.

One call for the XML has everything. Where that cannot be read, two for the CSV have most of it. Where a lost card
keeps the tool from listing the others, they are asked for by their bus ids.
"""

import time
from pathlib import Path

from msgspec.structs import replace

from gpuyard.core.model import Device, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.nvidia.kernel import KernelCard, list_kernel_cards
from gpuyard.probes.nvidia.smi_csv import parse_apps, parse_csv
from gpuyard.probes.nvidia.smi_xml import parse_xml
from gpuyard.probes.tool import run_tool

_XML = ("nvidia-smi", "-q", "-x")
_COLUMNS = (
    "index,uuid,name,pci.bus_id,memory.total,memory.used,memory.free,utilization.gpu,power.draw,enforced.power.limit,"
    "temperature.gpu"
)
_GPUS = ("nvidia-smi", f"--query-gpu={_COLUMNS}", "--format=csv")
_APPS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_gpu_memory,process_name", "--format=csv")


class NvidiaSmi:
    name = "nvidia-smi"
    vendor = Vendor.NVIDIA
    may_hang = False

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, timeout_s: float) -> Reading:
        deadline = time.monotonic() + timeout_s
        output = run_tool(_XML, timeout_s)
        try:
            reading = parse_xml(output.stdout)
        except ProbeGarbled:
            if output.status != 0:
                raise output.failure() from None
            return _read_csv(deadline)
        if reading.devices and not any(device.healthy for device in reading.devices):
            return self._read_around(reading, deadline)
        return reading

    def _read_around(self, lost: Reading, deadline: float) -> Reading:
        in_kernel = list_kernel_cards(self._root)
        places = {card.pci_bus_id: (index, card) for index, card in enumerate(in_kernel)}
        gone = [_name_lost(device, places) for device in lost.devices]
        others = [card.pci_bus_id for card in in_kernel if card.pci_bus_id not in {d.pci_bus_id for d in gone}]
        if not others:
            return Reading(devices=tuple(gone))
        output = run_tool([*_XML, "-i", ",".join(str(bus_id) for bus_id in others)], _left(deadline))
        well = [replace(device, index=_index(device, places)) for device in parse_xml(output.stdout).devices]
        return Reading(devices=tuple(sorted([*well, *gone], key=lambda d: (d.index is None, d.index))))


def _read_csv(deadline: float) -> Reading:
    cards = parse_csv(run_tool(_GPUS, _left(deadline)).require_success())
    apps = parse_apps(run_tool(_APPS, _left(deadline)).require_success())
    processes = {device.id: device.processes for device in apps.devices}
    return Reading(
        devices=tuple(replace(card, processes=processes.get(card.id, ())) for card in cards.devices),
        problems=cards.problems,
    )


def _name_lost(device: Device, places: dict[str | None, tuple[int, KernelCard]]) -> Device:
    index, card = places.get(device.pci_bus_id, (None, KernelCard(pci_bus_id=None)))
    return replace(device, id=card.uuid or device.id, name=device.name or card.name, index=index)


def _index(device: Device, places: dict[str | None, tuple[int, KernelCard]]) -> int | None:
    found = places.get(device.pci_bus_id)
    return device.index if device.parent or found is None else found[0]


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())
