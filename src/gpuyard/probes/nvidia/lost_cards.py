"""Recognise a lost card in any output of `nvidia-smi`: in lines of text and in fields."""

import re
from collections.abc import Iterable

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.parse_numbers import words

_HANDLE = re.compile(r"unable to determine the device handle for (.*)", re.IGNORECASE)
_BUS_ID = re.compile(r"(?<![0-9A-Fa-f])(?:[0-9A-Fa-f]{8}|[0-9A-Fa-f]{4}):[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_GONE = re.compile(r"gpu is lost|fallen off the bus|gpu requires re(?:set|start)|reboot the system", re.IGNORECASE)
_REFUSAL = re.compile(
    r"^.*(?:nvidia-smi has failed|failed to initialize nvml|couldn't communicate with the nvidia driver).*$",
    re.IGNORECASE | re.MULTILINE,
)
_NO_DEVICES = re.compile(r"^\s*no devices were found\s*$", re.IGNORECASE | re.MULTILINE)


def lost_devices(text: str) -> tuple[Device, ...]:
    """Return the cards that lines of `text` report as lost, by bus id."""
    lost = []
    for line in text.splitlines():
        said = _HANDLE.search(line)
        bus = said and _BUS_ID.search(said[1])
        bus_id = pci_bus_id(bus[0]) if bus else None
        if said and bus and bus_id:
            fault = said[1][bus.end() :].strip(" :") or line.strip()
            lost.append(Device(id=bus_id, vendor=Vendor.NVIDIA, pci_bus_id=bus_id, fault=fault))
    return with_distinct_ids(lost)


def fault_in(fields: Iterable[str | None]) -> str | None:
    """Return the first field that says the card is lost, or None. The driver prints it in place of any figure."""
    return next((field.strip(" []") for field in fields if field and _GONE.search(field)), None)


def own_words(field: str | None) -> str | None:
    """Return the name, or None if the field reports a lost card instead."""
    return None if fault_in((field,)) else words(field)


def only_lost_devices(text: str, expected: str) -> Reading:
    """Return the reading of an output that lists no cards; raise if it is neither lost cards nor none at all."""
    lost = lost_devices(text)
    refusal = _REFUSAL.search(text)
    if refusal:
        raise ProbeCrashed("nvidia-smi", refusal[0].strip()[:200], hint="see dmesg for what the driver says")
    if lost or _NO_DEVICES.search(text):
        return Reading(devices=lost)
    raise ProbeGarbled("nvidia-smi", f"this is not the {expected} prints")
