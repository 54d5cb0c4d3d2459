"""A Mac's GPU: power from `powermetrics`, which needs root, and the rest from `ioreg`, which does not. Both run in
parallel. The error of a failed tool becomes a problem of the reading, or part of the error if both failed.

- Of the plists of `powermetrics` the last complete one counts: an interrupted run ends with a partial one. Power counts
  in mW and energy in mJ. Intel Macs number their GPUs, and report load but not power.
- In `ioreg`, `In use system memory` is the memory in use. The same words with `(driver)` behind them, and `Alloc system
  memory`, are other figures, and so are statistics of nested nodes. Unified memory has no size there; a card in an
  Intel Mac reports its own used and free memory.
"""

import plistlib
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from xml.parsers.expat import ExpatError

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import ProbeDenied, ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.run_tool import Deadline, find_any_tool, problem_beside, run_tool, run_until

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


IOREG = "ioreg"
IOREG_COMMAND = (IOREG, "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")

_NODE = re.compile(r"[\s|]*\+-o\s.*<class\s+([^,>]+)")
_PROPERTY = re.compile(r'[\s|]*"([^"]+)"\s*=\s*(.*)')
_TEXT = re.compile(r'<?"([^"]*)"')
# A number must be followed by something: the last number of a truncated output may lack digits.
_TOKEN = re.compile(r'"([^"]*)"\s*=\s*(?:([-+.\w]+)(?=\s*[,}]))?|"[^"]*"|[{(]|[)}]')


class _IoregNode(Struct, kw_only=True):
    """One node of the tree; unnamed if the output starts in the middle of it."""

    class_name: str | None = None
    model: str | None = None
    statistics: dict[str, str] | None = None


def parse_ioreg(text: str) -> Reading:
    found = [node for node in _nodes(text) if node.statistics is not None or "Accelerator" in (node.class_name or "")]
    if not found:
        raise ProbeGarbled(IOREG, "its output lists no accelerator")
    return Reading(devices=tuple(_device(index, node) for index, node in enumerate(found)))


def _nodes(text: str) -> Iterator[_IoregNode]:
    node = _IoregNode()
    for line in text.splitlines():
        header = _NODE.match(line)
        if header:
            yield node
            node = _IoregNode(class_name=parse_numbers.words(header[1]))
            continue
        match = _PROPERTY.match(line)
        if match is None:
            continue
        if match[1] == "model":
            model = _TEXT.match(match[2])
            node.model = parse_numbers.words(model[1]) if model else None
        elif match[1] == "PerformanceStatistics":
            if node.statistics is not None:  # lines picked out of the tree, without the nodes they came from
                yield node
                node = _IoregNode()
            node.statistics = _statistics(match[2])
    yield node


def _statistics(value: str) -> dict[str, str]:
    """Return the numbers of the outermost `{"key"=number,...}`."""
    found: dict[str, str] = {}
    depth = 0
    for token in _TOKEN.finditer(value):
        if token[1] is not None:
            if depth == 1 and token[2] is not None:
                found.setdefault(token[1], token[2])
        elif token[0] in "{(":
            depth += 1
        elif token[0] in ")}":
            depth -= 1
            if depth <= 0:
                break
    return found


def _device(index: int, node: _IoregNode) -> Device:
    said = node.statistics or {}
    # The card's own memory, or the used part of the machine's.
    used, free = (parse_numbers.megabytes(said.get(key), "B") for key in ("vramUsedBytes", "vramFreeBytes"))
    total = round(used + free, 2) if used is not None and free is not None else None
    if not used and not free:
        used, free, total = parse_numbers.megabytes(said.get("In use system memory"), "B"), None, None
    busy = parse_numbers.percent(said.get("Device Utilization %"))
    return Device(
        # Registry ids change at each boot.
        id=f"apple-gpu-{index}",
        vendor=Vendor.APPLE,
        index=index,
        name=node.model or node.class_name,
        memory_used_mb=used,
        memory_free_mb=free,
        memory_total_mb=total,
        utilization_percent=busy if busy is not None else parse_numbers.percent(said.get("GPU Activity(%)")),
        power_draw_w=parse_numbers.watts(said.get("Total Power(W)")),
        temperature_c=parse_numbers.celsius(said.get("Temperature(C)")),
    )


_NEEDS_ROOT = "power needs root: run gpuyard with sudo; without it everything else is read from ioreg"
# From the least fixable error to the most ordinary: of two errors the earlier one here is shown.
_TELLING = ("timeout", "crashed", "garbled", "failed", "denied", "missing")


