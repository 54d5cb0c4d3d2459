"""Parse the CSV of `nvidia-smi --query-gpu=…`, with any columns.

The header says which column is which. Without one (`noheader`) figures are read only in the commonest order of seven
columns, and only where every cell fits its column: temperature and utilisation stay unknown where the two could be
swapped. A problem says how the columns were interpreted. In any other order only self-describing cells (a UUID, a bus
id, a product name) are read, and a problem says what to do.
In the output of a loop (`-l 1`) the last row of each card counts. All identifying columns together tell cards apart:
in anonymised outputs UUIDs are equal.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from gpuyard.core.snapshot import Device, Problem, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.error_to_problem import as_problem
from gpuyard.probes.common.parse_numbers import celsius, megabytes, number, percent, quantity, watts, whole, words
from gpuyard.probes.nvidia.lost_cards import fault_in, lost_devices, own_words, raise_refusal, says_no_devices

COMMON_COLUMNS = (
    "index", "name", "temperature.gpu", "memory.used", "memory.total", "utilization.gpu", "power.draw",
)  # fmt: skip
UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Fa-f-]{8,}(?:/\d+/\d+)?")
SENTINEL = re.compile(r"\[.*\]|N/A|ERR!", re.IGNORECASE)
_GPU_COLUMNS = frozenset({*COMMON_COLUMNS, "uuid", "gpu_uuid", "gpu_name", "pci.bus_id", "memory.free", "power.limit"})
_IDENTITY = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id", "serial", "gpu_serial")
# How `nvidia-smi` prints the columns: whole numbers, but power with two decimals; units only without `nounits`.
_COUNT = re.compile(r"\d{1,4}", re.ASCII)
_SIZE = re.compile(r"\d{1,9}(?: MiB)?", re.ASCII)
_SHARE = re.compile(r"\d{1,3}(?:\.\d+)?(?: %)?", re.ASCII)
_POWER = re.compile(r"\d{1,4}\.\d+(?: W)?", re.ASCII)
_HOTTEST_C = 150
_SWAPPABLE = frozenset({"temperature.gpu", "utilization.gpu"})
_ADD_A_HEADER = "leave out `noheader`, or put the names of the queried columns on a first line"
_PRODUCT = re.compile(r"\b(?:NVIDIA|GeForce|Tesla|Quadro|TITAN|RTX|GTX|GRID)\b", re.IGNORECASE)

Row = Mapping[str, str]


def parse_csv(text: str) -> Reading:
    """Parse the cards of `--query-gpu`."""
    lost = lost_devices(text)
    lines = csv_lines(text)
    header = columns(lines[0]) if lines else []
    rows, problems = _gpu_rows(header, lines)
    if not rows and not lost and not says_no_devices(text) and not _GPU_COLUMNS.intersection(header):
        raise_refusal(text)
        raise ProbeGarbled("nvidia-smi", "this is not the CSV that `nvidia-smi --query-gpu` prints")
    devices = [_read_card(place, row) for place, row in enumerate(_last_of_each(rows))]
    return Reading(devices=with_distinct_ids([*devices, *lost]), problems=problems)


def csv_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if (line.strip() and "," in line) or line.strip() in _GPU_COLUMNS]


def columns(line: str) -> list[str]:
    """Return the column names without units: `memory.total [MiB]` is `memory.total`."""
    return [cell.partition(" [")[0] for cell in cells_of(line)]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def without_header(message: str = "there is no header line, so most columns are unknown") -> Problem:
    return as_problem(ProbeGarbled("nvidia-smi", message, hint=_ADD_A_HEADER), Vendor.NVIDIA)


def _last_of_each(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each card, in order of appearance. A row without an identity is a card of its own."""
    latest: dict[object, Row] = {}
    for place, row in enumerate(rows):
        key = tuple((column, row[column]) for column in _IDENTITY if words(row.get(column)))
        latest[key or place] = row
    return list(latest.values())


