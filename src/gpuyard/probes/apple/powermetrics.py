"""Parse the output of `powermetrics --samplers gpu_power`, as a plist or as text.

It reports the load and power of the GPU, not its memory. Rules:
- The last complete sample counts: an interrupted run ends with a partial one.
- Power counts in mW and energy in mJ, in either form.
- An excerpt may lack the headings of samples and sections: then only lines that are entirely a GPU figure count, and a
  repeated figure, or one after the power, starts a new sample.
- Intel Macs number their GPUs, and report load but not power.
"""

import plistlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from xml.parsers.expat import ExpatError

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.common import parse_numbers

SOURCE = "powermetrics"
# One sample: power is averaged over the interval of 200 ms, which is most of the run time.
COMMAND = (SOURCE, "--samplers", "gpu_power", "-f", "plist", "-n", "1", "-i", "200")

# Errors that plistlib raises for a damaged document: a misplaced tag, an invalid date.
_PLIST_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, ExpatError)
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f]")  # process names contain them, and XML forbids them
_BETWEEN_PLISTS = re.compile(r"\x00|(?=<\?xml)")
_SAMPLE = re.compile(r"^\*\*\* Sampled system activity", re.MULTILINE)
_GPU_SECTION = re.compile(r"^\*{4}\s*GPU usage\s*\*{4}[^\n]*\n(.*?)(?=^\*{3}|\Z)", re.MULTILINE | re.DOTALL)
_MODEL = re.compile(r"^Machine model:[ \t]*(\S[^\n]*)", re.MULTILINE)

# The unit is part of each pattern: a truncated figure has lost it.
_ACTIVE = re.compile(r"^GPU (?:HW )?active residency:\s*([\d.]+%)", re.MULTILINE | re.ASCII)
_IDLE = re.compile(r"^GPU idle residency:\s*([\d.]+%)", re.MULTILINE | re.ASCII)
_POWER = re.compile(r"^GPU Power:\s*([\d.]+\s*m?W)\b", re.MULTILINE | re.ASCII)
_NUMBERED = re.compile(r"^GPU (\d{1,3}) (?!\[)([^\n]+)", re.MULTILINE | re.ASCII)
_NUMBERED_BUSY = re.compile(r"GPU Busy\s*:\s*([\d.]+%)", re.ASCII)
_NUMBERED_IDLE = re.compile(r"C-state residency\s*:\s*([\d.]+%)", re.ASCII)
# Lines that are unambiguous without a heading.
_FIGURE_LINE = re.compile(
    r"(GPU (?:HW )?active residency|GPU idle residency):\s*[\d.]+%\s*(?:\(.*)?"
    r"|(GPU Power):\s*[\d.]+\s*m?W"
    r"|(GPU \d{1,3} (?:name|GPU Busy|C-state residency))(?: \w+|\s*:\s*[\d.]+%\s*(?:\(.*)?)",
    re.ASCII,
)


def parse(text: str) -> Reading:
    if "<plist" in text:
        documents = (_plist(chunk) for chunk in _BETWEEN_PLISTS.split(text))
        found = [_plist_devices(document) for document in documents if isinstance(document, dict)]
    else:
        name = _MODEL.search(text)
        model = parse_numbers.words(name[1]) if name else None
        _, *blocks = _SAMPLE.split(text)
        found = [_text_devices(block, model) for block in blocks or _headless_samples(text)]
    samples = [devices for devices in found if devices]
    if not samples:
        raise ProbeGarbled(SOURCE, "its output holds no whole sample of a GPU")
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


