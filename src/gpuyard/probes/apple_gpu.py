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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from xml.parsers.expat import ExpatError

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.errors import ProbeDenied, ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Reading, Vendor
from gpuyard.probes.parse_numbers import celsius, megabytes, number, percent, watts, words
from gpuyard.probes.run_tool import Deadline, find_any_tool, problem_beside, run_tool, run_until

POWERMETRICS, IOREG = "powermetrics", "ioreg"
# One sample: power is averaged over the interval of 200 ms, which is most of the run time.
POWERMETRICS_COMMAND = (POWERMETRICS, "--samplers", "gpu_power", "-f", "plist", "-n", "1", "-i", "200")

# Errors that plistlib raises for a damaged document: a misplaced tag, an invalid date.
_PLIST_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, ExpatError)


def _device(index: int, name: str | None, busy: float | None, **figures: Any) -> Device:
    # Registry ids change at each boot.
    vendor, device_id = Vendor.APPLE, f"apple-gpu-{index}"
    return Device(id=device_id, vendor=vendor, index=index, name=name, utilization_percent=busy, **figures)


def parse_powermetrics(text: str) -> Reading:
    for chunk in reversed(re.split(r"\x00|(?=<\?xml)", text)):
        start, end = chunk.find("<plist"), chunk.rfind("</plist>")
        # Process names contain control characters, and XML forbids them.
        plain = re.sub(r"[\x01-\x08\x0b\x0c\x0e-\x1f]", "", chunk[start : end + len("</plist>")])
        try:
            document = plistlib.loads(plain.encode("utf-8", "replace"), fmt=plistlib.FMT_XML) if start >= 0 else None
        except _PLIST_ERRORS:
            continue
        if isinstance(document, dict) and (devices := _devices(document)):
            return Reading(devices=devices)
    hint = f"print it with `{' '.join(POWERMETRICS_COMMAND)}`"
    raise ProbeGarbled(POWERMETRICS, "its output holds no whole sample of a GPU", hint=hint)


def _devices(document: dict[str, Any]) -> tuple[Device, ...]:
    model, gpu, processor = words(document.get("hw_model")), document.get("gpu"), document.get("processor")
    parts = processor if isinstance(processor, dict) else {}
    if isinstance(gpu, dict) or "gpu_power" in parts:
        own = gpu if isinstance(gpu, dict) else {}
        power_w, idle = watts(parts.get("gpu_power"), "mW"), number(own.get("idle_ratio"))
        energy_mj, elapsed_ns = (
            number(own.get("gpu_energy", parts.get("gpu_energy"))),
            number(document.get("elapsed_ns")),
        )
        if power_w is None and energy_mj is not None and elapsed_ns is not None and elapsed_ns > 0:
            power_w = watts(energy_mj * 1e9 / elapsed_ns, "mW")
        busy = percent(100 * (1 - idle)) if idle is not None and 0 <= idle <= 1 else None
        return (_device(0, f"Apple GPU ({model})" if model else "Apple GPU", busy, power_draw_w=power_w),)
    devices, intel_gpus = [], document.get("GPU")
    for index, found in enumerate(intel_gpus if isinstance(intel_gpus, list) else ()):
        if isinstance(found, dict):
            counters, name = found.get("misc_counters"), words(found.get("name"))
            # The keys are lines of the tool's text: padded with spaces, with a colon at the end.
            plain = {key.strip(" :"): value for key, value in counters.items()} if isinstance(counters, dict) else {}
            full_name = f"{name or 'GPU'} ({model})" if model else name
            devices.append(_device(index, full_name, percent(plain.get("GPU Busy"))))
    return tuple(devices)


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
    devices = []
    for index, node in enumerate(found):
        said = node.statistics or {}
        # The card's own memory, or the used part of the machine's.
        used, free = (megabytes(said.get(key), "B") for key in ("vramUsedBytes", "vramFreeBytes"))
        total = round(used + free, 2) if used is not None and free is not None else None
        if not used and not free:
            used, free, total = megabytes(said.get("In use system memory"), "B"), None, None
        busy = percent(said.get("Device Utilization %"))
        device = _device(
            index,
            node.model or node.class_name,
            busy if busy is not None else percent(said.get("GPU Activity(%)")),
            memory_used_mb=used,
            memory_free_mb=free,
            memory_total_mb=total,
            power_draw_w=watts(said.get("Total Power(W)")),
            temperature_c=celsius(said.get("Temperature(C)")),
        )
        devices.append(device)
    return Reading(devices=tuple(devices))


