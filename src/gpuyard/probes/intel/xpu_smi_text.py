"""Parse the text output of xpu-smi: CSV (`dump`, `discovery --dump`), boxes (`stats`, `discovery`, its own), `ps`.

Rules:
- `dump` prints rows for as long as it runs: the last one of a device, or of each of its tiles, counts. A truncated
  row counts only if there is no other, and without its last field.
- The columns of `ps` before 1.3, which counted in kB of 1,000 bytes, have widths that no later release prints.
- In a box, a label that is empty, in brackets, or begins with a small letter continues the row above it.

Plain `xpu-smi` since 2.0 prints a box of cards in the layout of nvidia-smi, then all processes:
- A card has a line with its number, name and bus id, further lines if its name is too long for the column, and a
  line of figures. The name is cut at the end of the column, also within a word.
- Figures are found by position, counted from the end of the line: a card may have several fans.
- Processes are known only if the end of their list was printed.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from gpuyard.core.snapshot import Process, Reading
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.parse_numbers import device_index, process_id
from gpuyard.probes.intel import xpu_smi_fields as xpu
from gpuyard.probes.intel.intel_cards import processes_of, within_used, without_shared_uuids

_IDENTITY = {
    "devicename": "name",
    "pcibdfaddress": "pci",
    "uuid": "uuid",
    "socuuid": "uuid",
    "memoryphysicalsize": "memory",
}
_TILE = re.compile(r"Tile\s+\d+\s*:", re.IGNORECASE)
_ENGINE = re.compile(r"Engine\s+\d+\s*:\s*([^,;\s]+)", re.IGNORECASE)
_CURRENT = re.compile(r"\b(?:current|avg)\s*:\s*([^,;，]*)", re.IGNORECASE)  # noqa: RUF001 - as in the output
_PROCESS_HEADER = re.compile(r"\|\s*GPU\s+PID\s+Type\s+Process Name\b")
_OLD_PROCESS_HEADER = f"{'PID':10}{'Command':20}{'DeviceID':15}{'SHR':15}MEM"
_COLUMN_GAP = 2


def parse_text(text: str) -> Reading:
    """Parse the text by the first line that starts one of the formats."""
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        for header, reader in _FORMATS:
            if header.match(line):
                return reader(lines[number:])
    raise ProbeGarbled(xpu.NAME, "its output has no table of devices")


def _read_csv(lines: Sequence[str]) -> Reading:
    try:
        titles, *rows = list(csv.reader(lines, skipinitialspace=True))
    except csv.Error as error:
        raise ProbeGarbled(xpu.NAME, f"its CSV cannot be read: {error}") from error
    keys = [_key(title) for title in titles]
    if keys[0] == "timestamp":
        return _read_dump([title.strip() for title in titles], keys, rows)
    if _IDENTITY.keys().isdisjoint(keys):
        raise ProbeGarbled(xpu.NAME, f"none of the columns of its list is known: {', '.join(keys)[:100]!r}")
    return _listed((row[0], zip(keys, row, strict=False)) for row in rows if row)


def _key(title: str) -> str:
    return title.strip().lower().replace(" ", "")


def _read_dump(titles: Sequence[str], keys: Sequence[str], rows: Iterable[Sequence[str]]) -> Reading:
    if not any(map(xpu.field_of, titles)):
        raise ProbeGarbled(xpu.NAME, f"none of the columns of its dump is known: {', '.join(titles)[:100]!r}")
    latest: dict[tuple[int | None, str | None], dict[str, Sequence[str]]] = {}
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
        raise ProbeGarbled(xpu.NAME, "its dump has no rows")
    devices = []
    for place, tiles in latest.items():
        each = [xpu.from_labels(zip(titles, row, strict=False)) for row in tiles.values()]
        devices.append(xpu.as_device(*place, xpu.of_device({}, each)))
    return Reading(devices=tuple(devices))


def _read_list(lines: Sequence[str]) -> Reading:
    """Parse the box of `discovery`: "name: value" lines, with the device number on the first."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    for number, fact in _cells(lines):
        if number.isdecimal():
            found.append((number, []))
        if found:
            name, _, value = fact.partition(":")
            found[-1][1].append((_key(name), value.strip()))
    return _listed(found)


def _listed(found: Iterable[tuple[str, Iterable[tuple[str, str]]]]) -> Reading:
    devices = []
    for number, facts in found:
        index = device_index(number)
        entry = {_IDENTITY[key]: value for key, value in facts if key in _IDENTITY}
        if index is not None and entry:
            devices.append(xpu.identified(index, entry, parse_numbers.megabytes(entry.get("memory"))))
    if not devices:
        raise ProbeGarbled(xpu.NAME, "its list of devices has no rows")
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
        raise ProbeGarbled(xpu.NAME, "its statistics name no device")
    return Reading(devices=tuple(xpu.as_device(index, None, _from_cells(found)) for index, found in boxes.items()))


