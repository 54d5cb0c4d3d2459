"""`rocm-smi`, AMD's older tool: its JSON, CSV and lines, whose keys changed from release to release, and its table.

Rules:
- Temperature is the edge sensor's, which is "#1" before ROCm 3, or, where a card has none (MI300), the junction's.
- The power limit is "Max Graphics Package Power"; a secondary die (MI250) has no power of its own.
- KFD lists the number of cards of a process, not which ones: processes are reported only on machines with one card.
- As text (`-a`) each line is "GPU[0] : key: value", with the keys of the JSON; a table of KFD's processes may follow.
- Old releases have no `--json`: then the same options as text are read, else `-a`. The form that works is remembered.
- The table has memory in percent of an unknown total: it stays unknown.
- An output that lists cards without any known field is rejected.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.probes.amd import card_fields
from gpuyard.probes.amd.tool_output import cells, csv_rows, garbled, json_documents, parse_output, table_rows
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.probe_calls import Deadline, run_until

NAME = "rocm-smi"
_TEXT_COMMAND = (
    f"{NAME} --showid --showuniqueid --showproductname --showbus --showtemp --showuse --showmeminfo vram --showpower"
    " --showmaxpower --showpids"
)
_COMMANDS = (f"{_TEXT_COMMAND} --json", _TEXT_COMMAND, f"{NAME} -a")
_CARD = re.compile(r"card(\d{1,5})", re.IGNORECASE)
_PID = re.compile(r"PID(\d{1,10})", re.IGNORECASE)
_NO_CARDS = "No AMD GPUs specified"
# Older releases print units with the values, newer ones in the keys.
_DRAW = re.compile(r"(?:average|current) .*power(?: \(w\))?")
_LIMIT = re.compile(r"max .*power(?: \(w\))?")
_EDGE = re.compile(r"temperature(?: \(sensor (?:edge|#1)\))?(?: \(c\))?")
_JUNCTION = re.compile(r"temperature \(sensor junction\)(?: \(c\))?")
_BUSY = re.compile(r"(?:current )?gpu use(?: \(%\))?")
_TOTAL = re.compile(r"vram total memory \(b\)")
_USED = re.compile(r"vram total used memory \(b\)")
_IDENTITY = re.compile(r"unique id|pci bus|card series|device name|card model")
_KNOWN = (_DRAW, _LIMIT, _EDGE, _JUNCTION, _BUSY, _TOTAL, _USED, _IDENTITY)
_LINE = re.compile(r"GPU\[(\d{1,5})\]\s*:\s*([^:]+?)\s*:\s*(\S.*)", re.ASCII)
_KFD_HEADER = re.compile(r"PID\s+PROCESS NAME\s+(GPU\(s\)\s.*)")
_KFD_COLUMN = re.compile(r"GPU\(s\)|VRAM USED|SDMA USED|CU OCCUPANCY")
_SENSOR = re.compile(r" \(\w+\)")
_NO_PROCESSES = "No KFD PIDs currently running"
_from_bytes = partial(parse_numbers.megabytes, unit="B")


def parse(text: str) -> Reading:
    """Parse the output of `rocm-smi`: with `--json`, `--csv` or neither, with any --show options, or with `-a`."""
    try:
        found = (document for document in json_documents(text) if _is_answer(document))
        devices = next(map(_devices_of_document, found), None)
        if devices is None:
            devices = _devices_of_csv(text) or _devices_of_table(text) or _devices_of_lines(text)
    except RecursionError as error:
        raise ProbeGarbled(NAME, "its output is nested too deeply") from error
    if devices is None and _NO_CARDS not in text:
        raise garbled(NAME, text)
    return Reading(devices=with_distinct_ids(devices or ()))


class RocmSmi:
    def __init__(self) -> None:
        self._commands: tuple[str, ...] = _COMMANDS

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        refusals = []
        for command in self._commands:
            try:
                reading = parse_output(run_until(command.split(), deadline), parse)
            except (ProbeCrashed, ProbeGarbled) as error:
                refusals.append(error)
            else:
                self._commands = (command,)
                return reading
        self._commands = _COMMANDS
        raise refusals[0]


def _is_answer(document: Any) -> bool:
    return isinstance(document, dict) and any(key == "system" or _CARD.fullmatch(key) for key in document)


def _devices_of_csv(text: str) -> list[Device] | None:
    """Parse blocks that start with a header with "device" first; processes are separate quoted lines."""
    document: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for row in csv_rows(text.splitlines()):
        if len(row) == 1:
            continue
        if row[0] == "device":
            header = row
        elif _PID.fullmatch(row[0]):
            document.setdefault("system", {})[row[0]] = ", ".join(row[1:])
        elif _CARD.fullmatch(row[0]):
            figures_of_card = row if len(row) == len(header) else []
            document.setdefault(row[0], {}).update(zip(header, figures_of_card, strict=False))
    return _devices_of_document(document) if header else None


def _devices_of_lines(text: str) -> list[Device] | None:
    document: dict[str, Any] = {"system": _processes_of_table(text.splitlines())}
    for match in filter(None, (_LINE.fullmatch(line.strip()) for line in text.splitlines())):
        document.setdefault(f"card{match[1]}", {})[match[2]] = match[3]
    devices = _devices_of_document(document) if len(document) > 1 else None
    if devices and _NO_PROCESSES in text:
        return [replace(device, processes=()) for device in devices]
    return devices


def _processes_of_table(lines: Sequence[str]) -> dict[str, str]:
    """Return the rows of KFD's table as the JSON has them: "PID1234": "name, cards, bytes of VRAM, ..."."""
    found: dict[str, str] = {}
    behind_name = 0
    for line in lines:
        header = _KFD_HEADER.match(line.strip())
        words = line.split()
        if header:
            behind_name = len(_KFD_COLUMN.findall(header[1]))
        elif behind_name and words and words[0].isdecimal() and len(words) > behind_name + 1:
            figures_of_process = [*words[-behind_name:], *["unknown"] * (4 - behind_name)]
            found[f"PID{words[0]}"] = ", ".join([" ".join(words[1:-behind_name]), *figures_of_process])
        else:
            behind_name = 0
    return found


