"""The meaning of xpu-smi's columns, rows and metrics, and how tiles are combined into a device.

Rules:
- A figure of the whole device takes precedence over those of its tiles. Over tiles, memory and power are summed,
  utilisation is the mean, temperature the maximum; tiles without a figure are left out.
- The device's own utilisation takes precedence over that of its busiest engine.
- Releases since 2.0 name columns as nvidia-smi does (`power.draw (W)`), older ones in words.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from gpuyard.core.snapshot import Device, Vendor
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.intel.device_naming import device_id

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
    "XPUM_STATS_ENGINE_GROUP_COMPUTE_ALL_UTILIZATION": "engine_percent",
    "XPUM_STATS_ENGINE_GROUP_RENDER_ALL_UTILIZATION": "engine_percent",
    "XPUM_STATS_ENGINE_GROUP_MEDIA_ALL_UTILIZATION": "engine_percent",
    "XPUM_STATS_ENGINE_GROUP_COPY_ALL_UTILIZATION": "engine_percent",
    "XPUM_STATS_ENGINE_GROUP_3D_ALL_UTILIZATION": "engine_percent",
}
_TILE = re.compile(r"Tile\s+\d+\s*:", re.IGNORECASE)
_ENGINE = re.compile(r"Engine\s+\d+\s*:\s*([^,;\s]+)", re.IGNORECASE)
_CURRENT = re.compile(r"\b(?:current|avg)\s*:\s*([^,;，]*)", re.IGNORECASE)  # noqa: RUF001 - as in the output
_BYTES_FROM = 1048576.0


class XpuMetrics(Struct, frozen=True, kw_only=True):
    """The metrics of a device, or of one of its tiles."""

    utilization_percent: float | None = None
    engine_percent: float | None = None
    power_draw_w: float | None = None
    temperature_c: float | None = None
    memory_used_mb: float | None = None
    memory_total_mb: float | None = None
    power_limit_w: float | None = None


def is_known(label: str) -> bool:
    return _field(label) is not None


def from_labels(pairs: Iterable[tuple[str, Any]]) -> XpuMetrics:
    """Return the metrics from pairs of title and cell."""
    return _gather((field, raw) for label, raw in pairs if (field := _field(label)) is not None)


def from_metrics(pairs: Iterable[tuple[Any, Any]]) -> XpuMetrics:
    """Return the metrics from the JSON. Used memory is in MiB from xpu-smi, and in bytes from its daemon."""
    known = ((_METRICS[metric], raw) for metric, raw in pairs if isinstance(metric, str) and metric in _METRICS)
    return _gather((field, _in_mib(raw) if field == "memory_used_mb" else raw) for field, raw in known)


def from_cells(rows: Iterable[tuple[str, str]]) -> XpuMetrics:
    """Return the metrics from a table with several tiles, engines and averages per cell."""
    whole: list[tuple[str, str]] = []
    tiles: dict[int, list[tuple[str, str]]] = {}
    for label, cell in rows:
        device_part, *tile_parts = _TILE.split(cell)
        whole += _pairs(label, device_part)
        for number, part in enumerate(tile_parts):
            tiles.setdefault(number, []).extend(_pairs(label, part))
    return of_device(from_labels(whole), [from_labels(pairs) for pairs in tiles.values()])


def of_device(whole: XpuMetrics, tiles: Sequence[XpuMetrics]) -> XpuMetrics:
    together = XpuMetrics(
        utilization_percent=_mean([tile.utilization_percent for tile in tiles]),
        engine_percent=_highest([tile.engine_percent for tile in tiles]),
        power_draw_w=_total([tile.power_draw_w for tile in tiles]),
        temperature_c=_highest([tile.temperature_c for tile in tiles]),
        memory_used_mb=_total([tile.memory_used_mb for tile in tiles]),
        memory_total_mb=_total([tile.memory_total_mb for tile in tiles]),
        power_limit_w=_total([tile.power_limit_w for tile in tiles]),
    )
    return structs.replace(
        together, **{key: value for key, value in structs.asdict(whole).items() if value is not None}
    )


def as_device(index: int | None, pci_bus_id: str | None, known: XpuMetrics) -> Device:
    own = known.utilization_percent
    return Device(
        id=device_id(index, None, pci_bus_id),
        vendor=Vendor.INTEL,
        index=index,
        pci_bus_id=pci_bus_id,
        memory_total_mb=known.memory_total_mb,
        memory_used_mb=known.memory_used_mb,
        memory_free_mb=free_memory(known.memory_total_mb, known.memory_used_mb),
        utilization_percent=own if own is not None else known.engine_percent,
        power_draw_w=known.power_draw_w,
        power_limit_w=known.power_limit_w,
        temperature_c=known.temperature_c,
    )


def free_memory(total: float | None, used: float | None) -> float | None:
    return round(total - used, 2) if total is not None and used is not None and used <= total else None


def _field(label: str) -> str | None:
    text = label.strip().lower()
    return next((field for pattern, field in _FIELDS if pattern.match(text)), None)


def _gather(pairs: Iterable[tuple[str, Any]]) -> XpuMetrics:
    found: dict[str, float] = {}
    for field, raw in pairs:
        value = _READERS[field](raw)
        if value is not None:
            found[field] = max(value, found.get(field, value)) if field == "engine_percent" else value
    return XpuMetrics(**found)


def _pairs(label: str, part: str) -> Iterator[tuple[str, str]]:
    now = list(_CURRENT.finditer(part))
    yield label, now[-1][1].strip() if now else re.split("[,;]", part)[0].strip()
    for engine in _ENGINE.finditer(part):
        yield label, engine[1]


def _in_mib(raw: Any) -> Any:
    """Return the number in MiB; a million or more must be bytes."""
    value = parse_numbers.number(raw)
    return value / _BYTES_FROM if value is not None and value >= _BYTES_FROM else raw


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _total(values: Sequence[float | None]) -> float | None:
    total = sum(_known(values))
    return round(total, 2) if _known(values) and math.isfinite(total) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return round(sum(known) / len(known), 2) if known else None


def _highest(values: Sequence[float | None]) -> float | None:
    return max(_known(values), default=None)
