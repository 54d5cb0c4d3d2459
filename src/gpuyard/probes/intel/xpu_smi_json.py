"""The JSON of `xpu-smi discovery -j`, `stats -d N -j` and `ps -j`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from gpuyard.core.snapshot import Device, Process, Reading
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.intel import xpu_smi_fields
from gpuyard.probes.intel.device_naming import device_index, process_id, without_shared_uuids
from gpuyard.probes.intel.xpu_smi_text import NAME, identified, of_processes, process_memory

_Entry = Mapping[str, Any]
_BEGIN = re.compile(r"^[ \t]*(?=\{|\[\s*[\{\]])", re.MULTILINE)
_PROCESS_LISTS = ("device_util_by_proc_list", "process_list")
_DEVICE_LISTS = ("device_list", "datas")
_IDENTITY = {"uuid": "uuid", "name": "device_name", "pci": "pci_bdf_address"}
_DECODER = json.JSONDecoder(strict=False)


def find_json(text: str) -> str | None:
    """Return the text from the start of its JSON, without warnings before it."""
    match = _BEGIN.search(text)
    return text[match.end() :] if match else None


def parse_json(text: str) -> Reading:
    document = _load(text)
    if isinstance(document, dict):
        _refuse_error(document)
        for key in _PROCESS_LISTS:
            if isinstance(document.get(key), list):
                return of_processes(_processes(_objects(document[key])))
    devices = [device for entry in _entries(document) if (device := _device(entry)) is not None]
    if not devices and not _is_empty_list(document):
        raise ProbeGarbled(NAME, "its JSON describes no device")
    return Reading(devices=without_shared_uuids(devices))


def _load(text: str) -> Any:
    try:
        return _DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        raise ProbeGarbled(NAME, f"its JSON cannot be read: {str(error)[:100]}") from error


def _refuse_error(document: _Entry) -> None:
    said = parse_numbers.words(document.get("error"))
    if said is not None:
        raise ProbeGarbled(NAME, f"it reports an error: {said[:200]}")


def _entries(document: Any) -> Sequence[_Entry]:
    if isinstance(document, list):
        return _objects(document)
    lists = [document[key] for key in _DEVICE_LISTS if isinstance(document.get(key), list)]
    return _objects(lists[0]) if lists else [document]


def _objects(values: Sequence[Any]) -> list[_Entry]:
    return [value for value in values if isinstance(value, dict)]


def _is_empty_list(document: Any) -> bool:
    return isinstance(document, dict) and document.get("device_list") == []


def _device(entry: _Entry) -> Device | None:
    index = device_index(entry.get("device_id"))
    if isinstance(entry.get("device_level"), list) or isinstance(entry.get("tile_level"), list):
        return xpu_smi_fields.as_device(index, None, _statistics(entry)) if index is not None else None
    identity = {name: entry.get(key) for name, key in _IDENTITY.items()}
    if not any(parse_numbers.words(value) for value in identity.values()):
        return None
    device = identified(index, identity, _total_memory(entry))
    return structs.replace(device, memory_free_mb=parse_numbers.megabytes(entry.get("memory_free_size_byte"), "B"))


def _total_memory(entry: _Entry) -> float | None:
    in_bytes = parse_numbers.megabytes(entry.get("memory_physical_size_byte"), "B")
    return in_bytes or parse_numbers.megabytes(entry.get("memory_physical_size"))


def _statistics(entry: _Entry) -> xpu_smi_fields.XpuMetrics:
    tiles = entry.get("tile_level")
    lists = [tile.get("data_list") for tile in _objects(tiles)] if isinstance(tiles, list) else []
    each = [xpu_smi_fields.from_metrics(_metrics(metrics)) for metrics in lists]
    return xpu_smi_fields.of_device(xpu_smi_fields.from_metrics(_metrics(entry.get("device_level"))), each)


def _metrics(metrics: Any) -> Iterator[tuple[Any, Any]]:
    for metric in _objects(metrics) if isinstance(metrics, list) else ():
        yield metric.get("metrics_type"), metric.get("value", metric.get("avg"))


def _processes(entries: Sequence[_Entry]) -> Iterator[tuple[int, Process]]:
    for entry in entries:
        pid = process_id(entry.get("process_id", entry.get("pid")))
        index = device_index(entry.get("device_id"))
        if pid is not None and index is not None:
            name = parse_numbers.words(entry.get("process_name"))
            yield index, Process(pid=pid, memory_mb=process_memory(entry.get("mem_size")), name=name)