def _nodes(text: str) -> Iterator[_IoregNode]:
    node = _IoregNode()
    for line in text.splitlines():
        if header := re.match(r"[\s|]*\+-o\s.*<class\s+([^,>]+)", line):
            yield node
            node = _IoregNode(class_name=words(header[1]))
            continue
        match = re.match(r'[\s|]*"(model|PerformanceStatistics)"\s*=\s*(.*)', line)
        if match is None:
            continue
        if match[1] == "model":
            model = re.match(r'<?"([^"]*)"', match[2])
            node.model = words(model[1]) if model else None
            continue
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


class AppleProbe:
    def __init__(self) -> None:
        self._denied: ProbeDenied | None = None

    def read(self, timeout_s: float) -> Reading:
        find_any_tool((POWERMETRICS, IOREG))
        with ThreadPoolExecutor(max_workers=3) as pool:
            # After a refusal powermetrics is not run again, because a process does not become root later.
            asked = None if self._denied else pool.submit(_attempt, read_powermetrics, timeout_s)
            registry = pool.submit(_attempt, _read_ioreg, timeout_s)
            limit = pool.submit(unified_memory_limit_mb, timeout_s)
        power = asked.result() if asked else self._denied
        self._denied = power if isinstance(power, ProbeDenied) else None
        reading = _combine(registry.result(), power or Reading())
        return replace(reading, devices=tuple(_with_total(device, limit.result()) for device in reading.devices))


def read_powermetrics(timeout_s: float) -> Reading:
    try:
        return parse_powermetrics(run_tool(POWERMETRICS_COMMAND, timeout_s).require_success())
    except ProbeDenied as error:
        hint = "power needs root: run gpuyard with sudo; without it everything else is read from ioreg"
        raise ProbeDenied(error.source, error.message, hint=hint) from error


def _read_ioreg(timeout_s: float) -> Reading:
    command = (IOREG, "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
    return parse_ioreg(run_tool(command, timeout_s).require_success())


def _attempt(read: Callable[[float], Reading], timeout_s: float) -> Reading | ProbeError:
    try:
        return read(timeout_s)
    except ProbeError as error:
        return error


def unified_memory_limit_mb(timeout_s: float) -> float | None:
    """Return how much of the machine's memory the GPU may use, or None if `sysctl` does not report it.

    macOS does not report its default: two thirds of up to 36 GB, three quarters above. Later releases allow somewhat
    more (84% of 128 GB was seen), so this is a lower bound.
    """
    deadline = Deadline(timeout_s)

    def ask(name: str, unit: str) -> float | None:
        try:
            return megabytes(run_until(["sysctl", "-n", name], deadline).require_success(), unit)
        except ProbeError:
            return None

    ram_mb, set_mb = ask("hw.memsize", "B"), ask("iogpu.wired_limit_mb", "MB")
    if set_mb:
        return min(set_mb, ram_mb) if ram_mb else set_mb
    return round(ram_mb * (2 / 3 if ram_mb <= 36 * 1024 else 3 / 4), 2) if ram_mb else None


def _combine(registry: Reading | ProbeError, power: Reading | ProbeError) -> Reading:
    if isinstance(registry, ProbeError):
        if isinstance(power, ProbeError):
            # The least fixable error is shown.
            telling = ("timeout", "crashed", "garbled", "failed", "denied", "missing")
            first, second = sorted((registry, power), key=lambda error: telling.index(error.kind))
            raise type(first)(first.source, f"{first.message}; {second}", hint=first.hint or second.hint)
        return Reading(devices=power.devices, problems=(problem_beside(registry, Vendor.APPLE),))
    if isinstance(power, ProbeError):
        return Reading(devices=registry.devices, problems=(problem_beside(power, Vendor.APPLE),))
    if len(registry.devices) != 1 or len(power.devices) != 1:
        return registry  # the tools number the GPUs of Intel Macs differently
    known, extra = registry.devices[0], power.devices[0]
    busy = known.utilization_percent if known.utilization_percent is not None else extra.utilization_percent
    power_w = extra.power_draw_w if extra.power_draw_w is not None else known.power_draw_w
    merged = replace(known, name=known.name or extra.name, utilization_percent=busy, power_draw_w=power_w)
    return Reading(devices=(merged,))


def _with_total(device: Device, limit_mb: float | None) -> Device:
    """Return the device with the size of unified memory; GPUs of Intel Macs have their own memory."""
    is_unified = (device.name or "Apple").startswith(("Apple", "AGX"))
    if device.memory_total_mb is not None or not is_unified:
        return device
    used = device.memory_used_mb
    free = None if limit_mb is None or used is None else max(0.0, limit_mb - used)
    return replace(device, memory_total_mb=limit_mb, memory_free_mb=free)
