"""`amd-smi`, AMD's tool since ROCm 5.6: `list`, `static`, `metric`, `process` and `monitor`, in JSON, text and tables.

Rules:
- Every output becomes records of one shape, that of the JSON; a part that a release leaves out stays unknown.
- "MB" are of 1,048,576 bytes. Temperature is the edge sensor's or, where a card has none (MI300), the hotspot's.
- The power limit is the cap in force or, where that is not printed, the highest one that may be set. It is read with
  the name, once.
- A read costs two calls, `metric` and `process`. Ids and names are asked for once, and again when the numbers of the
  cards change: a card that falls off the bus renumbers those behind it.
"""

import re
import time
from typing import Any

from msgspec.structs import replace

from gpuyard.core.model import Device, Problem, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled
from gpuyard.probes import figures
from gpuyard.probes.amd import cards
from gpuyard.probes.amd.printed import (
    cells,
    garbled,
    json_documents,
    parse_output,
    run_until,
    section,
    table_rows,
)
from gpuyard.probes.identity import with_distinct_ids

NAME = "amd-smi"
_TEXT_LINE = re.compile(r"([ \t]*)([A-Z][A-Z0-9_ ]*):[ \t]*(.*)")
_MONITOR_COLUMNS = {
    "POWER": ("power", "socket_power"),
    "PWR_CAP": ("limit", "socket_power"),
    "GPU_TEMP": ("temperature", "hotspot"),
    "GPU_T": ("temperature", "hotspot"),
    "GFX_UTIL": ("usage", "gfx_activity"),
    "GFX%": ("usage", "gfx_activity"),
    "VRAM_USED": ("mem_usage", "used_vram"),
    "VRAM_TOTAL": ("mem_usage", "total_vram"),
}

_Record = dict[str, Any]


def parse(text: str) -> Reading:
    """What `amd-smi list`, `static`, `metric`, `process` or `monitor` printed."""
    try:
        records = _json_records(text)
        if records is None:
            records = _text_records(text) or _monitor_records(text)
        if records is None:
            raise garbled(NAME, text)
        return Reading(devices=with_distinct_ids(_device(number, record) for number, record in enumerate(records)))
    except RecursionError as error:
        raise ProbeGarbled(NAME, "what it printed is nested too deeply to be read") from error


def merge(first: Reading, *others: Reading) -> Reading:
    """The devices of `first`, each with what the others know of the card with its number, the best id included."""
    by_index = [{device.index: device for device in reading.devices} for reading in others]
    devices = (
        _completed(device, *(known[device.index] for known in by_index if device.index in known))
        for device in first.devices
    )
    problems = tuple(problem for reading in (first, *others) for problem in reading.problems)
    return Reading(devices=with_distinct_ids(devices), problems=problems)


class AmdSmi:
    name = NAME
    vendor = Vendor.AMD
    may_hang = False

    def __init__(self) -> None:
        self._listed: Reading | None = None
        self._static: Reading | None = None
        self._indexes: set[int | None] = set()

    def read(self, timeout_s: float) -> Reading:
        deadline = time.monotonic() + timeout_s
        # First, so that a read which runs out of time leaves the next one less to do. Without ids another probe serves
        # better: a lease must not see a card under two names.
        known = self._listed
        listed = known or self._list(deadline)
        metric = _read_metric(deadline)
        indexes = {device.index for device in metric.devices}
        if known and indexes != self._indexes:
            listed = self._list(deadline)
        static = self._static or _call_or_problem("static", "--json", deadline=deadline)
        processes = _call_or_problem("process", "--json", deadline=deadline)
        self._indexes, self._static = indexes, None if static.problems else static
        return merge(metric, listed, static, processes)

    def _list(self, deadline: float) -> Reading:
        self._listed, self._static = None, None
        listed = _call("list", "--json", deadline=deadline)
        self._listed, self._indexes = listed, {device.index for device in listed.devices}
        return listed


def _read_metric(deadline: float) -> Reading:
    """All of `metric` is slow, as it counts throttling for a while; guests and old releases lack some options."""
    try:
        return _call("metric", "--usage", "--power", "--temperature", "--mem-usage", "--json", deadline=deadline)
    except ProbeCrashed:
        return _call("metric", "--json", deadline=deadline)


def _call(*arguments: str, deadline: float) -> Reading:
    return parse_output(run_until((NAME, *arguments), deadline), parse)


def _call_or_problem(*arguments: str, deadline: float) -> Reading:
    try:
        return _call(*arguments, deadline=deadline)
    except ProbeError as error:
        message = f"`{NAME} {arguments[0]}`: {error.message}"
        problem = Problem(source=NAME, kind=error.kind, message=message, hint=error.hint, vendor=Vendor.AMD)
        return Reading(problems=(problem,))


def _completed(device: Device, *sources: Device) -> Device:
    found = {
        field: next((value for source in sources if (value := getattr(source, field)) is not None), None)
        for field in device.__struct_fields__
        if getattr(device, field) is None
    }
    return replace(device, **{**found, "id": min((device, *sources), key=cards.id_rank).id})