def _from_cells(rows: Iterable[tuple[str, str]]) -> xpu.Metrics:
    """Return the metrics from a table with several tiles, engines and averages per cell."""
    whole: list[tuple[str, str]] = []
    tiles: dict[int, list[tuple[str, str]]] = {}
    for label, cell in rows:
        device_part, *tile_parts = _TILE.split(cell)
        whole += _figures(label, device_part)
        for number, part in enumerate(tile_parts):
            tiles.setdefault(number, []).extend(_figures(label, part))
    return xpu.of_device(xpu.from_labels(whole), [xpu.from_labels(pairs) for pairs in tiles.values()])


def _figures(label: str, part: str) -> Iterator[tuple[str, str]]:
    now = list(_CURRENT.finditer(part))
    yield label, now[-1][1].strip() if now else re.split("[,;]", part)[0].strip()
    for engine in _ENGINE.finditer(part):
        yield label, engine[1]


def _cells(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 2:
            yield cells[0], cells[1]


def _joined(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    joined: list[tuple[str, str]] = []
    for label, cell in rows:
        if joined and (not label or label[0] == "(" or label[0].islower()):
            joined[-1] = f"{joined[-1][0]} {label}".strip(), f"{joined[-1][1]} {cell}".strip()
        else:
            joined.append((label, cell))
    return joined


def _read_processes(lines: Sequence[str]) -> Reading:
    """Parse `ps`; the command may contain spaces, so later columns are counted from the end."""
    titles = [title.lower() for title in lines[0].split()]
    after = titles[2:]
    rows = []
    for words in (line.split() for line in lines[1:]):
        if len(words) >= len(titles):
            fields = dict(zip(after, words[-len(after) :], strict=True))
            name = " ".join(words[1 : -len(after)])
            rows.append((fields.get("deviceid"), words[0], name, fields.get("mem")))
    return xpu.of_processes(rows, xpu.OLD_KB if lines[0] == _OLD_PROCESS_HEADER else xpu.KIB)


def _read_summary(lines: Sequence[str]) -> Reading:
    # NVIDIA's box has the same layout: only that has a performance state.
    if any(re.search(r"\bTemp\s+Perf\b", line) for line in lines[1:2]):
        raise ProbeGarbled(xpu.NAME, "this is the box of nvidia-smi", hint="save `nvidia-smi -q -x` for nvidia-smi-xml")
    cards, users = _box_cards(lines), _box_processes(lines)
    if not cards:
        raise ProbeGarbled(xpu.NAME, "its box of devices has no rows")
    devices = []
    for index, bus_id, names, figures in cards:
        device = xpu.as_device(index, bus_id, figures)
        listed = None if users is None else processes_of(users.get(index, ()))
        processes = within_used(listed, device.memory_used_mb)
        devices.append(structs.replace(device, name=parse_numbers.words("".join(names)), processes=processes))
    return Reading(devices=with_distinct_ids(devices))


def _box_cards(lines: Sequence[str]) -> list[tuple[int, str, list[str], xpu.Metrics]]:
    """Return number, bus id, lines of the name and figures of the cards below the header, which is the first line."""
    name_column = slice(lines[0].index("Name"), lines[0].index("Persistence-M") - _COLUMN_GAP)
    found: list[tuple[int, str, list[str], xpu.Metrics]] = []
    is_open = False
    for line in lines[1:]:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3:
            continue
        index, place = device_index(cells[0].partition(" ")[0]), pci_bus_id(cells[1].partition(" ")[0])
        if index is not None and place:
            found.append((index, place, [line[name_column]], {}))
            is_open = True
        elif is_open and not cells[1]:
            found[-1][2].append(line[name_column])
        elif is_open:
            found[-1][3].update(_box_figures(*cells))
            is_open = False
    return found


def _box_figures(left: str, memory: str, right: str) -> xpu.Metrics:
    before, slash, limit = left.rpartition(" / ")
    words = ["", *(before if slash else left).split()]
    used, _, total = memory.partition(" / ")
    return {
        "utilization_percent": parse_numbers.percent(right.partition(" ")[0]),
        "power_draw_w": parse_numbers.watts(words[-1]),
        "power_limit_w": parse_numbers.watts(limit) if slash else None,
        "temperature_c": parse_numbers.celsius(words[-2]) if len(words) > 2 else None,
        "memory_used_mb": parse_numbers.megabytes(used),
        "memory_total_mb": parse_numbers.megabytes(total),
    }


def _box_processes(lines: Sequence[str]) -> dict[int, list[Process]] | None:
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


# The first line of each format.
_FORMATS = (
    (re.compile(r'"?(?:Timestamp"?\s*,.*\bDeviceId|Device ID"?\s*,)', re.IGNORECASE), _read_csv),
    (re.compile(r"PID\s+Command\s+DeviceID\b", re.IGNORECASE), _read_processes),
    (re.compile(r"\|\s*Device ID\s*\|\s*Device Information\b", re.IGNORECASE), _read_list),
    (re.compile(r"\|\s*Device ID\s*\|\s*\d", re.IGNORECASE), _read_boxes),
    (re.compile(r"\|\s*GPU\s+Name\s+Persistence-M\s*\|"), _read_summary),
)
