"""Parse the CSV of `nvidia-smi --query-compute-apps=…`, with any columns.

The header says which column is which. Without one (`noheader`) a row is read where a UUID, a bus id or a size in MiB
makes it plain that it is one of these: the first whole number is the process then, and a number without a unit unknown.
A row without a process id is left out, and a problem says so; a card with no other rows has unknown processes.
"""

import re
from collections.abc import Mapping, Sequence

from gpuyard.core.snapshot import Device, Problem, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.error_to_problem import as_problem
from gpuyard.probes.common.parse_numbers import megabytes, quantity, whole, words
from gpuyard.probes.nvidia.lost_cards import lost_devices, raise_refusal, says_no_devices
from gpuyard.probes.nvidia.nvidia_smi_csv import SENTINEL, UUID, cells_of, columns, csv_lines, without_header
from gpuyard.probes.nvidia.process_list import one_per_pid

_COLUMNS = frozenset({"pid", "process_name", "name", "used_memory", "used_gpu_memory", "gpu_uuid", "gpu_bus_id"})
_MIB = re.compile(r"\d+ MiB", re.ASCII)
_SELF_NAMING = (
    ("gpu_uuid", UUID.fullmatch),
    ("gpu_bus_id", pci_bus_id),
    ("used_memory", _MIB.fullmatch),
    ("pid", re.compile(r"[1-9]\d{0,9}", re.ASCII).fullmatch),
    ("timestamp", re.compile(r"\d{4}/\d\d/\d\d [\d:.]+", re.ASCII).fullmatch),
    # A product name has a space and this capitalisation: `nvidia-smi` and its like are processes.
    ("gpu_name", re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID) \S.*").fullmatch),
)

Row = Mapping[str, str]


def parse_apps(text: str) -> Reading:
    """Return the cards that processes run on; only their ids and processes are known."""
    lost = lost_devices(text)
    lines = csv_lines(text)
    header = columns(lines[0]) if lines else []
    if "pid" in header and _COLUMNS.issuperset(_significant(header)):
        return _reading(_rows(header, lines[1:]), lost)
    rows = _headerless_rows([cells_of(line) for line in lines])
    if rows:
        problems = (without_header(),) if any("unknown" in row for row in rows) else ()
        return _reading(rows, lost, problems)
    raise_refusal(text)
    if lost or says_no_devices(text):
        return Reading(devices=lost)
    raise ProbeGarbled("nvidia-smi", "this is not the CSV that `nvidia-smi --query-compute-apps` prints")


def _reading(rows: Sequence[Row], lost: Sequence[Device], problems: Sequence[Problem] = ()) -> Reading:
    nameless = sum(whole(row.get("pid")) is None for row in rows)
    if nameless:
        message = f"{nameless} of {len(rows)} rows of `--query-compute-apps` have no process id and are left out"
        problems = (*problems, as_problem(ProbeGarbled("nvidia-smi", message), Vendor.NVIDIA))
    return Reading(devices=with_distinct_ids([*_cards(rows), *lost]), problems=tuple(problems))


def _significant(header: Sequence[str]) -> set[str]:
    """Return the columns that distinguish a list of processes from a list of cards."""
    return {column for column in header if "." in column or column in _COLUMNS}


def _rows(header: Sequence[str], lines: Sequence[str]) -> list[Row]:
    rows = [cells_of(line) for line in lines if columns(line) != header]
    return [dict(zip(header, _fold_name(header, cells), strict=False)) for cells in rows]


def _fold_name(header: Sequence[str], cells: list[str]) -> list[str]:
    """Join the surplus cells into the process name, which may contain commas."""
    extra = len(cells) - len(header)
    place = next((header.index(name) for name in ("process_name", "name") if name in header), None)
    if extra <= 0 or place is None:
        return cells
    return [*cells[:place], ", ".join(cells[place : place + extra + 1]), *cells[place + extra + 1 :]]


def _headerless_rows(lines: Sequence[Sequence[str]]) -> list[Row]:
    """Return a row per line; no rows if a line describes a card, or none certainly describes a process."""
    has_units = any(_MIB.fullmatch(cell) for cells in lines for cell in cells)
    rows = [_self_naming(cells, has_units=has_units) for cells in lines]
    known = [row for row in rows if row is not None]
    return known if len(known) == len(rows) and any("pid" in row for row in known) else []


def _self_naming(cells: Sequence[str], *, has_units: bool) -> Row | None:
    """Return the columns that can be recognised by their content, or None if the row describes a card.

    The pid is set only if it is certain: after a blank cell, a number without a unit may be the memory.
    """
    row: dict[str, str] = {}
    may_be_memory = False
    for cell in cells:
        named = next((column for column, fits in _SELF_NAMING if column not in row and fits(cell)), None)
        figure = quantity(cell)
        if named and not (named == "pid" and may_be_memory):
            row[named] = cell
        elif figure and figure[1]:
            return None
        elif figure:
            row["unknown"] = cell
        elif not cell or SENTINEL.fullmatch(cell):
            may_be_memory = not has_units
        else:
            row["process_name"] = f"{row['process_name']}, {cell}" if "process_name" in row else cell
    if row.keys().isdisjoint({"gpu_uuid", "gpu_bus_id", "used_memory"}):
        row.pop("pid", None)
    return row


def _cards(rows: Sequence[Row]) -> list[Device]:
    names: dict[str, Row] = {}
    processes: dict[str, list[Process]] = {}
    for row in rows:
        pid = whole(row.get("pid"))
        card = words(row.get("gpu_uuid")) or pci_bus_id(row.get("gpu_bus_id"))
        if pid is not None:
            processes.setdefault(card or "nvidia-0", []).append(_read_process(pid, row))
        if pid is not None or card:
            names.setdefault(card or "nvidia-0", row)
    return [
        Device(
            id=card,
            vendor=Vendor.NVIDIA,
            name=words(row.get("gpu_name")),
            pci_bus_id=pci_bus_id(row.get("gpu_bus_id")),
            processes=one_per_pid(processes[card]) if card in processes else None,
        )
        for card, row in names.items()
    ]


def _read_process(pid: int, row: Row) -> Process:
    memory = row.get("used_gpu_memory", row.get("used_memory"))
    return Process(pid=pid, memory_mb=megabytes(memory), name=words(row.get("process_name", row.get("name"))))
