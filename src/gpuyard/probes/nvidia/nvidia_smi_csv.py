"""Parse the CSV of `nvidia-smi --query-gpu=…` and of `--query-compute-apps=…`, with any columns.

The header says which column is which. Without one (`noheader`) figures are read only in the commonest order of seven
columns, and only where every cell fits its column: temperature and utilisation stay unknown where the two could be
swapped. A problem says how the columns were interpreted. In any other order only self-describing cells (a UUID, a bus
id, a product name) are read, and a problem says what to do.
In the output of a loop (`-l 1`) the last row of each card counts. All identifying columns together tell cards apart:
in anonymised outputs UUIDs are equal.

A row of a process without a header is read where a UUID, a bus id or a size in MiB makes it plain that it is one of
these: the first whole number is the process then, and a number without a unit unknown. A row without a process id is
left out, and a problem says so; a card with no other rows has unknown processes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from gpuyard.core.snapshot import Device, Problem, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.parse_numbers import celsius, megabytes, number, percent, quantity, watts, whole, words
from gpuyard.probes.common.probe_calls import as_problem
from gpuyard.probes.common.process_info import larger_mb, one_per_pid
from gpuyard.probes.nvidia.lost_cards import fault_in, lost_devices, only_lost_devices, own_words

_COMMON_COLUMNS = (
    "index", "name", "temperature.gpu", "memory.used", "memory.total", "utilization.gpu", "power.draw",
)  # fmt: skip
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Fa-f-]{8,}(?:/\d+/\d+)?")
_SENTINEL = re.compile(r"\[.*\]|N/A|ERR!", re.IGNORECASE)
_GPU_COLUMNS = frozenset({*_COMMON_COLUMNS, "uuid", "gpu_uuid", "gpu_name", "pci.bus_id", "memory.free", "power.limit"})
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
_MIB = re.compile(r"\d+ MiB", re.ASCII)
_APP_COLUMNS = (
    ("gpu_uuid", _UUID.fullmatch),
    ("gpu_bus_id", pci_bus_id),
    ("used_memory", _MIB.fullmatch),
    ("pid", re.compile(r"[1-9]\d{0,9}", re.ASCII).fullmatch),
    ("timestamp", re.compile(r"\d{4}/\d\d/\d\d [\d:.]+", re.ASCII).fullmatch),
    # A product name has a space and this capitalisation: `nvidia-smi` and its like are processes.
    ("gpu_name", re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|TITAN|GRID) \S.*").fullmatch),
)

Row = Mapping[str, str]


def parse_csv(text: str) -> Reading:
    """Parse the cards of `--query-gpu`."""
    lost = lost_devices(text)
    lines = _csv_lines(text)
    header = _columns(lines[0]) if lines else []
    if _GPU_COLUMNS.intersection(header):
        cells = [_cells(line) for line in lines[1:] if _columns(line) != header]
        rows: list[Row] = [dict(zip(header, row, strict=True)) for row in cells if len(row) == len(header)]
        problems: tuple[Problem, ...] = ()
    else:
        rows, problems = _headerless_rows([_cells(line) for line in lines])
        if not rows and not lost:
            return only_lost_devices(text, "CSV that `nvidia-smi --query-gpu`")
    devices = [_read_card(place, row) for place, row in enumerate(_last_of_each(rows))]
    return Reading(devices=with_distinct_ids([*devices, *lost]), problems=problems)


def _csv_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if (line.strip() and "," in line) or line.strip() in _GPU_COLUMNS]


def _columns(line: str) -> list[str]:
    """Return the column names without units: `memory.total [MiB]` is `memory.total`."""
    return [cell.partition(" [")[0] for cell in _cells(line)]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]


def _without_header(message: str = "there is no header line, so most columns are unknown") -> Problem:
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


def _headerless_rows(rows: Sequence[Sequence[str]]) -> tuple[list[Row], tuple[Problem, ...]]:
    rows = [
        cells
        for cells in rows
        if len(cells) > 1
        and any(map(_is_telling, cells))
        and all(_is_telling(cell) or quantity(cell) is not None for cell in cells)
    ]
    if not rows or not all(map(_fits_common_columns, rows)):
        named = [{column: cell for cell in cells if (column := _column_of(cell))} for cells in rows]
        return [*named], (_without_header(),) if rows else ()
    found = [dict(zip(_COMMON_COLUMNS, cells, strict=True)) for cells in rows]
    message = f"there is no header line: the columns are taken for {', '.join(_COMMON_COLUMNS)}"
    if all(_is_temperature(row["utilization.gpu"]) and _is_share(row["temperature.gpu"]) for row in found):
        message += "; temperature and utilization could be swapped and stay unknown"
        found = [{column: cell for column, cell in row.items() if column not in _SWAPPABLE} for row in found]
    return [*found], (_without_header(message),)


def _fits_common_columns(cells: Sequence[str]) -> bool:
    """Return whether each cell matches the format of its column; an empty cell matches any column."""
    if len(cells) != len(_COMMON_COLUMNS):
        return False
    row = dict(zip(_COMMON_COLUMNS, cells, strict=True))
    used, total = megabytes(row["memory.used"]), megabytes(row["memory.total"])
    sizes, draw = (row["memory.used"], row["memory.total"]), row["power.draw"]
    return bool(
        _COUNT.fullmatch(row["index"])
        and _PRODUCT.search(row["name"])
        and _is_temperature(row["temperature.gpu"])
        and _is_share(row["utilization.gpu"])
        and all(_SENTINEL.fullmatch(size) or _SIZE.fullmatch(size) for size in sizes)
        and (used is None or total is None or used <= total)
        and (_SENTINEL.fullmatch(draw) or _POWER.fullmatch(draw))
    )


def _is_temperature(cell: str) -> bool:
    return bool(_SENTINEL.fullmatch(cell) or (_COUNT.fullmatch(cell) and int(cell) <= _HOTTEST_C))


def _is_share(cell: str) -> bool:
    return bool(_SENTINEL.fullmatch(cell) or (_SHARE.fullmatch(cell) and (number(cell) or 0) <= 100))


def _column_of(cell: str) -> str | None:
    """Return the column that the content of a cell shows, or None."""
    columns_by_content = (("uuid", _UUID.fullmatch), ("pci.bus_id", pci_bus_id), ("name", _PRODUCT.search))
    return next((column for column, fits in columns_by_content if fits(cell)), None)


def _is_telling(cell: str) -> bool:
    return bool(_SENTINEL.fullmatch(cell) or _column_of(cell))


def parse_apps(text: str) -> Reading:
    """Return the cards that processes run on; only their ids and processes are known."""
    lost = lost_devices(text)
    lines = _csv_lines(text)
    header = _columns(lines[0]) if lines else []
    # Columns with a dot are those of a list of cards.
    if "pid" in header and not any("." in column for column in header):
        rows = [_app_row(header, _cells(line)) for line in lines[1:] if _columns(line) != header]
    else:
        rows = _headerless_apps([_cells(line) for line in lines])
        if not rows:
            return only_lost_devices(text, "CSV that `nvidia-smi --query-compute-apps`")
    problems = [_without_header()] if any("unknown" in row for row in rows) else []
    nameless = sum(whole(row.get("pid")) is None for row in rows)
    if nameless:
        message = f"{nameless} of {len(rows)} rows of `--query-compute-apps` have no process id and are left out"
        problems.append(as_problem(ProbeGarbled("nvidia-smi", message), Vendor.NVIDIA))
    return Reading(devices=with_distinct_ids([*_cards_of_apps(rows), *lost]), problems=tuple(problems))


def _app_row(header: Sequence[str], cells: list[str]) -> Row:
    """Return the cells by column. Surplus cells belong to the process name, which may contain commas."""
    place = next((header.index(name) for name in ("process_name", "name") if name in header), None)
    if place is not None and len(cells) > len(header):
        end = place + 1 + len(cells) - len(header)
        cells = [*cells[:place], ", ".join(cells[place:end]), *cells[end:]]
    return dict(zip(header, cells, strict=False))


def _headerless_apps(lines: Sequence[Sequence[str]]) -> list[Row]:
    """Return a row per line; no rows if a line describes a card, or none certainly describes a process."""
    has_units = any(_MIB.fullmatch(cell) for cells in lines for cell in cells)
    rows = [_recognised(cells, has_units=has_units) for cells in lines]
    known = [row for row in rows if row is not None]
    return known if len(known) == len(rows) and any("pid" in row for row in known) else []


def _recognised(cells: Sequence[str], *, has_units: bool) -> Row | None:
    """Return the columns that can be recognised by their content, or None if the row describes a card.

    The pid is set only if it is certain: after a blank cell, a number without a unit may be the memory.
    """
    row: dict[str, str] = {}
    may_be_memory = False
    for cell in cells:
        named = next((column for column, fits in _APP_COLUMNS if column not in row and fits(cell)), None)
        figure = quantity(cell)
        if named and not (named == "pid" and may_be_memory):
            row[named] = cell
        elif figure and figure[1]:
            return None
        elif figure:
            row["unknown"] = cell
        elif not cell or _SENTINEL.fullmatch(cell):
            may_be_memory = not has_units
        else:
            row["process_name"] = f"{row['process_name']}, {cell}" if "process_name" in row else cell
    if row.keys().isdisjoint({"gpu_uuid", "gpu_bus_id", "used_memory"}):
        row.pop("pid", None)
    return row


def _cards_of_apps(rows: Sequence[Row]) -> list[Device]:
    names: dict[str, Row] = {}
    processes: dict[str, list[Process]] = {}
    for row in rows:
        pid = whole(row.get("pid"))
        card = words(row.get("gpu_uuid")) or pci_bus_id(row.get("gpu_bus_id"))
        if pid is not None:
            memory_mb = megabytes(row.get("used_gpu_memory", row.get("used_memory")))
            name = words(row.get("process_name", row.get("name")))
            processes.setdefault(card or "nvidia-0", []).append(Process(pid=pid, memory_mb=memory_mb, name=name))
        if pid is not None or card:
            names.setdefault(card or "nvidia-0", row)
    return [
        Device(
            id=card,
            vendor=Vendor.NVIDIA,
            name=words(row.get("gpu_name")),
            pci_bus_id=pci_bus_id(row.get("gpu_bus_id")),
            processes=one_per_pid(processes[card], larger_mb) if card in processes else None,
        )
        for card, row in names.items()
    ]
