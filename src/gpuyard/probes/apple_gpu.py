"""A Mac's GPU: power from `powermetrics`, which needs root, and the rest from `ioreg`, which does not. Both run in
parallel. The error of a failed tool becomes a problem of the reading, or part of the error if both failed.

- Of the plists of `powermetrics` the last complete one counts: an interrupted run ends with a partial one. Power counts
  in mW and energy in mJ.
- In `ioreg`, `In use system memory` is the memory in use. The same words with `(driver)` behind them, and `Alloc system
  memory`, are other figures, and so are statistics of nested nodes. Unified memory has no size there."""

import plistlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from xml.parsers.expat import ExpatError

from msgspec.structs import replace

from gpuyard.errors import ProbeDenied, ProbeError, ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Reading, Vendor
from gpuyard.probes.parse_numbers import megabytes, number, percent, watts, words
from gpuyard.probes.run_tool import Deadline, find_any_tool, problem_beside, run_tool, run_until

POWERMETRICS, IOREG = "powermetrics", "ioreg"
# One sample: power is averaged over the interval of 200 ms, which is most of the run time.
POWERMETRICS_COMMAND = (POWERMETRICS, "--samplers", "gpu_power", "-f", "plist", "-n", "1", "-i", "200")

# Errors that plistlib raises for a damaged document: a misplaced tag, an invalid date.
_PLIST_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, ExpatError)


def _device(name: str | None, busy: float | None, **figures: Any) -> Device:
    # Registry ids change at each boot.
    return Device(id="apple-gpu-0", vendor=Vendor.APPLE, index=0, name=name, utilization_percent=busy, **figures)


def parse_powermetrics(text: str) -> Reading:
    for chunk in reversed(re.split(r"\x00|(?=<\?xml)", text)):
        start, end = chunk.find("<plist"), chunk.rfind("</plist>")
        # Process names contain control characters, and XML forbids them.
        plain = re.sub(r"[\x01-\x08\x0b\x0c\x0e-\x1f]", "", chunk[start : end + len("</plist>")])
        try:
            document = plistlib.loads(plain.encode("utf-8", "replace"), fmt=plistlib.FMT_XML) if start >= 0 else None
        except _PLIST_ERRORS:
            continue
        document = document if isinstance(document, dict) else {}
        model, gpu, processor = words(document.get("hw_model")), document.get("gpu"), document.get("processor")
        own, parts = (each if isinstance(each, dict) else {} for each in (gpu, processor))
        if not isinstance(gpu, dict) and "gpu_power" not in parts:
            continue
        power_w, idle = watts(parts.get("gpu_power"), "mW"), number(own.get("idle_ratio"))
        energy_mj = number(own.get("gpu_energy", parts.get("gpu_energy")))
        elapsed_ns = number(document.get("elapsed_ns"))
        if power_w is None and energy_mj is not None and elapsed_ns is not None and elapsed_ns > 0:
            power_w = watts(energy_mj * 1e9 / elapsed_ns, "mW")
        busy = percent(100 * (1 - idle)) if idle is not None and 0 <= idle <= 1 else None
        return Reading(devices=(_device(f"Apple GPU ({model})" if model else "Apple GPU", busy, power_draw_w=power_w),))
    hint = f"print it with `{' '.join(POWERMETRICS_COMMAND)}`"
    raise ProbeGarbled(POWERMETRICS, "its output holds no whole sample of a GPU", hint=hint)


# A number must be followed by something: the last number of a truncated output may lack digits.
_TOKEN = re.compile(r'"([^"]*)"\s*=\s*(?:([-+.\w]+)(?=\s*[,}]))?|"[^"]*"|[{(]|[)}]')


def parse_ioreg(text: str) -> Reading:
    """Read the first accelerator; the output may start in the middle of it."""
    class_name = model = said = None
    for line in text.splitlines():
        if header := re.match(r"[\s|]*\+-o\s.*<class\s+([^,>]+)", line):
            if said is not None or "Accelerator" in (class_name or ""):
                break
            class_name, model = words(header[1]), None
        elif match := re.match(r'[\s|]*"(model|PerformanceStatistics)"\s*=\s*(.*)', line):
            if match[1] == "PerformanceStatistics":
                said = _statistics(match[2])
            elif quoted := re.match(r'<?"([^"]*)"', match[2]):
                model = words(quoted[1])
    if said is None and "Accelerator" not in (class_name or ""):
        raise ProbeGarbled(IOREG, "its output lists no accelerator")
    figures = said or {}
    busy, used_mb = percent(figures.get("Device Utilization %")), megabytes(figures.get("In use system memory"), "B")
    return Reading(devices=(_device(model or class_name, busy, memory_used_mb=used_mb),))


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
            registry = pool.submit(_attempt, read_ioreg, timeout_s)
            limit = pool.submit(unified_memory_limit_mb, timeout_s)
        power = asked.result() if asked else self._denied
        self._denied = power if isinstance(power, ProbeDenied) else None
        reading = _combine(registry.result(), power or Reading())
        (device,) = reading.devices
        is_unified = (device.name or "Apple").startswith(("Apple", "AGX"))  # a card in an Intel Mac has its own memory
        limit_mb, used_mb = limit.result() if is_unified else None, device.memory_used_mb
        free_mb = None if limit_mb is None or used_mb is None else max(0.0, limit_mb - used_mb)
        return replace(reading, devices=(replace(device, memory_total_mb=limit_mb, memory_free_mb=free_mb),))


def read_powermetrics(timeout_s: float) -> Reading:
    try:
        return parse_powermetrics(run_tool(POWERMETRICS_COMMAND, timeout_s).require_success())
    except ProbeDenied as error:
        hint = "power needs root: run gpuyard with sudo; without it everything else is read from ioreg"
        raise ProbeDenied(error.source, error.message, hint=hint) from error


def read_ioreg(timeout_s: float) -> Reading:
    command = (IOREG, "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
    return parse_ioreg(run_tool(command, timeout_s).require_success())


def _attempt(read: Callable[[float], Reading], timeout_s: float) -> Reading | ProbeError:
    try:
        return read(timeout_s)
    except ProbeError as error:
        return error


def unified_memory_limit_mb(timeout_s: float) -> float | None:
    """Return how much of the machine's memory the GPU may use, or None if `sysctl` does not report it. macOS does not
    report its default: two thirds of up to 36 GB, three quarters above. Later releases allow somewhat more (84% of 128
    GB was seen), so this is a lower bound."""
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
    if not power.devices:
        return registry
    known, extra = registry.devices[0], power.devices[0]
    busy = known.utilization_percent if known.utilization_percent is not None else extra.utilization_percent
    name = known.name or extra.name
    return Reading(devices=(replace(known, name=name, utilization_percent=busy, power_draw_w=extra.power_draw_w),))
