"""Memory of AMD cards from kernel files: the cheapest source, some microseconds for each file.

Rules:
- How much of a card is used is `mem_info_vram_used` of the amdgpu driver.
- What a program holds is `/sys/class/kfd/kfd/proc/PID/vram_GPU` of the compute driver (HIP, OpenCL), for programs of
  all users. Its pids are those of the first pid namespace, so in a container they are not used.
- Processes that do not compute, such as a desktop's, keep the figure of the last full reading while they live: it comes
  from the open files of every process on the machine, which takes too long to be read often.
- Partitions of a card share these files: their memory is unknown here.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Process
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import without_number
from gpuyard.probes.common.kernel_files import read_text, sees_all_processes

_FIGURES = ("total", "used")
# The place of a card on its bus; the upper bits number its partitions.
_BUS_BITS = 0xFFFF


class KernelMemory:
    """`find_cards` belongs to each full reading: it finds the number that the compute driver gives to each card."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kfd = root / "sys/class/kfd/kfd"
        self._numbers: Mapping[str, int] = {}  # by PCI bus id

    def find_cards(self) -> None:
        self._numbers = _card_numbers(self._kfd / "topology/nodes") if sees_all_processes(self._root) else {}

    def used_mb(self, device: Device) -> tuple[float, float] | None:
        """Return the memory of the card and how much of it is used, or None if the kernel does not say."""
        if device.pci_bus_id is None or _is_partition(device):
            return None
        folder = self._root / "sys/bus/pci/devices" / device.pci_bus_id
        total, used = (parse_numbers.megabytes(read_text(folder / f"mem_info_vram_{each}"), "B") for each in _FIGURES)
        return (total, used) if total and used is not None else None

    def with_processes(self, devices: Sequence[Device]) -> list[Device]:
        """Return the devices with what each computing process holds now, as far as the kernel says."""
        found = {each.id: self._number(each) for each in devices}
        numbers = {device_id: number for device_id, number in found.items() if number is not None}
        held_mb = self._held_mb(set(numbers.values())) if numbers else {}
        return [
            replace(each, processes=self._processes(each, held_mb.get(numbers[each.id], {})))
            if each.id in numbers
            else each
            for each in devices
        ]

    def _number(self, device: Device) -> int | None:
        return None if _is_partition(device) else self._numbers.get(device.pci_bus_id or "")

    def _held_mb(self, numbers: set[int]) -> dict[int, dict[int, float]]:
        """Return what each process holds, by card and pid."""
        found: dict[int, dict[int, float]] = {number: {} for number in numbers}
        for name in _names(self._kfd / "proc"):
            pid = parse_numbers.process_id(name)
            for number in numbers if pid is not None else ():
                held = parse_numbers.megabytes(read_text(self._kfd / "proc" / name / f"vram_{number}"), "B")
                if held is not None and pid is not None:
                    found[number][pid] = held
        return found

    def _processes(self, device: Device, held_mb: Mapping[int, float]) -> tuple[Process, ...] | None:
        known = {process.pid: process for process in device.processes or ()}
        processes = [
            replace(process, memory_mb=held_mb.get(pid, process.memory_mb))
            for pid, process in known.items()
            if pid in held_mb or (self._root / "proc" / str(pid)).exists()
        ]
        for pid, held in held_mb.items():
            if held and pid not in known:
                processes.append(Process(pid=pid, memory_mb=held, name=self._name(pid)))
        # Programs that do not compute are unknown here: none of the others does not mean that there is none.
        return tuple(processes) if processes or device.processes is not None else None

    def _name(self, pid: int) -> str | None:
        return parse_numbers.words(read_text(self._root / "proc" / str(pid) / "comm"))


def _card_numbers(nodes: Path) -> dict[str, int]:
    """Return the compute driver's number of each card by its PCI bus id; a card with several is partitioned."""
    found: dict[str, list[int]] = {}
    for name in _names(nodes):
        number = parse_numbers.whole(read_text(nodes / name / "gpu_id"))
        properties = dict(line.split(maxsplit=1) for line in _lines(nodes / name / "properties"))
        place, domain = (parse_numbers.whole(properties.get(each)) for each in ("location_id", "domain"))
        if number and place is not None:
            bus, slot = (place & _BUS_BITS) >> 8, place & 0xFF
            found.setdefault(f"{domain or 0:04x}:{bus:02x}:{slot >> 3:02x}.{slot & 7}", []).append(number)
    return {bus_id: numbers[0] for bus_id, numbers in found.items() if len(numbers) == 1}


def _lines(path: Path) -> list[str]:
    return [line for line in (read_text(path) or "").splitlines() if len(line.split()) > 1]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_partition(device: Device) -> bool:
    return without_number(device.id) != device.id
