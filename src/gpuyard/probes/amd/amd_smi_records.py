"""Convert any output of `amd-smi` into records of one shape: that of its JSON.

Rules:
- `monitor` prints one flat row for each card, in JSON, CSV and tables; each figure is stored where `metric` has it.
- Rows of one card's partitions (XCP) repeat its figures: the first counts. If a card is repeated with another
  time, or a table is repeated, the last counts.
- The CSV of `monitor` has no units: without options it gives memory in GB with a fraction, with them in whole MB.
- Plain `amd-smi` (ROCm 7) prints a box of two lines for each card, and one of all processes. It cuts off the beginning
  of a long name, also within a word: a word that is certainly cut is completed, or left out if it is unknown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from gpuyard.probes.amd.amd_smi_processes import (
    ProcessLists,
    is_process_header,
    processes_of_box,
    processes_of_csv,
    processes_of_table,
)
from gpuyard.probes.amd.tool_output import cells, json_documents, table_rows
from gpuyard.probes.common.device_ids import pci_bus_id

Record = dict[str, Any]

_TEXT_LINE = re.compile(r"([ \t]*)([A-Z][A-Z0-9_ ]*):[ \t]*(.*)")
_FLAT = {
    "power_usage": ("power", "socket_power"),
    "power": ("power", "socket_power"),
    "max_power": ("limit", "socket_power"),
    "pwr_cap": ("limit", "socket_power"),
    "hotspot_temperature": ("temperature", "hotspot"),
    "gpu_temp": ("temperature", "hotspot"),
    "gpu_t": ("temperature", "hotspot"),
    "gfx": ("usage", "gfx_activity"),
    "gfx_util": ("usage", "gfx_activity"),
    "gfx%": ("usage", "gfx_activity"),
    "vram_used": ("mem_usage", "used_vram"),
    "vram_free": ("mem_usage", "free_vram"),
    "vram_total": ("mem_usage", "total_vram"),
}
_GB = re.compile(r"\d+\.\d+", re.ASCII)
_CUT = "..."
_WORDS_OF_NAMES = ("Graphics", "Instinct", "Radeon", "PRO")


def read_records(text: str) -> list[Record] | None:
    """Return the records, or None if the text has none of the known forms."""
    records = _json_records(text)
    if records is not None:
        return records
    return _text_records(text) or _table_records(text) or _csv_records(text) or _box_records(text)


def _json_records(text: str) -> list[Record] | None:
    """Return the records of a bare list, of the list under "gpu_data" (ROCm 7), or of one record."""
    for document in json_documents(text):
        listed = document.get("gpu_data", [document]) if isinstance(document, dict) else document
        if isinstance(listed, list):
            records = [record for record in listed if isinstance(record, dict) and "gpu" in record]
            if records or not listed:
                return _from_rows(records) if any(_is_flat(record) for record in records) else records
    return None


def _is_flat(record: Record) -> bool:
    """Return whether the record is a flat row of `monitor`, which shares only the key "power" with `metric`."""
    return any(key in _FLAT for key in record if key != "power")


def _text_records(text: str) -> list[Record] | None:
    """Parse indented text: "GPU: 0" starts a record, a key without a value a section. Older releases indent less."""
    records: list[Record] = []
    parts: list[tuple[int, Record]] = []
    for match in filter(None, map(_TEXT_LINE.fullmatch, text.splitlines())):
        indent, key, value = len(match[1]), match[2].lower(), match[3].strip()
        if key in {"gpu", "cpu"} and value.isdecimal():
            parts = [(-1, {key: value})]
            records += [parts[0][1]] if key == "gpu" else []
        elif parts:
            parts = [part for part in parts if part[0] < indent]
            parts += _add(parts[-1][1], indent, key, value)
    return [record for record in records if len(record) > 1] or None


def _add(part: Record, indent: int, key: str, value: str) -> list[tuple[int, Record]]:
    """Store a value, or a new section (which is returned), under its key. Only process sections are repeated."""
    if value:
        part[key] = value
        return []
    inner: Record = {}
    if key == "process_info":
        part.setdefault("process_list", []).append(inner)
    else:
        part[key] = inner
    return [(indent, inner)]


def _table_records(text: str) -> list[Record] | None:
    """Parse the last table of `monitor`, and the list of processes below it."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _is_monitor_header(_titles(line))]
    lines = lines[starts[-1] :] if starts else lines
    split = max((number for number, line in enumerate(lines) if is_process_header(_titles(line))), default=None)
    lists = {} if split is None else processes_of_table(_titles(lines[split]), lines[split + 1 :])
    if not starts:
        return [{"gpu": gpu, "process_list": listed} for gpu, listed in lists.items()] or None
    rows = table_rows(_titles(lines[0]), lines[1:split])
    return _with_processes(_from_rows(row for row, _ in rows if "gpu" in row), lists) or None


