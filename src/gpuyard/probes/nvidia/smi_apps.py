"""Reads the CSV of `nvidia-smi --query-compute-apps=…`, with any columns.

The header says which column is which. Without one (`noheader`) a row is read where a UUID, a bus id or a size in MiB
makes it plain that it is one of these: the first whole number is the process then, and a number without a unit unknown.
"""

import re
from collections.abc import Mapping, Sequence

from gpuyard.core.model import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.figures import megabytes, quantity, whole, words
from gpuyard.probes.identity import pci_bus_id, with_distinct_ids
from gpuyard.probes.nvidia.lost import lost_devices, raise_refusal, says_no_devices
from gpuyard.probes.nvidia.smi_csv import SENTINEL, UUID, cells_of, columns, csv_lines, without_header

_COLUMNS = frozenset({"pid", "process_name", "name", "used_memory", "used_gpu_memory", "gpu_uuid", "gpu_bus_id"})
_SELF_NAMING = (
    ("gpu_uuid", UUID.fullmatch),
    ("gpu_bus_id", pci_bus_id),
    ("used_memory", re.compile(r"\d+ MiB", re.ASCII).fullmatch),
    ("pid", re.compile(r"[1-9]\d{0,9}", re.ASCII).fullmatch),
    ("timestamp", re.compile(r"\d{4}/\d\d/\d\d [\d:.]+", re.ASCII).fullmatch),
    # With its space, and in these letters: `nvidia-smi` and the like are processes.
    ("gpu_name", re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID) \S.*").fullmatch),
)

Row = Mapping[str, str]


def parse_apps(text: str) -> Reading:
    """The cards that processes run on, each with nothing but its processes."""
    lost = lost_devices(text)
    lines = csv_lines(text)
    header = columns(lines[0]) if lines else []
    if "pid" in header and _COLUMNS.issuperset(_significant(header)):
        return Reading(devices=with_distinct_ids([*_cards(_rows(header, lines[1:])), *lost]))
    rows = [_self_naming(cells_of(line)) for line in lines]
    plain = [row for row in rows if row is not None]
    if plain and len(plain) == len(rows):
        problems = (without_header(),) if any("unknown" in row for row in plain) else ()
        return Reading(devices=with_distinct_ids([*_cards(plain), *lost]), problems=problems)
    raise_refusal(text)
    if lost or says_no_devices(text):
        return Reading(devices=lost)
    raise ProbeGarbled("nvidia-smi", "this is not the CSV that `nvidia-smi --query-compute-apps` prints")


def _significant(header: Sequence[str]) -> set[str]:
    """The columns that tell a list of processes from a list of cards."""
    return {column for column in header if "." in column or column in _COLUMNS}


def _rows(header: Sequence[str], lines: Sequence[str]) -> list[Row]:
    return [dict(zip(header, _fold_name(header, cells_of(line)), strict=False)) for line in lines]


def _fold_name(header: Sequence[str], cells: list[str]) -> list[str]:
    """A process's name may hold commas: the cells too many belong to it."""
    extra = len(cells) - len(header)
    place = next((header.index(name) for name in ("process_name", "name") if name in header), None)
    if extra <= 0 or place is None:
        return cells
    return [*cells[:place], ", ".join(cells[place : place + extra + 1]), *cells[place + extra + 1 :]]


def _self_naming(cells: Sequence[str]) -> Row | None:
    """`None` where nothing says that it is a process, or a figure says that it is a card."""
    row: dict[str, str] = {}
    for cell in cells:
        named = next((column for column, fits in _SELF_NAMING if column not in row and fits(cell)), None)
        figure = quantity(cell)
        if named:
            row[named] = cell
        elif figure and figure[1]:
            return None
        elif figure:
            row["unknown"] = cell
        elif not SENTINEL.fullmatch(cell):
            row["process_name"] = f"{row['process_name']}, {cell}" if "process_name" in row else cell
    is_plain = not row.keys().isdisjoint({"gpu_uuid", "gpu_bus_id", "used_memory"})
    return row if is_plain and "pid" in row else None


def _cards(rows: Sequence[Row]) -> list[Device]:
    names: dict[str, Row] = {}
    processes: dict[str, list[Process]] = {}
    for row in rows:
        pid = whole(row.get("pid"))
        if pid is None:
            continue
        card = words(row.get("gpu_uuid")) or pci_bus_id(row.get("gpu_bus_id")) or "nvidia-0"
        names.setdefault(card, row)
        processes.setdefault(card, []).append(_read_process(pid, row))
    return [
        Device(
            id=card,
            vendor=Vendor.NVIDIA,
            name=words(row.get("gpu_name")),
            pci_bus_id=pci_bus_id(row.get("gpu_bus_id")),
            processes=tuple(processes[card]),
        )
        for card, row in names.items()
    ]


def _read_process(pid: int, row: Row) -> Process:
    memory = row.get("used_gpu_memory", row.get("used_memory"))
    return Process(pid=pid, memory_mb=megabytes(memory), name=words(row.get("process_name", row.get("name"))))
