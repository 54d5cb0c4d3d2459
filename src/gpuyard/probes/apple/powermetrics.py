"""Parse the plists of `powermetrics --samplers gpu_power -f plist`: load and power of the GPU, not its memory.

- The last complete sample counts: an interrupted run ends with a partial one.
- Power counts in mW and energy in mJ. Intel Macs number their GPUs, and report load but not power.
"""

import plistlib
import re
from collections.abc import Iterable
from typing import Any
from xml.parsers.expat import ExpatError

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common import parse_numbers

POWERMETRICS = "powermetrics"
# One sample: power is averaged over the interval of 200 ms, which is most of the run time.
POWERMETRICS_COMMAND = (POWERMETRICS, "--samplers", "gpu_power", "-f", "plist", "-n", "1", "-i", "200")

# Errors that plistlib raises for a damaged document: a misplaced tag, an invalid date.
_PLIST_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, ExpatError)
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f]")  # process names contain them, and XML forbids them
_BETWEEN_PLISTS = re.compile(r"\x00|(?=<\?xml)")


def parse_powermetrics(text: str) -> Reading:
    documents = (_plist(chunk) for chunk in _BETWEEN_PLISTS.split(text))
    found = [_devices(document) for document in documents if isinstance(document, dict)]
    samples = [devices for devices in found if devices]
    if not samples:
        hint = f"print it with `{' '.join(POWERMETRICS_COMMAND)}`"
        raise ProbeGarbled(POWERMETRICS, "its output holds no whole sample of a GPU", hint=hint)
    return Reading(devices=max(reversed(samples), key=_known_figures))


def _known_figures(devices: Iterable[Device]) -> int:
    return sum((device.utilization_percent is not None) + (device.power_draw_w is not None) for device in devices)


def _plist(chunk: str) -> Any:
    """Return the document in `chunk`, or None if it is damaged or incomplete."""
    start, end = chunk.find("<plist"), chunk.rfind("</plist>")
    if start < 0 or end < start:
        return None
    document = _CONTROL.sub("", chunk[start : end + len("</plist>")])
    try:
        return plistlib.loads(document.encode("utf-8", "replace"), fmt=plistlib.FMT_XML)
    except _PLIST_ERRORS:
        return None


def _devices(document: dict[str, Any]) -> tuple[Device, ...]:
    model = parse_numbers.words(document.get("hw_model"))
    gpu, intel_gpus = document.get("gpu"), document.get("GPU")
    processor = document.get("processor")
    parts = processor if isinstance(processor, dict) else {}
    if isinstance(gpu, dict) or "gpu_power" in parts:
        own = gpu if isinstance(gpu, dict) else {}
        power = _power(own, parts, parse_numbers.number(document.get("elapsed_ns")))
        return (_measured(0, _name("Apple GPU", model), _complement(own.get("idle_ratio"), 1.0), power),)
    devices = []
    for index, found in enumerate(intel_gpus if isinstance(intel_gpus, list) else ()):
        if isinstance(found, dict):
            counters = found.get("misc_counters")
            # The keys are lines of the tool's text: padded with spaces, with a colon at the end.
            plain = {key.strip(" :"): value for key, value in counters.items()} if isinstance(counters, dict) else {}
            name = _name(parse_numbers.words(found.get("name")), model)
            devices.append(_measured(index, name, parse_numbers.percent(plain.get("GPU Busy"))))
    return tuple(devices)


def _power(gpu: dict[str, Any], processor: dict[str, Any], elapsed_ns: float | None) -> float | None:
    power = parse_numbers.watts(processor.get("gpu_power"), "mW")
    if power is not None:
        return power
    energy_mj = parse_numbers.number(gpu.get("gpu_energy", processor.get("gpu_energy")))
    if energy_mj is None or elapsed_ns is None or elapsed_ns <= 0:
        return None
    return parse_numbers.watts(energy_mj * 1e9 / elapsed_ns, "mW")


def _complement(idle: Any, whole: float) -> float | None:
    """Return the busy percentage, given the idle part of `whole`."""
    value = parse_numbers.number(idle)
    return parse_numbers.percent(100 * (1 - value / whole)) if value is not None and 0 <= value <= whole else None


def _name(name: str | None, model: str | None) -> str | None:
    return f"{name or 'GPU'} ({model})" if model else name


def _measured(index: int, name: str | None, busy: float | None, power: float | None = None) -> Device:
    return Device(
        id=f"apple-gpu-{index}",
        vendor=Vendor.APPLE,
        index=index,
        name=name,
        utilization_percent=busy,
        power_draw_w=power,
    )