class AppleProbe:
    def __init__(self) -> None:
        self._denied: ProbeDenied | None = None

    def read(self, timeout_s: float) -> Reading:
        find_any_tool((POWERMETRICS, IOREG))
        with ThreadPoolExecutor(max_workers=3) as pool:
            power = pool.submit(self._ask_powermetrics, timeout_s)
            registry = pool.submit(_attempt, read_ioreg, timeout_s)
            limit = pool.submit(unified_memory_limit_mb, timeout_s)
        reading = _combine(registry.result(), power.result())
        return replace(reading, devices=tuple(_with_total(device, limit.result()) for device in reading.devices))

    def _ask_powermetrics(self, timeout_s: float) -> Reading | ProbeError:
        """Run powermetrics. After a refusal it is not run again, because a process does not become root later."""
        if self._denied is not None:
            return self._denied
        answer = _attempt(read_powermetrics, timeout_s)
        self._denied = answer if isinstance(answer, ProbeDenied) else None
        return answer


def read_powermetrics(timeout_s: float) -> Reading:
    try:
        return parse_powermetrics(run_tool(POWERMETRICS_COMMAND, timeout_s).require_success())
    except ProbeDenied as error:
        raise ProbeDenied(error.source, error.message, hint=_NEEDS_ROOT) from error


def read_ioreg(timeout_s: float) -> Reading:
    return parse_ioreg(run_tool(IOREG_COMMAND, timeout_s).require_success())


def unified_memory_limit_mb(timeout_s: float) -> float | None:
    """Return how much of the machine's memory the GPU may use, or None if `sysctl` does not report it.

    macOS does not report its default: two thirds of up to 36 GB, three quarters above. Later releases allow somewhat
    more (84% of 128 GB was seen), so this is a lower bound.
    """
    deadline = Deadline(timeout_s)
    ram_mb = parse_numbers.megabytes(_sysctl("hw.memsize", deadline), "B")
    set_mb = parse_numbers.megabytes(_sysctl("iogpu.wired_limit_mb", deadline), "MB")
    if set_mb:
        return min(set_mb, ram_mb) if ram_mb else set_mb
    if not ram_mb:
        return None
    return round(ram_mb * (2 / 3 if ram_mb <= 36 * 1024 else 3 / 4), 2)


def _sysctl(name: str, deadline: Deadline) -> str | None:
    try:
        return run_until(["sysctl", "-n", name], deadline).require_success().strip()
    except ProbeError:
        return None


def _attempt(read: Callable[[float], Reading], timeout_s: float) -> Reading | ProbeError:
    try:
        return read(timeout_s)
    except ProbeError as error:
        return error


def _combine(registry: Reading | ProbeError, power: Reading | ProbeError) -> Reading:
    if isinstance(registry, ProbeError):
        if isinstance(power, ProbeError):
            first, second = sorted((registry, power), key=lambda error: _TELLING.index(error.kind))
            raise type(first)(first.source, f"{first.message}; {second}", hint=first.hint or second.hint)
        return Reading(devices=power.devices, problems=(problem_beside(registry, Vendor.APPLE),))
    if isinstance(power, ProbeError):
        return Reading(devices=registry.devices, problems=(problem_beside(power, Vendor.APPLE),))
    return Reading(devices=_merged(registry.devices, power.devices))


def _merged(registry: tuple[Device, ...], power: tuple[Device, ...]) -> tuple[Device, ...]:
    """Merge the two readings. The tools number the GPUs of Intel Macs differently, so only a single GPU is merged."""
    if len(registry) != 1 or len(power) != 1:
        return registry
    known, extra = registry[0], power[0]
    busy = known.utilization_percent if known.utilization_percent is not None else extra.utilization_percent
    power_w = extra.power_draw_w if extra.power_draw_w is not None else known.power_draw_w
    return (replace(known, name=known.name or extra.name, utilization_percent=busy, power_draw_w=power_w),)


def _with_total(device: Device, limit_mb: float | None) -> Device:
    """Return the device with the size of unified memory; GPUs of Intel Macs have their own memory."""
    is_unified = (device.name or "Apple").startswith(("Apple", "AGX"))
    if device.memory_total_mb is not None or not is_unified:
        return device
    used = device.memory_used_mb
    free = None if limit_mb is None or used is None else max(0.0, limit_mb - used)
    return replace(device, memory_total_mb=limit_mb, memory_free_mb=free)
