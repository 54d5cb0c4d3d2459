"""AMD's cards as AMD SMI describes them, the tool (since ROCm 5.6) and the library, and fields that all AMD probes fill
in the same way, so that a card keeps its id with every probe.

- An id is "GPU-" and the 16 hexadecimal digits of the card's unique id, as ROCR_VISIBLE_DEVICES accepts it; without a
  unique id (APUs, many consumer cards), the PCI bus id; if that is unknown too, "amd-" and the card's number.
- Partitions of one card (CPX, DPX) share its unique id under most drivers. ROCr accepts only their index, so each
  partition, including the first, gets the id with "#0", "#1", ... appended, in list order. They have no `parent`: a
  partitioned card is not listed as a whole.
- A section that a release leaves out stays unknown; an output without any known section is rejected.
- A read of the tool costs two calls, `metric` and `process`. Ids, names and power limits are read once, and again when
  the card numbers change: a card that falls off the bus renumbers those after it. Without names or processes it is
  still a reading: a problem says what is missing."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, HealthFigures, Process, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.devices_and_processes import pci_bus_id, with_distinct_ids
from gpuyard.probes.run_tool import Deadline, OptionalCall, run_until

NAME = "amd-smi"
# A card as AMD SMI's JSON describes it.
Record = dict[str, Any]

# The sections of a record, each with the keys that releases have used, the best first. MI300 has no edge sensor.
SECTIONS = {
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
_UNIQUE_ID = re.compile(r"(?:0x([0-9a-f]{1,16})|(?:GPU-)?([0-9a-f]{16}))", re.IGNORECASE)
_UUID = re.compile(r"([0-9a-f]{2})[0-9a-f]{6}-0000-1000-80([0-9a-f]{2})-([0-9a-f]{12})", re.IGNORECASE)


def device_of(number: int, record: Record) -> Device:
    """Return the card of a record without its processes; `number` is its place in the list."""
    asic, limit = section(record, "asic"), section(record, "limit")
    index = parse_numbers.device_index(record.get("gpu"))
    pci = pci_bus_id(record.get("bdf")) or pci_bus_id(section(record, "bus").get("bdf"))
    unique = unique_id_in_uuid(record.get("uuid")) or unique_id(asic.get("asic_serial"))
    usage = section(record, "mem_usage")
    total, used, free = (parse_numbers.megabytes(usage.get(key)) for key in SECTIONS["mem_usage"])
    # ROCm 7 has a section per limit; PPT0 is the socket's. First the caps in force, then the highest that may be set.
    caps = ((section(limit, "ppt0"), "socket_power_limit"), (limit, "socket_power"), (limit, "current_power"))
    highest = ((section(limit, "ppt0"), "max_power_limit"), (limit, "max_power"), (limit, "power"))
    limits_w = (parse_numbers.watts(part.get(key)) for part, key in (*caps, *highest))
    errors = parse_numbers.whole(section(record, "ecc").get("total_uncorrectable_count"))
    return Device(
        id=device_id(unique, pci, number if index is None else index),
        vendor=Vendor.AMD,
        index=index,
        name=card_name(asic.get("market_name"), section(record, "board").get("product_name")),
        pci_bus_id=pci,
        **memory(_first(parse_numbers.megabytes, record, "vram") if total is None else total, used, free),
        utilization_percent=_first(parse_numbers.percent, record, "usage"),
        power_draw_w=_first(parse_numbers.watts, record, "power"),
        power_limit_w=next((limit_w for limit_w in limits_w if limit_w), None),  # releases print 0 W for no cap
        temperature_c=_first(parse_numbers.celsius, record, "temperature"),
        # `throttle_status` is no sign of heat: the tool also prints THROTTLED for a card at its power limit.
        health=None if errors is None else HealthFigures(ecc_uncorrected=errors),
    )


def section(record: Any, name: str) -> Record:
    """Return a section of a record, or {} for the "N/A" that a release prints in its place."""
    part = record.get(name) if isinstance(record, dict) else None
    return part if isinstance(part, dict) else {}


def _first(read: Callable[[Any], float | None], record: Record, name: str) -> float | None:
    part = section(record, name)
    return next((value for key in SECTIONS[name] if (value := read(part.get(key))) is not None), None)


def unique_id(raw: Any) -> str | None:
    """Return the 16 digits of an id such as "0x2150e7d042a1124", or None for zero, which means no id."""
    match = _UNIQUE_ID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        return None
    digits = (match[1] or match[2]).lower().zfill(16)
    return None if set(digits) in ({"0"}, {"f"}) else digits


def unique_id_in_uuid(raw: Any) -> str | None:
    """Return the unique id in AMD SMI's UUID: "af......-0000-1000-8054-e92b0a5d57c8" contains "af54e92b0a5d57c8".
    Values below 2**32 are no ids: under WSL the library fills in the PCI address."""
    match = _UUID.fullmatch(raw.strip()) if isinstance(raw, str) else None
    digits = unique_id(match[1] + match[2] + match[3]) if match else None
    return digits if digits and not digits.startswith("0" * 8) else None


def card_name(*candidates: Any) -> str | None:
    """Return the first real name; tools print a bare "0x1002" if the PCI id database lacks the card."""
    names = (parse_numbers.words(raw) for raw in candidates)
    return next((name for name in names if name and not re.fullmatch(r"0x[0-9a-f]+", name, re.IGNORECASE)), None)


def device_id(unique: str | None, pci: str | None, number: int) -> str:
    return f"GPU-{unique}" if unique else pci or f"amd-{number}"


def memory(total: float | None, used: float | None, free: float | None = None) -> dict[str, Any]:
    """Return the memory fields of a Device; a total of zero means that none of them was read."""
    if total == 0:
        total = used = free = None
    if free is None and total is not None and used is not None:
        free = round(max(0.0, total - used), 2)
    return {"memory_total_mb": total, "memory_used_mb": used, "memory_free_mb": free}


def process(pid: Any, name: Any, memory_mb: float | None) -> Process | None:
    number = parse_numbers.process_id(pid)
    return None if number is None else Process(pid=number, memory_mb=memory_mb, name=parse_numbers.words(name))


def process_of(info: Record) -> Process | None:
    """Return the process that AMD SMI describes; releases before 6.0 call its memory `mem`."""
    memory_mb = process_memory(info.get("memory_usage"), info.get("mem", info.get("mem_usage")))
    return process(info.get("pid"), info.get("name"), memory_mb)


def process_memory(usage: Any, whole: Any) -> float | None:
    """Return VRAM in MB, from AMD SMI's `memory_usage` in parts and its total `whole`, both in bytes. The parts come
    from /proc/PID/fdinfo, which is unreadable for another user's process: then they are zero, and the total from the
    driver is the VRAM, unless it is at most the parts outside the card. All zero means that nothing was `read`: a
    process on a card holds some memory."""
    parts = usage if isinstance(usage, dict) else {}
    vram, gtt, cpu = (parse_numbers.megabytes(parts.get(key), "B") for key in ("vram_mem", "gtt_mem", "cpu_mem"))
    outside = (gtt or 0.0) + (cpu or 0.0)
    everything = parse_numbers.megabytes(whole, "B") or 0.0
    if vram or not outside:
        return vram or everything or None
    return everything if everything > outside else vram


def without_repeated_memory(devices: Iterable[Device]) -> tuple[Device, ...]:
    """Return the devices, with unknown memory for a process that several cards list with the same figure. Some releases
    of AMD SMI (seen with ROCm 7.2) list every process on every card with its total memory."""
    listed = tuple(devices)
    entries = ({(process.pid, process.memory_mb) for process in device.processes or ()} for device in listed)
    times = Counter(chain.from_iterable(entries))
    found = []
    for device in listed:
        processes = [
            replace(process, memory_mb=None) if times[process.pid, process.memory_mb] > 1 else process
            for process in device.processes or ()
        ]
        found.append(replace(device, processes=tuple(processes)) if processes else device)
    return tuple(found)


def json_documents(text: str) -> Iterator[Any]:
    """Return the JSON arrays and objects in `text`, which may have warnings before, between and after them."""
    # Only at the start of a line: indented text belongs to a document, and a part of a truncated one is no answer.
    starts = re.finditer(r"(?:\A\s*|^)(?=[\[{])", text, re.MULTILINE)
    decoder, end = json.JSONDecoder(), 0
    for start in islice((match.end() for match in starts), 64):
        if start >= end:
            with contextlib.suppress(ValueError, RecursionError):
                value, end = decoder.raw_decode(text, start)
                yield value


def garbled(source: str, text: str) -> ProbeGarbled:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    said = f"no cards in its output: {first[:100]!r}" if first else "it printed nothing"
    return ProbeGarbled(source, said, hint=f"run `{source}` yourself to see why")


# The tool


def parse(text: str) -> Reading:
    """Parse the JSON of `list`, `static`, `metric` or `process`."""
    try:
        records = None
        for document in json_documents(text):  # a bare list, the list under "gpu_data" (ROCm 7), or one record
            listed = document.get("gpu_data", [document]) if isinstance(document, dict) else document
            if isinstance(listed, list):
                found = [record for record in listed if isinstance(record, dict) and "gpu" in record]
                if found or not listed:
                    records = found
                    break
        if records is None or (records and not any(map(_is_understood, records))):
            raise garbled(NAME, text)
        devices = with_distinct_ids(
            replace(device_of(number, record), processes=_processes(record)) for number, record in enumerate(records)
        )
        return Reading(devices=without_repeated_memory(devices))
    except RecursionError as error:
        raise ProbeGarbled(NAME, "its output is nested too deeply") from error


def merge(first: Reading, *others: Reading) -> Reading:
    """Return the devices of `first`, completed from the other readings by card number, with the best id."""
    devices = []
    for device in first.devices:
        sources = [other for reading in others for other in reading.devices if other.index == device.index]
        found = {
            field: next((value for source in sources if (value := getattr(source, field)) is not None), None)
            for field in device.__struct_fields__
            if getattr(device, field) is None
        }
        best = min((device, *sources), key=lambda each: (not each.id.startswith("GPU-"), each.id.startswith("amd-")))
        devices.append(replace(device, **{**found, "id": best.id}))
    problems = tuple(problem for reading in (first, *others) for problem in reading.problems)
    return Reading(devices=with_distinct_ids(devices), problems=problems)


class AmdSmi:
    def __init__(self) -> None:
        self._listed: Reading | None = None
        self._static: Reading | None = None
        self._indexes: set[int | None] = set()
        self._statics, self._users = (OptionalCall(Vendor.AMD, f"`{NAME} {each}`") for each in ("static", "process"))

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        # First, so that a read that runs out of time leaves less to do for the next. Without ids another probe is
        # better: a lease must not see a card under two ids.
        known = self._listed
        listed = known or self._list(deadline)
        # All sections of `metric` are slow. Guests and old releases lack some options.
        try:
            metric = _call("metric", "--usage", "--power", "--temperature", "--mem-usage", "--ecc", deadline=deadline)
        except ProbeCrashed:
            metric = _call("metric", deadline=deadline)
        indexes = {device.index for device in metric.devices}
        if known and indexes != self._indexes:
            listed = self._list(deadline)
        static = self._static or self._statics.read(lambda: _call("static", deadline=deadline), deadline)
        processes = self._users.read(lambda: _call("process", deadline=deadline), deadline)
        self._indexes, self._static = indexes, None if static.problems else static
        return merge(metric, listed, static, processes)

    def _list(self, deadline: Deadline) -> Reading:
        self._listed, self._static = None, None
        listed = _call("list", deadline=deadline)
        self._listed, self._indexes = listed, {device.index for device in listed.devices}
        return listed


def _call(*arguments: str, deadline: Deadline) -> Reading:
    return run_until((NAME, *arguments, "--json"), deadline).read(parse)


def _is_understood(record: Record) -> bool:
    """Return whether the record has a known section; an unreadable section is the string "N/A"."""
    for name, keys in SECTIONS.items():
        part = record.get(name)
        if isinstance(part, str) or (isinstance(part, dict) and not part.keys().isdisjoint(keys)):
            return True
    return not record.keys().isdisjoint({"bdf", "uuid", "process_list", "process_info"})


def _processes(record: Record) -> tuple[Process, ...] | None:
    entries = record.get("process_list", record.get("process_info"))
    listed = entries if isinstance(entries, list) else [entries]
    infos = [entry.get("process_info", entry) if isinstance(entry, dict) else entry for entry in listed]
    found = [process for info in infos if isinstance(info, dict) and (process := process_of(info))]
    says_none = isinstance(entries, list) and not entries
    says_none |= any(isinstance(info, str) and info.lower().startswith("no running process") for info in infos)
    return tuple(found) if found or says_none else None
