"""NVIDIA devices through `nvidia-smi`, for machines where NVML cannot be loaded.

One call for the XML returns everything. If it cannot be read, two calls for the CSV return most of it. If a lost card
keeps the tool from listing the others, they are queried by bus id. Xids are in no output: they come from the kernel's
log.
"""

import time
from pathlib import Path

from msgspec.structs import replace

from gpuyard.core.health_figures import XidEvent
from gpuyard.core.snapshot import Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled
from gpuyard.probes.common.probe_calls import Deadline, problem_beside, run_until
from gpuyard.probes.common.run_tool import ToolOutput
from gpuyard.probes.nvidia.kernel_log import MOST_REMEMBERED, KernelLog
from gpuyard.probes.nvidia.nvidia_smi_csv import parse_apps, parse_csv
from gpuyard.probes.nvidia.nvidia_smi_health import with_xids
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
    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kernel_log = KernelLog(root)
        self._xids: dict[str, tuple[XidEvent, ...]] = {}

    def read(self, timeout_s: float) -> Reading:
        for bus_id, code in self._kernel_log.new_xids():
            events = (*self._xids.get(bus_id, ()), XidEvent(code=code, at=time.time()))
            self._xids[bus_id] = events[-MOST_REMEMBERED:]
        reading = self._read(timeout_s)
        return replace(reading, devices=with_xids(reading.devices, self._xids)) if self._xids else reading

    def _read(self, timeout_s: float) -> Reading:
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
        """Read the other cards by bus id, and number all cards as the kernel does."""
        places = {card.pci_bus_id: (index, card) for index, card in enumerate(list_kernel_cards(self._root))}
        unknown = (None, KernelCard(pci_bus_id=None))
        gone, well = [], []
        for device in lost.devices:
            index, card = places.get(device.pci_bus_id, unknown)
            gone.append(replace(device, id=card.uuid or device.id, name=device.name or card.name, index=index))
        lost_at = {device.pci_bus_id for device in gone}
        others = [bus_id for bus_id in places if bus_id and bus_id not in lost_at]
        found = Reading()
        if others:
            try:
                found = _read_xml(run_until([*_XML, "-i", ",".join(others)], deadline))
            except ProbeError as error:
                found = Reading(problems=(problem_beside(error, Vendor.NVIDIA, "the other GPUs"),))
        for device in found.devices:
            index, _ = unknown if device.parent else places.get(device.pci_bus_id, unknown)
            well.append(device if index is None else replace(device, index=index))
        return Reading(
            devices=tuple(sorted([*well, *gone], key=lambda device: (device.index is None, device.index))),
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