def _read_card(place: int, row: Row) -> Device:
    index = whole(row.get("index"))
    index = place if index is None else index
    bus_id = pci_bus_id(row.get("pci.bus_id", row.get("gpu_bus_id")))
    return Device(
        id=own_words(row.get("uuid", row.get("gpu_uuid"))) or bus_id or f"nvidia-{index}",
        vendor=Vendor.NVIDIA,
        index=index,
        name=own_words(row.get("name", row.get("gpu_name"))),
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


def _first_watts(row: Row, *names: str) -> float | None:
    return next((value for name in names if (value := watts(row.get(name))) is not None), None)


def _gpu_rows(header: Sequence[str], lines: Sequence[str]) -> tuple[list[Row], tuple[Problem, ...]]:
    if _GPU_COLUMNS.intersection(header):
        rows = [cells_of(line) for line in lines[1:] if columns(line) != header]
        return [dict(zip(header, cells, strict=True)) for cells in rows if len(cells) == len(header)], ()
    return _headerless_rows([cells_of(line) for line in lines])


def _headerless_rows(rows: Sequence[Sequence[str]]) -> tuple[list[Row], tuple[Problem, ...]]:
    rows = [
        cells for cells in rows if len(cells) > 1 and all(map(_is_plausible, cells)) and any(map(_is_telling, cells))
    ]
    if rows and all(map(_fits_common_columns, rows)):
        return _common_rows(rows)
    return [_self_naming(cells) for cells in rows], (without_header(),) if rows else ()


def _common_rows(rows: Sequence[Sequence[str]]) -> tuple[list[Row], tuple[Problem, ...]]:
    found = [dict(zip(COMMON_COLUMNS, cells, strict=True)) for cells in rows]
    message = f"there is no header line: the columns are taken for {', '.join(COMMON_COLUMNS)}"
    if all(_is_temperature(row["utilization.gpu"]) and _is_share(row["temperature.gpu"]) for row in found):
        message += "; temperature and utilization could be swapped and stay unknown"
        found = [{column: cell for column, cell in row.items() if column not in _SWAPPABLE} for row in found]
    return [*found], (without_header(message),)


def _fits_common_columns(cells: Sequence[str]) -> bool:
    """Return whether each cell matches the format of its column; an empty cell matches any column."""
    if len(cells) != len(COMMON_COLUMNS):
        return False
    row = dict(zip(COMMON_COLUMNS, cells, strict=True))
    used, total = megabytes(row["memory.used"]), megabytes(row["memory.total"])
    return bool(
        _COUNT.fullmatch(row["index"])
        and _PRODUCT.search(row["name"])
        and _is_temperature(row["temperature.gpu"])
        and _is_share(row["utilization.gpu"])
        and all(_says_nothing(row[name]) or _SIZE.fullmatch(row[name]) for name in ("memory.used", "memory.total"))
        and (used is None or total is None or used <= total)
        and (_says_nothing(row["power.draw"]) or _POWER.fullmatch(row["power.draw"]))
    )


def _is_temperature(cell: str) -> bool:
    return _says_nothing(cell) or bool(_COUNT.fullmatch(cell) and int(cell) <= _HOTTEST_C)


def _is_share(cell: str) -> bool:
    return _says_nothing(cell) or bool(_SHARE.fullmatch(cell) and (number(cell) or 0) <= 100)


def _says_nothing(cell: str) -> bool:
    return SENTINEL.fullmatch(cell) is not None


def _self_naming(cells: Sequence[str]) -> Row:
    row: dict[str, str] = {}
    for cell in cells:
        if UUID.fullmatch(cell):
            row["uuid"] = cell
        elif pci_bus_id(cell):
            row["pci.bus_id"] = cell
        elif _PRODUCT.search(cell):
            row["name"] = cell
    return row


def _is_telling(cell: str) -> bool:
    return bool(SENTINEL.fullmatch(cell) or UUID.fullmatch(cell) or pci_bus_id(cell) or _PRODUCT.search(cell))


def _is_plausible(cell: str) -> bool:
    return _is_telling(cell) or quantity(cell) is not None