def _devices_of_document(document: dict[str, Any]) -> list[Device] | None:
    found = {
        int(match[1]): {key.strip(": ").lower(): value for key, value in card.items()}
        for key, card in document.items()
        if (match := _CARD.fullmatch(key)) and isinstance(card, dict)
    }
    processes = _processes({**document, **card_fields.section(document, "system")}) if len(found) == 1 else None
    names_cards = any(_CARD.fullmatch(key) for key in document)
    keys = {key for card in found.values() for key in card}
    if names_cards and not processes and not any(known.fullmatch(key) for key in keys for known in _KNOWN):
        return None
    return [replace(_device(index, index, card), processes=processes) for index, card in sorted(found.items())]


def _device(number: int, index: int | None, said: dict[str, Any]) -> Device:
    pci = pci_bus_id(said.get("pci bus"))
    edge = _matching(parse_numbers.celsius, said, _EDGE)
    unique = card_fields.unique_id(said.get("unique id"))
    return Device(
        id=card_fields.device_id(unique, pci, number if index is None else index),
        vendor=Vendor.AMD,
        index=index,
        name=card_fields.card_name(said.get("card series"), said.get("device name"), said.get("card model")),
        pci_bus_id=pci,
        **card_fields.memory(_matching(_from_bytes, said, _TOTAL), _matching(_from_bytes, said, _USED)),
        utilization_percent=_matching(parse_numbers.percent, said, _BUSY),
        power_draw_w=_matching(parse_numbers.watts, said, _DRAW),
        power_limit_w=_matching(parse_numbers.watts, said, _LIMIT) or None,  # releases print 0 W for no cap
        temperature_c=edge if edge is not None else _matching(parse_numbers.celsius, said, _JUNCTION),
    )


def _matching(read: Callable[[Any], float | None], said: dict[str, Any], key: re.Pattern[str]) -> float | None:
    values = (read(value) for name, value in said.items() if key.fullmatch(name))
    return next((value for value in values if value is not None), None)


def _processes(said: dict[str, Any]) -> tuple[Process, ...] | None:
    """Return the processes of "PID1234": "name, cards, bytes of VRAM, ..."; no key means none or not queried."""
    found = []
    for key, value in said.items():
        match = _PID.fullmatch(key)
        if match and isinstance(value, str):
            name, card_count, vram, *_ = [*value.rsplit(",", 4), "", "", ""]
            process = card_fields.process(match[1], name, parse_numbers.megabytes(vram, "B"))
            found += [process] if process and parse_numbers.whole(card_count) != 0 else []
    return tuple(found) or None


def _devices_of_table(text: str) -> list[Device] | None:
    """Parse the concise table; some releases print the card's name on a line below the figures."""
    lines = text.splitlines()
    headers = ((number, cells(_SENSOR.sub("", line))) for number, line in enumerate(lines))
    start = next(
        (number for number, row in headers if row[:1] in (["Device"], ["GPU"]) and {"SCLK", "GPU%"} <= {*row}), None
    )
    if start is None:
        return None
    rows = table_rows(cells(_SENSOR.sub("", lines[start])), lines[start + 1 :])
    if all(len(row) == 1 for row, _ in rows):
        return None
    return [_device_of_row(number, row, following) for number, (row, following) in enumerate(rows)]


def _device_of_row(number: int, row: dict[str, str], following: str) -> Device:
    said = {
        "card series": following if "[Model : Revision]" in row and following[:1].isspace() else None,
        "gpu use": row.get("GPU%"),
        "average power": row.get("Power", row.get("AvgPwr")),
        "max power": row.get("PwrCap"),
        "temperature": row.get("Temp"),
    }
    return _device(number, parse_numbers.device_index(row.get("Device", row.get("GPU"))), said)
