"""Reads the CSV of `nvidia-smi --query-gpu=…` and of `--query-compute-apps=…`, with any columns.

The header says which column is which. Without one (`noheader`) the commonest order of seven columns is recognised;
of any other, only what names itself (a UUID, a bus id, a product name) is taken, and the rest is unknown.
"""

import re
from collections.abc import Mapping, Sequence

from gpuyard.core.model import Device, Problem, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.figures import celsius, megabytes, percent, quantity, watts, whole, words
from gpuyard.probes.identity import with_distinct_ids
from gpuyard.probes.nvidia.kernel import normalize_bus_id
from gpuyard.probes.nvidia.lost import fault_in, lost_devices, raise_refusal, says_no_devices

COMMON_COLUMNS = (
    "index", "name", "temperature.gpu", "memory.used", "memory.total", "utilization.gpu", "power.draw",
)  # fmt: skip
_GPU_COLUMNS = frozenset({*COMMON_COLUMNS, "uuid", "gpu_uuid", "gpu_name", "pci.bus_id", "memory.free", "power.limit"})
_APP_COLUMNS = frozenset({"pid", "process_name", "name", "used_memory", "used_gpu_memory", "gpu_uuid", "gpu_bus_id"})
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Fa-f-]{8,}(?:/\d+/\d+)?")
_BUS_ID = re.compile(r"(?:[0-9A-Fa-f]{8}|[0-9A-Fa-f]{4}):[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")
_PRODUCT = re.compile(r"\b(?:NVIDIA|GeForce|Tesla|Quadro|TITAN|RTX|GTX|GRID)\b", re.IGNORECASE)
_SENTINEL = re.compile(r"\[.*\]|N/A|ERR!", re.IGNORECASE)

Row = Mapping[str, str]


def parse_csv(text: str) -> Reading:
    """Cards, from `--query-gpu`."""
    lost = lost_devices(text)
    rows, problems = _gpu_rows(text)
    if not rows and not lost and not says_no_devices(text) and not _has_header(text, _GPU_COLUMNS):
        raise_refusal(text)
        raise ProbeGarbled("nvidia-smi", "this is not the CSV that `nvidia-smi --query-gpu` prints")
    devices = [_read_card(place, row) for place, row in enumerate(rows)]
    return Reading(devices=with_distinct_ids([*devices, *lost]), problems=problems)


def parse_apps(text: str) -> Reading:
    """Processes, from `--query-compute-apps`: the cards they run on, each with nothing but its processes."""
    lost = lost_devices(text)
    lines = _lines(text)
    header = _columns(lines[0]) if lines else []
    if "pid" not in header or not _APP_COLUMNS.issuperset(_significant(header)):
        raise_refusal(text)
        if lost or says_no_devices(text):
            return Reading(devices=lost)
        raise ProbeGarbled("nvidia-smi", "this is not the CSV that `nvidia-smi --query-compute-apps` prints")
    cards: dict[str, list[Process]] = {}
    names: dict[str, Row] = {}
    for cells in map(_cells, lines[1:]):
        row = dict(zip(header, _fold_name(header, cells), strict=False))
        pid = whole(row.get("pid"))
        if pid is None:
            continue
        card = words(row.get("gpu_uuid")) or _bus_id(row.get("gpu_bus_id")) or "nvidia-0"
        names.setdefault(card, row)
        cards.setdefault(card, []).append(_read_process(pid, row))
    devices = [
        Device(
            id=card,
            vendor=Vendor.NVIDIA,
            name=words(names[card].get("gpu_name")),
            pci_bus_id=_bus_id(names[card].get("gpu_bus_id")),
            processes=tuple(processes),
        )
        for card, processes in cards.items()
    ]
    return Reading(devices=with_distinct_ids([*devices, *lost]))


def _significant(header: Sequence[str]) -> set[str]:
    """The columns that tell a list of processes from a list of cards."""
    return {column for column in header if "." in column or column in _APP_COLUMNS}


def _read_process(pid: int, row: Row) -> Process:
    memory = row.get("used_gpu_memory", row.get("used_memory"))
    return Process(pid=pid, memory_mb=megabytes(memory), name=words(row.get("process_name", row.get("name"))))