def _device(number: int, record: _Record) -> Device:
    asic, power, temperature = (section(record, name) for name in ("asic", "power", "temperature"))
    index = cards.card_index(record.get("gpu"))
    pci = cards.pci_bus_id(record.get("bdf")) or cards.pci_bus_id(section(record, "bus").get("bdf"))
    unique = cards.unique_id_in_uuid(record.get("uuid")) or cards.unique_id(asic.get("asic_serial"))
    return Device(
        id=cards.device_id(unique, pci, number if index is None else index),
        vendor=Vendor.AMD,
        index=index,
        name=cards.card_name(asic.get("market_name"), section(record, "board").get("product_name")),
        pci_bus_id=pci,
        **_memory(record),
        utilization_percent=_first(figures.percent, section(record, "usage"), "gfx_activity", "gfx_usage"),
        power_draw_w=_first(figures.watts, power, "socket_power", "current_socket_power", "average_socket_power"),
        power_limit_w=_power_limit(section(record, "limit")),
        temperature_c=_first(figures.celsius, temperature, "edge", "hotspot", "junction"),
        processes=_processes(record),
    )


def _first(read: Any, part: _Record, *keys: str) -> float | None:
    """The first of the keys, which releases have renamed, that holds a figure."""
    return next((value for key in keys if (value := read(part.get(key))) is not None), None)


def _memory(record: _Record) -> cards.Memory:
    usage, vram = section(record, "mem_usage"), section(record, "vram")
    total = _first(figures.megabytes, usage, "total_vram")
    if total is None:
        total = _first(figures.megabytes, vram, "size", "vram_size", "vram_size_mb")
    return cards.memory(total, figures.megabytes(usage.get("used_vram")), figures.megabytes(usage.get("free_vram")))


def _power_limit(limit: _Record) -> float | None:
    """ROCm 7 has a part of its own for each limit, of which PPT0 is the socket's."""
    caps = ((section(limit, "ppt0"), "socket_power_limit"), (limit, "socket_power"), (limit, "current_power"))
    highest = ((section(limit, "ppt0"), "max_power_limit"), (limit, "max_power"), (limit, "power"))
    return cards.power_limit(*(figures.watts(part.get(key)) for part, key in (*caps, *highest)))


def _processes(record: _Record) -> tuple[Process, ...] | None:
    entries = record.get("process_list", record.get("process_info"))
    listed = entries if isinstance(entries, list) else [entries]
    infos = [entry.get("process_info", entry) if isinstance(entry, dict) else entry for entry in listed]
    found = [process for info in infos if isinstance(info, dict) and (process := _process(info))]
    says_none = isinstance(entries, list) and not entries
    says_none |= any(isinstance(info, str) and info.lower().startswith("no running process") for info in infos)
    return tuple(found) if found or says_none else None


def _process(info: _Record) -> Process | None:
    memory_mb = cards.process_memory(info.get("memory_usage"), info.get("mem_usage"))
    return cards.process(info.get("pid"), info.get("name"), memory_mb)


def _json_records(text: str) -> list[_Record] | None:
    """A bare list, the list under "gpu_data" that ROCm 7 prints, or one record."""
    for document in json_documents(text):
        listed = document.get("gpu_data", [document]) if isinstance(document, dict) else document
        if isinstance(listed, list):
            records = [record for record in listed if isinstance(record, dict) and "gpu" in record]
            if records or not listed:
                return records
    return None


def _text_records(text: str) -> list[_Record] | None:
    """The indented text: "GPU: 0" begins a record, a key with nothing behind it a part; older releases indent less."""
    records: list[_Record] = []
    parts: list[tuple[int, _Record]] = []
    for match in filter(None, map(_TEXT_LINE.fullmatch, text.splitlines())):
        indent, key, value = len(match[1]), match[2].lower(), match[3].strip()
        if key in {"gpu", "cpu"} and value.isdecimal():
            parts = [(-1, {key: value})]
            records += [parts[0][1]] if key == "gpu" else []
        elif parts:
            parts = [part for part in parts if part[0] < indent]
            parts += _add(parts[-1][1], indent, key, value)
    return [record for record in records if len(record) > 1] or None


def _add(part: _Record, indent: int, key: str, value: str) -> list[tuple[int, _Record]]:
    """Puts a value, or a new part, which is answered, under its key; only the part of a process comes several times."""
    if value:
        part[key] = value
        return []
    inner: _Record = {}
    if key == "process_info":
        part.setdefault("process_list", []).append(inner)
    else:
        part[key] = inner
    return [(indent, inner)]


def _monitor_records(text: str) -> list[_Record] | None:
    """The last table of `monitor`. Rows of one card's partitions (XCP) repeat its figures: the first counts."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if _is_monitor_header(cells(line))]
    if not starts:
        return None
    rows = table_rows(cells(lines[starts[-1]]), lines[starts[-1] + 1 :])
    records: dict[str, _Record] = {}
    for row, _ in rows:
        if "GPU" in row:
            records.setdefault(row["GPU"], _monitor_record(row))
    return list(records.values()) or None


def _is_monitor_header(header: list[str]) -> bool:
    return "GPU" in header[:2] and bool({*_MONITOR_COLUMNS, "VRAM_USAGE"} & set(header))


def _monitor_record(row: dict[str, str]) -> _Record:
    record: _Record = {"gpu": row["GPU"]}
    for column, (part, key) in _MONITOR_COLUMNS.items():
        if column in row:
            record.setdefault(part, {})[key] = row[column]
    used, slash, total = row.get("VRAM_USAGE", "").partition("/")
    if slash:
        unit = total.split()[-1] if total.split() else ""
        record["mem_usage"] = {"used_vram": f"{used} {unit}", "total_vram": total}
    return record
