"""NVIDIA devices through `nvidia-smi`, for machines where NVML cannot be loaded.

One call for the XML returns everything. If it cannot be read, two calls for the CSV return most of it. If a lost card
keeps the tool from listing the others, they are queried by bus id.
"""

from pathlib import Path

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.multiple_calls import problem_beside, run_until
from gpuyard.probes.common.run_tool import ToolOutput
from gpuyard.probes.nvidia.nvidia_smi_apps import parse_apps
from gpuyard.probes.nvidia.nvidia_smi_csv import parse_csv
from gpuyard.probes.nvidia.nvidia_smi_xml import parse_xml
from gpuyard.probes.nvidia.proc_cards import KernelCard, list_kernel_cards

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
        deadline = Deadline(timeout_s)
        output = run_until(_XML, deadline)
        try:
            reading = _read_xml(output)
        except (ProbeGarbled, ProbeCrashed) as error:
            return _read_csv_instead(error, deadline)
        if reading.devices and not any(device.healthy for device in reading.devices):
            return self._read_around(reading, deadline)
        return reading

    def _read_around(self, lost: Reading, deadline: Deadline) -> Reading:
        in_kernel = list_kernel_cards(self._root)
        places = {card.pci_bus_id: (index, card) for index, card in enumerate(in_kernel)}
        gone = [_name_lost(device, places) for device in lost.devices]
        lost_at = {device.pci_bus_id for device in gone}
        others = [card.pci_bus_id for card in in_kernel if card.pci_bus_id and card.pci_bus_id not in lost_at]
        found = _read_others(others, deadline)
        well = [replace(device, index=_index(device, places)) for device in found.devices]
        return Reading(
            devices=tuple(sorted([*well, *gone], key=lambda d: (d.index is None, d.index))),
            problems=(*lost.problems, *found.problems),
        )


def _read_xml(output: ToolOutput) -> Reading:
    """Parse the XML. If the tool failed after listing some cards, more may exist: a lost card is why it failed."""
    try:
        reading = parse_xml(output.stdout)
    except ProbeGarbled:
        if output.status != 0:
            raise output.failure() from None
        raise
    if output.status == 0 or any(not device.healthy for device in reading.devices):
        return reading
    return replace(reading, problems=(*reading.problems, problem_beside(output.failure(), Vendor.NVIDIA)))


def _read_others(bus_ids: list[str], deadline: Deadline) -> Reading:
    if not bus_ids:
        return Reading()
    try:
        return _read_xml(run_until([*_XML, "-i", ",".join(bus_ids)], deadline))
    except ProbeError as error:
        return Reading(problems=(problem_beside(error, Vendor.NVIDIA, "the other GPUs"),))


def _read_csv_instead(error: ProbeError, deadline: Deadline) -> Reading:
    """Return the reading from CSV. If that fails too, raise the first error, which says more."""
    try:
        cards = parse_csv(run_until(_GPUS, deadline).require_success())
    except ProbeError:
        raise error from None
    try:
        apps = parse_apps(run_until(_APPS, deadline).require_success())
    except ProbeError as hidden:
        problem = problem_beside(hidden, Vendor.NVIDIA, "who uses the GPUs is unknown")
        return replace(cards, problems=(*cards.problems, problem))
    processes = {device.id: device.processes for device in apps.devices}
    return Reading(
        devices=tuple(replace(card, processes=processes.get(card.id, ())) for card in cards.devices),
        problems=(*cards.problems, *apps.problems),
    )


def _name_lost(device: Device, places: dict[str | None, tuple[int, KernelCard]]) -> Device:
    index, card = places.get(device.pci_bus_id, (None, KernelCard(pci_bus_id=None)))
    return replace(device, id=card.uuid or device.id, name=device.name or card.name, index=index)


def _index(device: Device, places: dict[str | None, tuple[int, KernelCard]]) -> int | None:
    found = places.get(device.pci_bus_id)
    return device.index if device.parent or found is None else found[0]