def _plist_devices(document: dict[str, Any]) -> tuple[Device, ...]:
    model = parse_numbers.words(document.get("hw_model"))
    gpu, intel_gpus = document.get("gpu"), document.get("GPU")
    processor = document.get("processor")
    parts = processor if isinstance(processor, dict) else {}
    if isinstance(gpu, dict) or "gpu_power" in parts:
        own = gpu if isinstance(gpu, dict) else {}
        power = _plist_power(own, parts, parse_numbers.number(document.get("elapsed_ns")))
        return (_device(0, _name("Apple GPU", model), _complement(own.get("idle_ratio"), 1.0), power),)
    devices = []
    for index, found in enumerate(intel_gpus if isinstance(intel_gpus, list) else ()):
        if isinstance(found, dict):
            counters = found.get("misc_counters")
            # The keys are lines of the text form: padded with spaces, with a colon at the end.
            plain = {key.strip(" :"): value for key, value in counters.items()} if isinstance(counters, dict) else {}
            name = _name(parse_numbers.words(found.get("name")), model)
            devices.append(_device(index, name, parse_numbers.percent(plain.get("GPU Busy"))))
    return tuple(devices)


def _plist_power(gpu: dict[str, Any], processor: dict[str, Any], elapsed_ns: float | None) -> float | None:
    power = parse_numbers.watts(processor.get("gpu_power"), "mW")
    if power is not None:
        return power
    energy_mj = parse_numbers.number(gpu.get("gpu_energy", processor.get("gpu_energy")))
    if energy_mj is None or elapsed_ns is None or elapsed_ns <= 0:
        return None
    return parse_numbers.watts(energy_mj * 1e9 / elapsed_ns, "mW")


def _headless_samples(text: str) -> list[str]:
    """Return the samples of a text without sample headings."""
    sections = [section[0] for section in _GPU_SECTION.finditer(text)]
    if sections:
        return [text] if len(sections) == 1 else sections
    samples: list[dict[str, str]] = [{}]
    for key, line in _figure_lines(text):
        # Power is the last figure of a GPU sample: the next line belongs to the next sample.
        if key in samples[-1] or "GPU Power" in samples[-1]:
            samples.append({})
        samples[-1][key] = line
    return ["\n".join(sample.values()) for sample in samples]


def _figure_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the lines that are entirely a GPU figure, with the name of the figure."""
    for line in text.splitlines():
        match = _FIGURE_LINE.fullmatch(line.strip())
        if match:
            yield match[match.lastindex or 0], match[0]


def _text_devices(block: str, model: str | None) -> tuple[Device, ...]:
    section = _GPU_SECTION.search(block)
    usage = section[1] if section else "\n".join(line for _, line in _figure_lines(block))
    numbered = _NUMBERED.findall(usage)
    if numbered:
        return _text_intel_devices(numbered, model)
    busy = _busy(usage, _ACTIVE, _IDLE)
    # The processor section prints a slightly different figure, which is used if there is no other.
    power = parse_numbers.watts(_first(_POWER, usage) or _first(_POWER, block))
    if busy is None and power is None:
        return ()
    return (_device(0, _name("Apple GPU", model), busy, power),)


def _text_intel_devices(numbered: Sequence[tuple[str, str]], model: str | None) -> tuple[Device, ...]:
    said: dict[int, list[str]] = {}
    for index, line in numbered:
        said.setdefault(int(index), []).append(line)
    devices = []
    for number, lines in sorted(said.items()):
        names = (parse_numbers.words(line.removeprefix("name ")) for line in lines if line.startswith("name "))
        busy = _busy("\n".join(lines), _NUMBERED_BUSY, _NUMBERED_IDLE)
        devices.append(_device(number, _name(next(names, None), model), busy))
    return tuple(devices)


def _busy(text: str, active: re.Pattern[str], idle: re.Pattern[str]) -> float | None:
    busy = parse_numbers.percent(_first(active, text))
    return busy if busy is not None else _complement(_first(idle, text), 100.0)


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None


def _complement(idle: Any, whole: float) -> float | None:
    """Return the busy percentage, given the idle part of `whole`."""
    value = parse_numbers.number(idle)
    return parse_numbers.percent(100 * (1 - value / whole)) if value is not None and 0 <= value <= whole else None


def _name(name: str | None, model: str | None) -> str | None:
    return f"{name or 'GPU'} ({model})" if model else name


def _device(index: int, name: str | None, busy: float | None, power: float | None = None) -> Device:
    return Device(
        id=f"apple-gpu-{index}",
        vendor=Vendor.APPLE,
        index=index,
        name=name,
        utilization_percent=busy,
        power_draw_w=power,
    )
