"""The meaning of xpu-smi's columns, rows and metrics, and how they make up a device.

Rules:
- A figure of the whole device takes precedence over those of its tiles. Over tiles, memory and power are summed,
  utilisation is the mean, temperature the maximum; tiles without a figure are left out.
- The device's own utilisation takes precedence over that of its busiest engine.
- Releases since 2.0 name columns as nvidia-smi does (`power.draw (W)`), older ones in words.
- `ps` counts memory in kB of 1,000 bytes before 1.3, in KiB since.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.intel.intel_cards import device_id, processes_of

NAME = "xpu-smi"
KIB, OLD_KB = 1024, 1000
# Figures of a device, or of one of its tiles, by the field of Device, and "engine_percent" of its busiest engine.
Metrics = dict[str, Any]

_READERS: dict[str, Callable[[Any], float | None]] = {
    "utilization_percent": parse_numbers.percent,
    "engine_percent": parse_numbers.percent,
    "power_draw_w": parse_numbers.watts,
    "temperature_c": parse_numbers.celsius,
    "memory_used_mb": parse_numbers.megabytes,
    "memory_total_mb": parse_numbers.megabytes,
    "power_limit_w": parse_numbers.watts,
}
_FIELDS = (
    (re.compile(r"gpu utilization|average % utilization|utilization\.gpu\b"), "utilization_percent"),
    (re.compile(r"gpu power\b|power\.draw(?!\.)"), "power_draw_w"),
    (re.compile(r"gpu core temperature|temperature\.gpu\b"), "temperature_c"),
    (re.compile(r"gpu memory used|memory\.used\b"), "memory_used_mb"),
    (re.compile(r"memory\.total\b"), "memory_total_mb"),
    (re.compile(r"power\.limit\b"), "power_limit_w"),
    (re.compile(r"utilization\.(?:compute|render|media|copy)\b|.*engine.*%"), "engine_percent"),
)
_METRICS = {
    "XPUM_STATS_GPU_UTILIZATION": "utilization_percent",
    "XPUM_STATS_POWER": "power_draw_w",
    "XPUM_STATS_GPU_CORE_TEMPERATURE": "temperature_c",
    "XPUM_STATS_MEMORY_USED": "memory_used_mb",
    **{
        f"XPUM_STATS_ENGINE_GROUP_{engine}_ALL_UTILIZATION": "engine_percent"
        for engine in ("COMPUTE", "RENDER", "MEDIA", "COPY", "3D")
    },
}
_BYTES_FROM = 1048576.0


def field_of(label: str) -> str | None:
    """Return the field that a column or row with this title is about."""
    text = label.strip().lower()
    return next((field for pattern, field in _FIELDS if pattern.match(text)), None)


def from_labels(pairs: Iterable[tuple[str, Any]]) -> Metrics:
    """Return the metrics from pairs of title and cell."""
    return _gather((field_of(label), raw) for label, raw in pairs)


def from_metrics(pairs: Iterable[tuple[Any, Any]]) -> Metrics:
    """Return the metrics from the JSON. Used memory is in MiB from xpu-smi, and in bytes from its daemon."""
    known = []
    for metric, raw in pairs:
        field = _METRICS.get(metric) if isinstance(metric, str) else None
        value = parse_numbers.number(raw) or 0.0
        is_in_bytes = field == "memory_used_mb" and value >= _BYTES_FROM
        known.append((field, value / _BYTES_FROM if is_in_bytes else raw))
    return _gather(known)


def of_device(whole: Metrics, tiles: Sequence[Metrics]) -> Metrics:
    """Return the metrics of a device: its own, and where it has none, those of its tiles together."""
    together = {}
    for field in _READERS:
        values = [tile[field] for tile in tiles if field in tile]
        if not values:
            continue
        if field in {"engine_percent", "temperature_c"}:
            together[field] = max(values)
        else:
            together[field] = round(sum(values) / (len(values) if field == "utilization_percent" else 1), 2)
    return {field: value for field, value in together.items() if math.isfinite(value)} | whole


def as_device(index: int | None, bus_id: str | None, known: Metrics) -> Device:
    figures: dict[str, Any] = {field: known.get(field) for field in _READERS}
    engine_percent = figures.pop("engine_percent")
    if figures["utilization_percent"] is None:
        figures["utilization_percent"] = engine_percent
    figures["memory_free_mb"] = free_memory(figures["memory_total_mb"], figures["memory_used_mb"])
    card_id = device_id(index, None, bus_id)
    return Device(id=card_id, vendor=Vendor.INTEL, index=index, pci_bus_id=bus_id, **figures)


def free_memory(total: float | None, used: float | None) -> float | None:
    return round(total - used, 2) if total is not None and used is not None and used <= total else None


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


def of_processes(rows: Iterable[tuple[Any, Any, Any, Any]], unit_bytes: int) -> Reading:
    """Return devices with only their processes known, from rows of device number, pid, name and memory in this unit."""
    users: dict[int, list[Process]] = {}
    for device, pid, name, memory in rows:
        index, number = parse_numbers.device_index(device), parse_numbers.process_id(pid)
        count = parse_numbers.number(memory)
        if index is not None and number is not None:
            memory_mb = None if count is None else parse_numbers.megabytes(count * unit_bytes, "B")
            process = Process(pid=number, memory_mb=memory_mb, name=parse_numbers.words(name))
            users.setdefault(index, []).append(process)
    devices = (
        Device(id=device_id(index), vendor=Vendor.INTEL, index=index, processes=processes_of(users[index]))
        for index in sorted(users)
    )
    return Reading(devices=tuple(devices))


def _gather(pairs: Iterable[tuple[str | None, Any]]) -> Metrics:
    found: dict[str, float] = {}
    for field, raw in pairs:
        value = _READERS[field](raw) if field else None
        if field and value is not None:
            found[field] = max(value, found.get(field, value)) if field == "engine_percent" else value
    return found
