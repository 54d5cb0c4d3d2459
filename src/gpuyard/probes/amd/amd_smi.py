"""`amd-smi`, AMD's tool since ROCm 5.6: `list`, `static`, `metric`, `process`, `monitor`, and what it prints by itself.

Rules:
- A section that a release leaves out stays unknown; an output without any known section is rejected.
- "MB" are of 1,048,576 bytes. Temperature is the edge sensor's or, where a card has none (MI300), the hotspot's.
- The power limit is the cap in force or, where that is not printed, the highest one that may be set. It is read with
  the name, once.
- A read costs two calls, `metric` and `process`. Ids and names are read once, and again when the card numbers
  change: a card that falls off the bus renumbers those after it.
- A reading without names or processes is still a reading: a problem says what is missing.
"""

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.probes.amd import card_fields
from gpuyard.probes.amd.amd_smi_records import Record, read_records
from gpuyard.probes.amd.tool_output import garbled, parse_output, section
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids
from gpuyard.probes.common.multiple_calls import OptionalCall, run_until

NAME = "amd-smi"
# The sections of a record, each with the keys that releases have used, the best first.
_PARTS = {
    "asic": ("market_name", "asic_serial"),
    "board": ("product_name",),
    "bus": ("bdf",),
    "limit": ("ppt0", "socket_power", "current_power", "max_power", "power"),
    "mem_usage": ("total_vram", "used_vram", "free_vram"),
    "power": ("socket_power", "current_socket_power", "average_socket_power"),
    "temperature": ("edge", "hotspot", "junction"),
    "usage": ("gfx_activity", "gfx_usage"),
    "vram": ("size", "vram_size", "vram_size_mb"),
}
_IDENTITY_OR_USERS = frozenset({"bdf", "uuid", "process_list", "process_info"})


def parse(text: str) -> Reading:
    """Parse the output of `amd-smi`, alone or with `list`, `static`, `metric`, `process` or `monitor`."""
    try:
        records = read_records(text)
        if records is None or (records and not any(map(_is_understood, records))):
            raise garbled(NAME, text)
        devices = with_distinct_ids(_device(number, record) for number, record in enumerate(records))
        return Reading(devices=card_fields.without_repeated_memory(devices))
    except RecursionError as error:
        raise ProbeGarbled(NAME, "its output is nested too deeply") from error


def merge(first: Reading, *others: Reading) -> Reading:
    """Return the devices of `first`, completed from the other readings by card number, with the best id."""
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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._listed: Reading | None = None
        self._static: Reading | None = None
        self._indexes: set[int | None] = set()
        self._ask_static = OptionalCall(NAME, Vendor.AMD, f"`{NAME} static`", clock)
        self._ask_process = OptionalCall(NAME, Vendor.AMD, f"`{NAME} process`", clock)

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        # First, so that a read that runs out of time leaves less to do for the next. Without ids another probe is
        # better: a lease must not see a card under two ids.
        known = self._listed
        listed = known or self._list(deadline)
        metric = _read_metric(deadline)
        indexes = {device.index for device in metric.devices}
        if known and indexes != self._indexes:
            listed = self._list(deadline)
        static = self._static or self._ask_static.ask(lambda: _call("static", "--json", deadline=deadline), deadline)
        processes = self._ask_process.ask(lambda: _call("process", "--json", deadline=deadline), deadline)
        self._indexes, self._static = indexes, None if static.problems else static
        return merge(metric, listed, static, processes)

    def _list(self, deadline: Deadline) -> Reading:
        self._listed, self._static = None, None
        listed = _call("list", "--json", deadline=deadline)
        self._listed, self._indexes = listed, {device.index for device in listed.devices}
        return listed


def _read_metric(deadline: Deadline) -> Reading:
    """Run `metric` with few sections: all of them are slow. Guests and old releases lack some options."""
    try:
        return _call("metric", "--usage", "--power", "--temperature", "--mem-usage", "--json", deadline=deadline)
    except ProbeCrashed:
        return _call("metric", "--json", deadline=deadline)


def _call(*arguments: str, deadline: Deadline) -> Reading:
    return parse_output(run_until((NAME, *arguments), deadline), parse)


def _completed(device: Device, *sources: Device) -> Device:
    found = {
        field: next((value for source in sources if (value := getattr(source, field)) is not None), None)
        for field in device.__struct_fields__
        if getattr(device, field) is None
    }
    return replace(device, **{**found, "id": min((device, *sources), key=card_fields.id_rank).id})


def _is_understood(record: Record) -> bool:
    """Return whether the record has a known section; an unreadable section is the string "N/A"."""
    for name, keys in _PARTS.items():
        part = record.get(name)
        if isinstance(part, str) or (isinstance(part, dict) and not part.keys().isdisjoint(keys)):
            return True
    return not record.keys().isdisjoint(_IDENTITY_OR_USERS)


def _device(number: int, record: Record) -> Device:
    asic = section(record, "asic")
    index = card_fields.card_index(record.get("gpu"))
    pci = pci_bus_id(record.get("bdf")) or pci_bus_id(section(record, "bus").get("bdf"))
    unique = card_fields.unique_id_in_uuid(record.get("uuid")) or card_fields.unique_id(asic.get("asic_serial"))
    return Device(
        id=card_fields.device_id(unique, pci, number if index is None else index),
        vendor=Vendor.AMD,
        index=index,
        name=card_fields.card_name(asic.get("market_name"), section(record, "board").get("product_name")),
        pci_bus_id=pci,
        **_memory(record),
        utilization_percent=_first(parse_numbers.percent, record, "usage"),
        power_draw_w=_first(parse_numbers.watts, record, "power"),
        power_limit_w=_power_limit(section(record, "limit")),
        temperature_c=_first(parse_numbers.celsius, record, "temperature"),
        processes=_processes(record),
    )


def _first(read: Callable[[Any], float | None], record: Record, name: str) -> float | None:
    part = section(record, name)
    return next((value for key in _PARTS[name] if (value := read(part.get(key))) is not None), None)


def _memory(record: Record) -> card_fields.CardMemory:
    usage = section(record, "mem_usage")
    total, used, free = (parse_numbers.megabytes(usage.get(key)) for key in _PARTS["mem_usage"])
    return card_fields.memory(_first(parse_numbers.megabytes, record, "vram") if total is None else total, used, free)


def _power_limit(limit: Record) -> float | None:
    """Return the power limit. ROCm 7 has a section per limit; PPT0 is the socket's."""
    caps = ((section(limit, "ppt0"), "socket_power_limit"), (limit, "socket_power"), (limit, "current_power"))
    highest = ((section(limit, "ppt0"), "max_power_limit"), (limit, "max_power"), (limit, "power"))
    return card_fields.power_limit(*(parse_numbers.watts(part.get(key)) for part, key in (*caps, *highest)))


def _processes(record: Record) -> tuple[Process, ...] | None:
    entries = record.get("process_list", record.get("process_info"))
    listed = entries if isinstance(entries, list) else [entries]
    infos = [entry.get("process_info", entry) if isinstance(entry, dict) else entry for entry in listed]
    found = [process for info in infos if isinstance(info, dict) and (process := _process(info))]
    says_none = isinstance(entries, list) and not entries
    says_none |= any(isinstance(info, str) and info.lower().startswith("no running process") for info in infos)
    return tuple(found) if found or says_none else None


def _process(info: Record) -> Process | None:
    memory_mb = card_fields.process_memory(info.get("memory_usage"), info.get("mem_usage"))
    return card_fields.process(info.get("pid"), info.get("name"), memory_mb)
