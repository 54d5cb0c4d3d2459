"""Convert any output of `amd-smi` into records of one shape: that of its JSON.

Rules:
- `monitor` prints one flat row for each card, in JSON, CSV and tables; each figure is stored where `metric` has it.
- Rows of one card's partitions (XCP) repeat its figures: the first counts. If a card is repeated with another
  time, or a table is repeated, the last counts.
- The CSV of `monitor` has no units: without options it gives memory in GB with a fraction, with them in whole MB.
- Plain `amd-smi` (ROCm 7) prints a box of two lines for each card, and one of all processes. It cuts off the beginning
  of a long name, also within a word: a word that is certainly cut is completed, or left out if it is unknown.

Rules for the lists of processes below the cards, of `monitor -q` and of the box:
- A card without processes has an empty list. A card is left out if one of its rows cannot be read, or if the
  list is truncated: its processes are unknown.
- A name may contain spaces, so the columns after it are counted from the end of the row.
- In a list with times (`monitor -w`) the last time of each card counts.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from gpuyard.probes.amd.card_fields import Record
from gpuyard.probes.amd.tool_output import cells, csv_rows, json_documents, table_rows
from gpuyard.probes.common.device_ids import pci_bus_id

# Processes by the number of their card, in the shape of the JSON of `amd-smi process`.
_ProcessLists = dict[str, list[Record]]
# The number of a card, the time if the list has times, and the fields of a row by title.
_ProcessRow = tuple[str, str, dict[str, str]]

_TEXT_LINE = re.compile(r"([ \t]*)([A-Z][A-Z0-9_ ]*):[ \t]*(.*)")
# The place of a figure in a record, for each of its names in a flat row.
_FLAT = {
    **dict.fromkeys(("power_usage", "power"), ("power", "socket_power")),
    **dict.fromkeys(("max_power", "pwr_cap"), ("limit", "socket_power")),
    **dict.fromkeys(("hotspot_temperature", "gpu_temp", "gpu_t"), ("temperature", "hotspot")),
    **dict.fromkeys(("gfx", "gfx_util", "gfx%"), ("usage", "gfx_activity")),
    **{f"vram_{figure}": ("mem_usage", f"{figure}_vram") for figure in ("used", "free", "total")},
}
_GB = re.compile(r"\d+\.\d+", re.ASCII)
_CUT = "..."
_WORDS_OF_NAMES = ("Graphics", "Instinct", "Radeon", "PRO")
_BOX_TITLES = ["GPU", "PID", "Process", "Name"]


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
                # A flat row of `monitor` shares only the key "power" with `metric`.
                is_flat = any(key in _FLAT for record in records for key in record if key != "power")
                return _from_rows(records) if is_flat else records
    return None


def _text_records(text: str) -> list[Record] | None:
    """Parse indented text: "GPU: 0" starts a record, a key without a value a section. Older releases indent less."""
    records: list[Record] = []
    parts: list[tuple[int, Record]] = []
    for match in filter(None, map(_TEXT_LINE.fullmatch, text.splitlines())):
        indent, key, value = len(match[1]), match[2].lower(), match[3].strip()
        if key in {"gpu", "cpu"} and value.isdecimal():
            parts = [(-1, {key: value})]
            records += [parts[0][1]] if key == "gpu" else []
            continue
        parts = [part for part in parts if part[0] < indent]
        if parts and value:
            parts[-1][1][key] = value
        elif parts:
            inner: Record = {}
            if key == "process_info":  # the only section that is repeated
                parts[-1][1].setdefault("process_list", []).append(inner)
            else:
                parts[-1][1][key] = inner
            parts.append((indent, inner))
    return [record for record in records if len(record) > 1] or None


def _table_records(text: str) -> list[Record] | None:
    """Parse the last table of `monitor`, and the list of processes below it."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _is_monitor_header(_titles(line))]
    lines = lines[starts[-1] :] if starts else lines
    columns = ([title for title in _titles(line) if title != "timestamp"] for line in lines)
    split = max((number for number, titles in enumerate(columns) if titles[:3] == ["gpu", "name", "pid"]), default=None)
    lists = {} if split is None else _processes_of_table(_titles(lines[split]), lines[split + 1 :])
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
    found = []
    for row in rows:
        if len(row) == len(header):
            record: Record = dict(zip(header, row, strict=True))
            in_gb = [key for key in header if key.startswith("vram") and _GB.fullmatch(record[key])]
            found.append(record | {key: f"{record[key]} GB" for key in in_gb})
    return _with_processes(_from_rows(found), _processes_of_csv(lines[len(rows) :])) or None


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
        parts["mem_usage"] = dict(zip(("used_vram", "total_vram"), _used_and_total(row["vram_usage"]), strict=True))
    return {**{key: value for key, value in row.items() if key not in _FLAT}, **parts}


