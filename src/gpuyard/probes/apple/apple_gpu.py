"""A Mac's GPU: power from `powermetrics`, which needs root, and the rest from `ioreg`, which does not.

Both run in parallel, and their readings are merged. The error of a failed tool becomes a problem of the reading, or
part of the error message if both failed.
The operating system is not checked: if neither tool is on PATH, this is not a Mac.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeDenied, ProbeError
from gpuyard.probes.apple.ioreg import IOREG, IOREG_COMMAND, parse_ioreg
from gpuyard.probes.apple.powermetrics import POWERMETRICS, POWERMETRICS_COMMAND, parse_powermetrics
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.probe_calls import Deadline, problem_beside, run_until
from gpuyard.probes.common.run_tool import find_any_tool, run_tool

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
