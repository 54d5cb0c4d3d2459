"""Parse the box that plain `xpu-smi` prints since 2.0: cards in the layout of nvidia-smi, then all processes.

Rules:
- A card has a line with its number, name and bus id, further lines if its name is too long for the column, and a
  line of figures. The name is cut at the end of the column, also within a word.
- Figures are found by position, counted from the end of the line: a card may have several fans.
- Processes are known only if the end of their list was printed.
"""

import re
from collections.abc import Sequence

from msgspec import Struct, structs

from gpuyard.core.snapshot import Device, Process
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.intel import xpu_smi_fields
from gpuyard.probes.intel.device_naming import device_index, one_per_pid, process_id, within_used

BOX_HEADER = re.compile(r"\|\s*GPU\s+Name\s+Persistence-M\s*\|")
_PROCESS_HEADER = re.compile(r"\|\s*GPU\s+PID\s+Type\s+Process Name\b")
_COLUMN_GAP = 2


class _BoxCard(Struct, kw_only=True):
    index: int
    pci_bus_id: str
    name: str
    known: xpu_smi_fields.XpuMetrics = xpu_smi_fields.XpuMetrics()


def is_of_nvidia(lines: Sequence[str]) -> bool:
    """Return whether the box is NVIDIA's, which has the same layout: only that has a performance state."""
    return any(re.search(r"\bTemp\s+Perf\b", line) for line in lines[1:2])


def read_box(lines: Sequence[str]) -> list[Device]:
    """Return the cards below the header, which is the first of the lines."""
    name_column = slice(lines[0].index("Name"), lines[0].index("Persistence-M") - _COLUMN_GAP)
    found: list[_BoxCard] = []
    is_open = False
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3:
            continue
        index, place = device_index(cells[0].partition(" ")[0]), pci_bus_id(cells[1].partition(" ")[0])
        if index is not None and place:
            found.append(_BoxCard(index=index, pci_bus_id=place, name=line[name_column]))
            is_open = True
        elif is_open and not cells[1]:
            found[-1].name += line[name_column]
        elif is_open:
            found[-1].known = _figures(*cells)
            is_open = False
    users = _processes(lines)
    return [_device(card, users) for card in found]


def _figures(left: str, memory: str, right: str) -> xpu_smi_fields.XpuMetrics:
    before, slash, limit = left.rpartition(" / ")
    words = ["", *(before if slash else left).split()]
    used, _, total = memory.partition(" / ")
    return xpu_smi_fields.XpuMetrics(
        utilization_percent=parse_numbers.percent(right.partition(" ")[0]),
        power_draw_w=parse_numbers.watts(words[-1]),
        power_limit_w=parse_numbers.watts(limit) if slash else None,
        temperature_c=parse_numbers.celsius(words[-2]) if len(words) > 2 else None,
        memory_used_mb=parse_numbers.megabytes(used),
        memory_total_mb=parse_numbers.megabytes(total),
    )


def _device(card: _BoxCard, users: dict[int, list[Process]] | None) -> Device:
    device = xpu_smi_fields.as_device(card.index, card.pci_bus_id, card.known)
    listed = None if users is None else one_per_pid(users.get(card.index, ()))
    return structs.replace(
        device, name=parse_numbers.words(card.name), processes=within_used(listed, device.memory_used_mb)
    )


def _processes(lines: Sequence[str]) -> dict[int, list[Process]] | None:
    """Return the processes of each card, or None if the list is missing or truncated."""
    start = next((number for number, line in enumerate(lines) if _PROCESS_HEADER.match(line)), len(lines))
    borders = [number for number in range(start, len(lines)) if lines[number].startswith("+")]
    if len(borders) < 2:
        return None
    users: dict[int, list[Process]] = {}
    for line in lines[borders[0] + 1 : borders[1]]:
        words = line.strip("| ").split()
        index, pid = (device_index(words[0]), process_id(words[1])) if len(words) > 4 else (None, None)
        if index is not None and pid is not None:
            behind_name = -2 if parse_numbers.number(words[-2]) is not None else -1
            memory, name = " ".join(words[behind_name:]), " ".join(words[3:behind_name])
            process = Process(pid=pid, memory_mb=parse_numbers.megabytes(memory), name=parse_numbers.words(name))
            users.setdefault(index, []).append(process)
    return users