def _used_and_total(cell: str) -> tuple[str, str]:
    """Split "280/327 W" or "2.5/ 16.0 GB"; either part may be "N/A", and "14 W" has no total."""
    used, slash, total = cell.rpartition("/")
    return (f"{used} {' '.join(total.split()[1:])}", total) if slash else (cell, "N/A")


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
            draw, cap = _used_and_total(figures[-1])
            first = {
                "bdf": words[0],
                "asic": {"market_name": _uncut(" ".join(words[1:]))},
                "temperature": {"hotspot": figures[1]},
                "power": {"socket_power": draw},
                "limit": {"socket_power": cap},
            }
        elif first and words[0].isdecimal():
            memory = dict(zip(("used_vram", "total_vram"), _used_and_total(figures[-1]), strict=True))
            records.append({"gpu": words[0], **first, "usage": {"gfx_activity": figures[0]}, "mem_usage": memory})
            first = {}
    return _with_processes(records, _processes_of_box(boxes[start:], [record["gpu"] for record in records])) or None


def _uncut(name: str) -> str:
    """Return the name with a cut first word completed if possible: "...adeon AI PRO R9700S" is "Radeon"."""
    first, space, rest = name.removeprefix(_CUT).partition(" ")
    if not name.startswith(_CUT):
        return name
    whole = [word for word in _WORDS_OF_NAMES if len(first) > 1 and word.endswith(first)]
    if whole:
        return f"{whole[0]}{space}{rest}"
    return rest if first[:1].islower() else f"{first}{space}{rest}"


def _with_processes(records: list[Record], lists: _ProcessLists) -> list[Record]:
    return [
        {**record, "process_list": lists[str(record["gpu"])]} if str(record["gpu"]) in lists else record
        for record in records
    ]


def _processes_of_table(titles: Sequence[str], lines: Iterable[str]) -> _ProcessLists:
    gpu_place, behind_name = titles.index("gpu"), titles[titles.index("pid") :]
    rows: list[_ProcessRow] = []
    for line in lines:
        words = line.split(maxsplit=gpu_place + 1)
        if len(words) <= gpu_place or not words[gpu_place].isdecimal():
            break
        row = cells(words[gpu_place + 1]) if len(words) > gpu_place + 1 else []
        fields: dict[str, str] = {}
        if len(row) > len(behind_name):
            fields = dict(zip(behind_name, row[-len(behind_name) :], strict=True))
            fields["name"] = " ".join(row[: -len(behind_name)])
        rows.append((words[gpu_place], words[0] if gpu_place else "", fields))
    return _process_lists(rows)


def _processes_of_csv(lines: Iterable[str]) -> _ProcessLists:
    """Read the list below the cards in the CSV of `monitor -q`, which has a header of its own."""
    rows: list[_ProcessRow] = []
    titles: list[str] = []
    for row in csv_rows(lines):
        if "gpu" in row and not {"pid", "process_info"}.isdisjoint(row):
            titles, rows = row, []
        elif titles:
            gpu_place = titles.index("gpu")
            if len(row) <= gpu_place:
                return {}
            fields = dict(zip(titles, row, strict=True)) if len(row) == len(titles) else {}
            rows.append((row[gpu_place], row[0] if gpu_place else "", fields))
    return _process_lists(rows)


def _processes_of_box(boxes: Sequence[str], gpus: Iterable[str]) -> _ProcessLists:
    """Parse the list of all cards at the end of the box; cards without processes are not in it."""
    start = next((number for number, line in enumerate(boxes) if cells(line)[:4] == _BOX_TITLES), len(boxes))
    end = next((number for number in range(start, len(boxes)) if boxes[number].startswith("+")), None)
    if end is None:
        return {}
    rows: list[_ProcessRow] = []
    titles = [title.lower() for title in cells(boxes[start])[4:]]
    for row in (cells(line) for line in boxes[start + 1 : end]):
        if row and row[0].isdecimal():
            fields = {"pid": row[1] if len(row) > 1 else ""}
            if len(row) >= len(titles) + 3:
                fields |= zip(titles, row[len(row) - len(titles) :], strict=True)
                fields["name"] = " ".join(row[2 : len(row) - len(titles)])
            rows.append((row[0], "", fields))
    return _process_lists(rows, gpus)


def _process_lists(rows: Iterable[_ProcessRow], gpus: Iterable[str] = ()) -> _ProcessLists:
    """Return the processes of each card, without the cards that have an unreadable row."""
    found: dict[str, dict[str, Record]] = {gpu: {} for gpu in gpus}
    times: dict[str, str] = {}
    unreadable: set[str] = set()
    for gpu, time, fields in rows:
        if times.setdefault(gpu, time) != time:
            times[gpu], found[gpu] = time, {}
            unreadable.discard(gpu)
        processes = found.setdefault(gpu, {})
        pid = fields.get("pid", "")
        # A card without processes has "N/A" in each column, or a text.
        says_none = fields.get("process_info", "").lower().startswith("no running process")
        says_none |= pid == "N/A" and fields.get("name") == "N/A"
        if pid.isdecimal():
            process: Record = {key: fields.get(key) for key in ("pid", "name")}
            process["memory_usage"] = {key: fields.get(key) for key in ("gtt_mem", "cpu_mem", "vram_mem")}
            process["mem_usage"] = fields.get("mem_usage", fields.get("mem_usg"))
            processes.setdefault(pid, process)
        elif not says_none:
            unreadable.add(gpu)
    return {gpu: [*processes.values()] for gpu, processes in found.items() if gpu not in unreadable}
