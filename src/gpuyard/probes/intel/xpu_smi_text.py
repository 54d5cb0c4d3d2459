"""Parse the text output of xpu-smi: CSV (`dump`, `discovery --dump`), boxes (`stats`, `discovery`, its own), `ps`.

Rules:
- `dump` prints rows for as long as it runs: the last one of a device, or of each of its tiles, counts. A truncated
  row counts only if there is no other, and without its last field.
- In a box, a label that is empty, in brackets, or begins with a small letter continues the row above it.
- `ps` counts memory in kB of 1,000 bytes.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.intel import xpu_smi_fields
from gpuyard.probes.intel.device_naming import device_id, device_index, one_per_pid, process_id, without_shared_uuids
from gpuyard.probes.intel.xpu_smi_box import BOX_HEADER, is_of_nvidia, read_box

NAME = "xpu-smi"
_Place = tuple[int | None, str | None]
_IDENTITY = {
    "devicename": "name",
    "pcibdfaddress": "pci",
    "uuid": "uuid",
    "socuuid": "uuid",
    "memoryphysicalsize": "memory",
}
_CSV_HEADER = re.compile(r'"?(?:Timestamp"?\s*,.*\bDeviceId|Device ID"?\s*,)', re.IGNORECASE)
_PS_HEADER = re.compile(r"PID\s+Command\s+DeviceID\b", re.IGNORECASE)
_LIST_HEADER = re.compile(r"\|\s*Device ID\s*\|\s*Device Information\b", re.IGNORECASE)
_STATS_HEADER = re.compile(r"\|\s*Device ID\s*\|\s*\d", re.IGNORECASE)


def parse_text(text: str) -> Reading:
    """Parse the text by the first line that starts one of the formats."""
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        for header, reader in _FORMATS:
            if header.match(line):
                return reader(lines[number:])
    raise ProbeGarbled(NAME, "its output has no table of devices")


def process_memory(raw: object) -> float | None:
    count = parse_numbers.number(raw)
    return parse_numbers.megabytes(count * 1000, "B") if count is not None else None


def of_processes(found: Iterable[tuple[int, Process]]) -> Reading:
    """Return devices with only their processes known."""
    users: dict[int, list[Process]] = {}
    for index, process in found:
        users.setdefault(index, []).append(process)
    return Reading(
        devices=tuple(
            Device(id=device_id(index), vendor=Vendor.INTEL, index=index, processes=one_per_pid(users[index]))
            for index in sorted(users)
        )
    )


def identified(index: int | None, entry: Mapping[str, object], total_mb: float | None) -> Device:
    """Return the device of an entry with `uuid`, `name` and `pci`, where known."""
    place = pci_bus_id(entry.get("pci"))
    return Device(
        id=device_id(index, parse_numbers.words(entry.get("uuid")), place),
        vendor=Vendor.INTEL,
        index=index,
        name=parse_numbers.words(entry.get("name")),
        pci_bus_id=place,
        memory_total_mb=total_mb or None,  # the driver reports zero for unknown
    )


def _read_csv(lines: Sequence[str]) -> Reading:
    try:
        titles, *rows = list(csv.reader(lines, skipinitialspace=True))
    except csv.Error as error:
        raise ProbeGarbled(NAME, f"its CSV cannot be read: {error}") from error
    keys = [_key(title) for title in titles]
    if keys[0] == "timestamp":
        return _read_dump([title.strip() for title in titles], keys, rows)
    return _read_discovery(keys, rows)


def _key(title: str) -> str:
    return title.strip().lower().replace(" ", "")


def _read_dump(titles: Sequence[str], keys: Sequence[str], rows: Iterable[Sequence[str]]) -> Reading:
    if not any(map(xpu_smi_fields.is_known, titles)):
        raise ProbeGarbled(NAME, f"none of the columns of its dump is known: {', '.join(titles)[:100]!r}")
    latest: dict[_Place, dict[str, Sequence[str]]] = {}
    for row in rows:
        by_key = dict(zip(keys, row, strict=False))
        place = device_index(by_key.get("deviceid")), pci_bus_id(by_key.get("deviceid"))
        if place == (None, None):
            continue
        tiles = latest.setdefault(place, {})
        tile = by_key.get("tileid", "").strip()
        if len(row) >= len(titles):
            tiles[tile] = row
        else:
            tiles.setdefault(tile, row[:-1])
    if not latest:
        raise ProbeGarbled(NAME, "its dump has no rows")
    return Reading(devices=tuple(_dumped(place, titles, tiles) for place, tiles in latest.items()))


def _dumped(place: _Place, titles: Sequence[str], tiles: Mapping[str, Sequence[str]]) -> Device:
    each = [xpu_smi_fields.from_labels(zip(titles, row, strict=False)) for row in tiles.values()]
    return xpu_smi_fields.as_device(*place, xpu_smi_fields.of_device(xpu_smi_fields.XpuMetrics(), each))


def _read_discovery(keys: Sequence[str], rows: Iterable[Sequence[str]]) -> Reading:
    if _IDENTITY.keys().isdisjoint(keys):
        raise ProbeGarbled(NAME, f"none of the columns of its list is known: {', '.join(keys)[:100]!r}")
    return _listed((row[0], zip(keys, row, strict=False)) for row in rows if row)


def _read_list(lines: Sequence[str]) -> Reading:
    """Parse the box of `discovery`: "name: value" lines, with the device number on the first."""
    numbers: list[str] = []
    facts: list[list[tuple[str, str]]] = []
    for number, fact in _cells(lines):
        if number.isdecimal():
            numbers.append(number)
            facts.append([])
        if facts:
            name, _, value = fact.partition(":")
            facts[-1].append((_key(name), value.strip()))
    return _listed(zip(numbers, facts, strict=True))


def _listed(found: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> Reading:
    devices = []
    for number, facts in found:
        index = device_index(number)
        entry = {_IDENTITY[key]: value for key, value in facts if key in _IDENTITY}
        if index is not None and entry:
            devices.append(identified(index, entry, parse_numbers.megabytes(entry.get("memory"))))
    if not devices:
        raise ProbeGarbled(NAME, "its list of devices has no rows")
    return Reading(devices=without_shared_uuids(devices))


def _read_boxes(lines: Sequence[str]) -> Reading:
    boxes: dict[int, list[tuple[str, str]]] = {}
    rows: list[tuple[str, str]] = []
    for label, cell in _joined(_cells(lines)):
        if label.lower() == "device id":
            index = device_index(cell)
            rows = boxes.setdefault(index, []) if index is not None else []
        else:
            rows.append((label, cell))
    if not boxes:
        raise ProbeGarbled(NAME, "its statistics name no device")
    devices = (
        xpu_smi_fields.as_device(index, None, xpu_smi_fields.from_cells(found)) for index, found in boxes.items()
    )
    return Reading(devices=tuple(devices))


def _read_summary(lines: Sequence[str]) -> Reading:
    if is_of_nvidia(lines):
        raise ProbeGarbled(NAME, "this is the box of nvidia-smi", hint="save `nvidia-smi -q -x` for nvidia-smi-xml")
    devices = read_box(lines)
    if not devices:
        raise ProbeGarbled(NAME, "its box of devices has no rows")
    return Reading(devices=with_distinct_ids(devices))


def _cells(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 2:
            yield cells[0], cells[1]


def _joined(rows: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    last: tuple[str, str] | None = None
    for label, cell in rows:
        if last is not None and (not label or label[0] == "(" or label[0].islower()):
            last = f"{last[0]} {label}".strip(), f"{last[1]} {cell}".strip()
            continue
        if last is not None:
            yield last
        last = label, cell
    if last is not None:
        yield last


def _read_processes(lines: Sequence[str]) -> Reading:
    titles = [title.lower() for title in lines[0].split()]
    rows = (_process(titles, line.split()) for line in lines[1:])
    return of_processes(row for row in rows if row is not None)


def _process(titles: Sequence[str], words: Sequence[str]) -> tuple[int, Process] | None:
    """Parse a process row; the command may contain spaces, so later columns are counted from the end."""
    after = titles[2:]
    if len(words) < len(titles):
        return None
    fields = dict(zip(after, words[-len(after) :], strict=True))
    pid, index = process_id(words[0]), device_index(fields.get("deviceid"))
    if pid is None or index is None:
        return None
    name = parse_numbers.words(" ".join(words[1 : -len(after)]))
    return index, Process(pid=pid, memory_mb=process_memory(fields.get("mem")), name=name)


_FORMATS = (
    (_CSV_HEADER, _read_csv),
    (_PS_HEADER, _read_processes),
    (_LIST_HEADER, _read_list),
    (_STATS_HEADER, _read_boxes),
    (BOX_HEADER, _read_summary),
)