def _read_card(place: int, row: Row) -> Device:
    index = whole(row.get("index"))
    index = place if index is None else index
    bus_id = _bus_id(row.get("pci.bus_id", row.get("gpu_bus_id")))
    return Device(
        id=words(row.get("uuid", row.get("gpu_uuid"))) or bus_id or f"nvidia-{index}",
        vendor=Vendor.NVIDIA,
        index=index,
        name=words(row.get("name", row.get("gpu_name"))),
        pci_bus_id=bus_id,
        memory_total_mb=megabytes(row.get("memory.total")),
        memory_used_mb=megabytes(row.get("memory.used")),
        memory_free_mb=megabytes(row.get("memory.free")),
        utilization_percent=percent(row.get("utilization.gpu")),
        power_draw_w=_first_watts(row, "power.draw", "power.draw.average", "power.draw.instant"),
        power_limit_w=_first_watts(row, "enforced.power.limit", "power.limit"),
        temperature_c=celsius(row.get("temperature.gpu")),
        fault=fault_in(row.values()),
    )


def _first_watts(row: Row, *columns: str) -> float | None:
    return next((value for column in columns if (value := watts(row.get(column))) is not None), None)


def _gpu_rows(text: str) -> tuple[list[Row], tuple[Problem, ...]]:
    lines = _lines(text)
    if not lines:
        return [], ()
    header = _columns(lines[0])
    if _GPU_COLUMNS.intersection(header):
        rows = [_cells(line) for line in lines[1:]]
        return [dict(zip(header, cells, strict=True)) for cells in rows if len(cells) == len(header)], ()
    return _headerless_rows([_cells(line) for line in lines])


def _headerless_rows(rows: Sequence[Sequence[str]]) -> tuple[list[Row], tuple[Problem, ...]]:
    rows = [
        cells for cells in rows if len(cells) > 1 and all(map(_is_plausible, cells)) and any(map(_is_telling, cells))
    ]
    if rows and all(_fits_common_columns(cells) for cells in rows):
        return [dict(zip(COMMON_COLUMNS, cells, strict=True)) for cells in rows], ()
    if not rows:
        return [], ()
    note = Problem(
        source="nvidia-smi",
        kind="garbled",
        message="there is no header line, so most columns are unknown",
        hint="leave out `noheader`",
        vendor=Vendor.NVIDIA,
    )
    return [_self_naming(cells) for cells in rows], (note,)


def _fits_common_columns(cells: Sequence[str]) -> bool:
    return len(cells) == len(COMMON_COLUMNS) and whole(cells[0]) is not None and quantity(cells[1]) is None


def _self_naming(cells: Sequence[str]) -> Row:
    row: dict[str, str] = {}
    for cell in cells:
        for column, pattern in (("uuid", _UUID), ("pci.bus_id", _BUS_ID)):
            if pattern.fullmatch(cell):
                row[column] = cell
        if _PRODUCT.search(cell):
            row["name"] = cell
    return row


def _is_telling(cell: str) -> bool:
    return bool(_SENTINEL.fullmatch(cell) or _UUID.fullmatch(cell) or _BUS_ID.fullmatch(cell) or _PRODUCT.search(cell))


def _is_plausible(cell: str) -> bool:
    return _is_telling(cell) or quantity(cell) is not None


def _has_header(text: str, known: frozenset[str]) -> bool:
    lines = _lines(text)
    return bool(lines) and bool(known.intersection(_columns(lines[0])))


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if (line.strip() and "," in line) or line.strip() in _GPU_COLUMNS]


def _columns(line: str) -> list[str]:
    """Names without their units: `memory.total [MiB]` is `memory.total`."""
    return [cell.partition(" [")[0] for cell in _cells(line)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _fold_name(header: Sequence[str], cells: list[str]) -> list[str]:
    """A process's name may hold commas: the cells too many belong to it."""
    extra = len(cells) - len(header)
    place = next((header.index(name) for name in ("process_name", "name") if name in header), None)
    if extra <= 0 or place is None:
        return cells
    return [*cells[:place], ", ".join(cells[place : place + extra + 1]), *cells[place + extra + 1 :]]


def _bus_id(raw: str | None) -> str | None:
    return normalize_bus_id(raw) if raw and _BUS_ID.fullmatch(raw) else None
