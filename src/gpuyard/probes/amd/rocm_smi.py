"""`rocm-smi`, AMD's older tool: its JSON, whose keys changed from release to release, and its concise table.

Rules:
- Temperature is the edge sensor's or, where a card has none (MI300), the junction's.
- The power limit is "Max Graphics Package Power"; a secondary die (MI250) has no power of its own.
- KFD's processes come with the number of their cards, not with which: they are told only where there is one card.
- The table gives memory in percent of an unknown whole: it stays unknown.
"""

import re
import time
from collections.abc import Callable
from typing import Any

from gpuyard.core.model import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes import figures
from gpuyard.probes.amd import cards
from gpuyard.probes.amd.printed import cells, garbled, json_documents, parse_output, run_until, section, table_rows
from gpuyard.probes.identity import with_distinct_ids

NAME = "rocm-smi"
_COMMAND = (
    NAME,
    "--showid",
    "--showuniqueid",
    "--showproductname",
    "--showbus",
    "--showtemp",
    "--showuse",
    "--showmeminfo",
    "vram",
    "--showpower",
    "--showmaxpower",
    "--showpids",
    "--json",
)
_CARD = re.compile(r"card(\d{1,5})", re.IGNORECASE)
_PID = re.compile(r"PID(\d{1,10})", re.IGNORECASE)
_NO_CARDS = "No AMD GPUs specified"
_DRAW = re.compile(r"(?:average|current) .*power \(w\)")
_LIMIT = re.compile(r"max .*power \(w\)")


def parse(text: str) -> Reading:
    """What `rocm-smi --json`, with any of its --show options, or plain `rocm-smi` printed."""
    try:
        devices = _devices_of_json(text)
        if devices is None:
            devices = _devices_of_table(text)
    except RecursionError as error:
        raise ProbeGarbled(NAME, "what it printed is nested too deeply to be read") from error
    if devices is None and _NO_CARDS not in text:
        raise garbled(NAME, text)
    return Reading(devices=with_distinct_ids(devices or ()))


class RocmSmi:
    name = NAME
    vendor = Vendor.AMD
    may_hang = False

    def read(self, timeout_s: float) -> Reading:
        return parse_output(run_until(_COMMAND, time.monotonic() + timeout_s), parse)


def _devices_of_json(text: str) -> list[Device] | None:
    for document in json_documents(text):
        if isinstance(document, dict) and any(key == "system" or _CARD.fullmatch(key) for key in document):
            return _devices_of_document(document)
    return None


def _devices_of_document(document: dict[str, Any]) -> list[Device]:
    found = {
        int(match[1]): card
        for key, card in document.items()
        if (match := _CARD.fullmatch(key)) and isinstance(card, dict)
    }
    processes = _processes({**document, **section(document, "system")}) if len(found) == 1 else None
    return [_device(index, card, processes) for index, card in sorted(found.items())]


def _device(index: int, card: dict[str, Any], processes: tuple[Process, ...] | None) -> Device:
    said = {key.strip(": ").lower(): value for key, value in card.items()}
    pci = cards.pci_bus_id(said.get("pci bus"))
    return Device(
        id=cards.device_id(cards.unique_id(said.get("unique id")), pci, index),
        vendor=Vendor.AMD,
        index=index,
        name=cards.card_name(said.get("card series"), said.get("device name"), said.get("card model")),
        pci_bus_id=pci,
        **cards.memory(
            figures.megabytes(said.get("vram total memory (b)"), "B"),
            figures.megabytes(said.get("vram total used memory (b)"), "B"),
        ),
        utilization_percent=figures.percent(said.get("gpu use (%)")),
        power_draw_w=_matching(figures.watts, said, _DRAW),
        power_limit_w=cards.power_limit(_matching(figures.watts, said, _LIMIT)),
        temperature_c=_temperature(said),
        processes=processes,
    )


def _matching(read: Callable[[Any], float | None], said: dict[str, Any], key: re.Pattern[str]) -> float | None:
    values = (read(value) for name, value in said.items() if key.fullmatch(name))
    return next((value for value in values if value is not None), None)


def _temperature(said: dict[str, Any]) -> float | None:
    edge = figures.celsius(said.get("temperature (sensor edge) (c)"))
    return edge if edge is not None else figures.celsius(said.get("temperature (sensor junction) (c)"))


def _processes(said: dict[str, Any]) -> tuple[Process, ...] | None:
    """Those of "PID1234": "name, cards, bytes of VRAM, ..."; with none running there is no such key, as if unasked."""
    found = [
        process
        for key, value in said.items()
        if (match := _PID.fullmatch(key)) and isinstance(value, str) and (process := _process(match[1], value))
    ]
    return tuple(found) or None


def _process(pid: str, value: str) -> Process | None:
    name, card_count, vram, *_ = [*value.rsplit(",", 4), "", "", ""]
    if figures.whole(card_count) == 0:
        return None
    return cards.process(pid, name, figures.megabytes(vram, "B"))


def _devices_of_table(text: str) -> list[Device] | None:
    """The concise table; a release that prints a card's name puts it on a line of its own below the figures."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if _is_header(cells(line))), None)
    if start is None:
        return None
    rows = table_rows(cells(lines[start]), lines[start + 1 :])
    return [_device_of_row(number, row, following) for number, (row, following) in enumerate(rows)] or None


def _is_header(header: list[str]) -> bool:
    return header[:1] in (["Device"], ["GPU"]) and {"SCLK", "GPU%"} <= set(header)


def _device_of_row(number: int, row: dict[str, str], following: str) -> Device:
    index = cards.card_index(row.get("Device", row.get("GPU")))
    named = "[Model : Revision]" in row and following[:1].isspace()
    return Device(
        id=cards.device_id(None, None, number if index is None else index),
        vendor=Vendor.AMD,
        index=index,
        name=cards.card_name(following) if named else None,
        utilization_percent=figures.percent(row.get("GPU%")),
        power_draw_w=figures.watts(row.get("Power", row.get("AvgPwr"))),
        power_limit_w=cards.power_limit(figures.watts(row.get("PwrCap"))),
        temperature_c=figures.celsius(row.get("Temp")),
    )