def _titles(line: str) -> list[str]:
    return [title.lower() for title in cells(line)] if line.isupper() else []


def _csv_records(text: str) -> list[Record] | None:
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _is_monitor_header(line.strip().split(","))]
    if not starts:
        return None
    header = lines[starts[-1]].strip().split(",")
    lines = lines[starts[-1] + 1 :]
    rows = [line.strip().split(",") for line in takewhile(lambda line: line[:1].isdecimal(), lines)]
    found = _from_rows(_with_units(dict(zip(header, row, strict=True))) for row in rows if len(row) == len(header))
    return _with_processes(found, processes_of_csv(lines[len(rows) :])) or None


def _with_units(row: Mapping[str, str]) -> Record:
    return {
        key: f"{value} GB" if key.startswith("vram") and _GB.fullmatch(value) else value for key, value in row.items()
    }


def _is_monitor_header(titles: Sequence[str]) -> bool:
    """Return whether the line is the header of the cards; the list of processes has another."""
    return "gpu" in titles[:2] and "pid" not in titles and not {*_FLAT, "vram_usage"}.isdisjoint(titles)


def _from_rows(rows: Iterable[Record]) -> list[Record]:
    latest: dict[str, Record] = {}
    for row in rows:
        known = latest.get(str(row["gpu"]))
        if known is None or row.get("timestamp") != known.get("timestamp"):
            latest[str(row["gpu"])] = row
    return [_in_parts(row) for row in latest.values()]


def _in_parts(row: Record) -> Record:
    parts: dict[str, Record] = {}
    for key, (part, name) in _FLAT.items():
        if key in row:
            parts.setdefault(part, {})[name] = row[key]
    if isinstance(row.get("vram_usage"), str):
        used, total = _used_and_total(row["vram_usage"])
        parts["mem_usage"] = {"used_vram": used, "total_vram": total}
    return {**{key: value for key, value in row.items() if key not in _FLAT}, **parts}


def _used_and_total(cell: str) -> tuple[str, str]:
    """Split "280/327 W" or "2.5/ 16.0 GB"; either part may be "N/A", or the whole cell."""
    used, slash, total = cell.rpartition("/")
    return (f"{used} {' '.join(total.split()[1:])}", total) if slash else ("N/A", "N/A")


def _box_records(text: str) -> list[Record] | None:
    boxes = [line.strip().strip("|").strip() for line in text.splitlines() if line.strip().startswith(("|", "+"))]
    start = next((number for number, line in enumerate(boxes) if re.search(r"GPU-Name *\| *Mem-Uti", line)), None)
    if start is None:
        return None
    records: list[Record] = []
    first: Record = {}
    for left, right in (line.split("|") for line in boxes[start + 1 :] if line.count("|") == 1):
        words, figures = left.split(), cells(right)
        if not words or len(figures) < 2:
            continue
        if pci_bus_id(words[0]):
            first = _first_line(words, figures)
        elif first and words[0].isdecimal():
            records.append({"gpu": words[0], **first, **_second_line(figures)})
            first = {}
    return _with_processes(records, processes_of_box(boxes[start:], [record["gpu"] for record in records])) or None


def _first_line(words: Sequence[str], figures: Sequence[str]) -> Record:
    draw, cap = _used_and_total(figures[-1])
    return {
        "bdf": words[0],
        "asic": {"market_name": _uncut(" ".join(words[1:]))},
        "temperature": {"hotspot": figures[1]},
        "power": {"socket_power": draw},
        "limit": {"socket_power": cap},
    }


def _second_line(figures: Sequence[str]) -> Record:
    used, total = _used_and_total(figures[-1])
    return {"usage": {"gfx_activity": figures[0]}, "mem_usage": {"used_vram": used, "total_vram": total}}


def _uncut(name: str) -> str:
    """Return the name with a cut first word completed if possible: "...adeon AI PRO R9700S" is "Radeon"."""
    first, space, rest = name.removeprefix(_CUT).partition(" ")
    if not name.startswith(_CUT):
        return name
    whole = [word for word in _WORDS_OF_NAMES if len(first) > 1 and word.endswith(first)]
    if whole:
        return f"{whole[0]}{space}{rest}"
    return rest if first[:1].islower() else f"{first}{space}{rest}"


def _with_processes(records: list[Record], lists: ProcessLists) -> list[Record]:
    return [
        {**record, "process_list": lists[str(record["gpu"])]} if str(record["gpu"]) in lists else record
        for record in records
    ]
