"""`rocm-smi`, AMD's older tool: its JSON, whose keys changed from release to release.

- Temperature is the edge sensor's, which is "#1" before ROCm 3, or, where a card has none (MI300), the junction's.
- The power limit is "Max Graphics Package Power"; a secondary die (MI250) has no power of its own.
- KFD lists the number of cards of a process, not which ones: processes are reported only on machines with one card.
- An output that lists cards without any known field is rejected."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from gpuyard.errors import ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.amd import amd_smi
from gpuyard.probes.amd.amd_smi import garbled, json_documents
from gpuyard.probes.devices_and_processes import pci_bus_id, with_distinct_ids
from gpuyard.probes.run_tool import Deadline, run_until

NAME = "rocm-smi"
_COMMAND = (
    f"{NAME} --showid --showuniqueid --showproductname --showbus --showtemp --showuse --showpower --showmaxpower"
    " --showmeminfo vram --showpids --json"
)
_CARD = re.compile(r"card(\d{1,5})", re.IGNORECASE)
# Older releases print units with the values, newer ones in the keys.
_KEYS = {
    "draw": re.compile(r"(?:average|current) .*power(?: \(w\))?"),
    "limit": re.compile(r"max .*power(?: \(w\))?"),
    "edge": re.compile(r"temperature(?: \(sensor (?:edge|#1)\))?(?: \(c\))?"),
    "junction": re.compile(r"temperature \(sensor junction\)(?: \(c\))?"),
    "busy": re.compile(r"(?:current )?gpu use(?: \(%\))?"),
    "total": re.compile(r"vram total memory \(b\)"),
    "used": re.compile(r"vram total used memory \(b\)"),
    "identity": re.compile(r"unique id|pci bus|card series|device name|card model"),
}
_from_bytes = partial(parse_numbers.megabytes, unit="B")


def parse(text: str) -> Reading:
    """Parse the JSON, with any figures."""
    try:
        answers = (
            document
            for document in json_documents(text)
            if isinstance(document, dict) and any(key == "system" or _CARD.fullmatch(key) for key in document)
        )
        devices = next(map(_devices_of_document, answers), None)
    except RecursionError as error:
        raise ProbeGarbled(NAME, "its output is nested too deeply") from error
    if devices is None and "No AMD GPUs specified" not in text:
        raise garbled(NAME, text)
    return Reading(devices=with_distinct_ids(devices or ()))


class RocmSmi:
    def read(self, timeout_s: float) -> Reading:
        return run_until(_COMMAND.split(), Deadline(timeout_s)).read(parse)


def _devices_of_document(document: dict[str, Any]) -> list[Device] | None:
    found = {
        int(match[1]): {key.strip(": ").lower(): value for key, value in card.items()}
        for key, card in document.items()
        if (match := _CARD.fullmatch(key)) and isinstance(card, dict)
    }
    processes = _processes({**document, **amd_smi.section(document, "system")}) if len(found) == 1 else None
    names_cards = any(_CARD.fullmatch(key) for key in document)
    keys = {key for card in found.values() for key in card}
    if names_cards and not processes and not any(known.fullmatch(key) for key in keys for known in _KEYS.values()):
        return None
    return [replace(_device(index, card), processes=processes) for index, card in sorted(found.items())]


def _device(index: int, said: dict[str, Any]) -> Device:
    pci = pci_bus_id(said.get("pci bus"))
    edge = _matching(parse_numbers.celsius, said, "edge")
    unique = amd_smi.unique_id(said.get("unique id"))
    return Device(
        id=amd_smi.device_id(unique, pci, index),
        vendor=Vendor.AMD,
        index=index,
        name=amd_smi.card_name(said.get("card series"), said.get("device name"), said.get("card model")),
        pci_bus_id=pci,
        **amd_smi.memory(_matching(_from_bytes, said, "total"), _matching(_from_bytes, said, "used")),
        utilization_percent=_matching(parse_numbers.percent, said, "busy"),
        power_draw_w=_matching(parse_numbers.watts, said, "draw"),
        power_limit_w=_matching(parse_numbers.watts, said, "limit") or None,  # releases print 0 W for no cap
        temperature_c=edge if edge is not None else _matching(parse_numbers.celsius, said, "junction"),
    )


def _matching(read: Callable[[Any], float | None], said: dict[str, Any], key: str) -> float | None:
    values = (read(value) for name, value in said.items() if _KEYS[key].fullmatch(name))
    return next((value for value in values if value is not None), None)


def _processes(said: dict[str, Any]) -> tuple[Process, ...] | None:
    """Return the processes of "PID1234": "name, cards, bytes of VRAM, ..."; no key means none or not queried."""
    found = []
    for key, value in said.items():
        match = re.fullmatch(r"PID(\d{1,10})", key, re.IGNORECASE)
        if match and isinstance(value, str):
            name, card_count, vram, *_ = [*value.rsplit(",", 4), "", "", ""]
            process = amd_smi.process(match[1], name, parse_numbers.megabytes(vram, "B"))
            found += [process] if process and parse_numbers.whole(card_count) != 0 else []
    return tuple(found) or None
