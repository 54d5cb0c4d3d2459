"""The `amdsmi` Python library that ROCm installs: the cheapest probe, which can hang in the driver.

Rules:
- It is imported at the first read: the import loads libamd_smi.so, and fails in many ways if that is missing.
- It stays initialised between reads, and is initialised again after a failure.
- A figure that a card, a release or our permissions do not provide is unknown; only a missing card list is an error.
- Temperature is the edge sensor's or, where a card has none (MI300), the hotspot's.
"""

import contextlib
import ctypes
import importlib
import io
import os
import sys
from typing import Any

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeError, ProbeMissing
from gpuyard.probes.amd import card_fields
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.device_ids import pci_bus_id, with_distinct_ids

NAME = "amdsmi"
# Errors of the wrapper when a release lacks a function, an enum or a key, or decodes bytes that are not text.
_ODD_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    ctypes.ArgumentError,
)
# No card's cap is above 10 kW or below 10 mW: releases from 6.0 on count in microwatts, those before in watts.
_LARGEST_WATTS = 10_000


class AmdSmiLibrary:
    name = NAME
    vendor = Vendor.AMD
    may_hang = True

    def __init__(self) -> None:
        self._session: _LibrarySession | None = None

    def read(self, timeout_s: float) -> Reading:  # noqa: ARG002 - a driver call cannot be interrupted
        session, self._session = self._session or _LibrarySession(_import_amdsmi()), None
        handles = session.handles()
        devices = with_distinct_ids(_device(session, index, handle) for index, handle in enumerate(handles))
        self._session = session
        return Reading(devices=card_fields.without_repeated_memory(devices))


class _LibrarySession:
    """The initialised library; a failed call returns None."""

    def __init__(self, amdsmi: Any) -> None:
        self.amdsmi = amdsmi
        self.failures = (getattr(amdsmi, "AmdSmiException", RuntimeError), *_ODD_FAILURES)
        try:
            amdsmi.amdsmi_init()
        except self.failures as error:
            raise _refusal(error) from error

    def handles(self) -> list[Any]:
        try:
            return list(self.amdsmi.amdsmi_get_processor_handles())
        except self.failures as error:
            with contextlib.suppress(*self.failures):
                self.amdsmi.amdsmi_shut_down()
            raise _refusal(error) from error

    def ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.amdsmi, function)(*arguments)
        except self.failures:
            return None

    def fields(self, function: str, *arguments: Any) -> dict[str, Any]:
        answer = self.ask(function, *arguments)
        return answer if isinstance(answer, dict) else {}

    def constant(self, enum: str, member: str) -> Any:
        return getattr(getattr(self.amdsmi, enum, None), member, None)


def _import_amdsmi() -> Any:
    try:
        # Without its libamd_smi.so the package prints advice to standard output, which is ours.
        with contextlib.redirect_stdout(io.StringIO()):
            _show_where_rocm_keeps_it()
            return importlib.import_module("amdsmi")
    except ImportError as error:
        raise ProbeMissing(NAME, f"the Python library cannot be imported: {_one_line(error)}") from error
    except (LookupError, OSError) as error:
        raise ProbeMissing(NAME, f"its libamd_smi.so cannot be loaded: {_one_line(error)}") from error
    except (*_ODD_FAILURES, SyntaxError, SystemExit) as error:
        hint = "the library and the ROCm release may not belong together"
        raise ProbeCrashed(NAME, f"its import failed: {_one_line(error)}", hint=hint) from error


def _show_where_rocm_keeps_it() -> None:
    """Add ROCm's own package folder to sys.path, which a virtual environment does not contain."""
    folder = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "share/amd_smi")
    if os.path.isdir(folder) and folder not in sys.path:
        sys.path.append(folder)


def _refusal(error: BaseException) -> ProbeError:
    said = _one_line(error)
    if "NO_PERM" in said or "permission" in said.lower():
        return ProbeDenied(NAME, f"permission denied: {said}", hint="join the groups video and render")
    if "DRIVER_NOT_LOADED" in said or "driver not loaded" in said.lower():
        return ProbeMissing(NAME, "the amdgpu driver is not loaded")
    return ProbeCrashed(NAME, f"it returns no list of cards: {said}", hint="run `amd-smi list` yourself to see why")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _device(session: _LibrarySession, index: int, handle: Any) -> Device:
    asic = session.fields("amdsmi_get_gpu_asic_info", handle)
    power = session.fields("amdsmi_get_power_info", handle)
    uuid = session.ask("amdsmi_get_gpu_device_uuid", handle)
    pci = pci_bus_id(session.ask("amdsmi_get_gpu_device_bdf", handle))
    unique = card_fields.unique_id_in_uuid(uuid) or card_fields.unique_id(asic.get("asic_serial"))
    return Device(
        id=card_fields.device_id(unique, pci, index),
        vendor=Vendor.AMD,
        index=index,
        name=card_fields.card_name(asic.get("market_name")),
        pci_bus_id=pci,
        **_memory(session, handle),
        utilization_percent=parse_numbers.percent(
            session.fields("amdsmi_get_gpu_activity", handle).get("gfx_activity")
        ),
        power_draw_w=_power_draw(power),
        power_limit_w=_power_limit(session.fields("amdsmi_get_power_cap_info", handle), power),
        temperature_c=_temperature(session, handle),
        processes=_processes(session, handle),
    )


def _memory(session: _LibrarySession, handle: Any) -> card_fields.CardMemory:
    """Return the memory; releases report bytes, or MB by an older call."""
    vram = session.constant("AmdSmiMemoryType", "VRAM")
    total = parse_numbers.megabytes(session.ask("amdsmi_get_gpu_memory_total", handle, vram), "B")
    used = parse_numbers.megabytes(session.ask("amdsmi_get_gpu_memory_usage", handle, vram), "B")
    if not total or used is None:
        usage = session.fields("amdsmi_get_gpu_vram_usage", handle)
        total, coarse = (
            parse_numbers.megabytes(usage.get("vram_total")) or total,
            parse_numbers.megabytes(usage.get("vram_used")),
        )
        used = used if coarse is None else coarse
    return card_fields.memory(total, used)


def _power_draw(power: dict[str, Any]) -> float | None:
    """Return the power. ROCm 7 has one key; before, MI300 had only the current power, other cards only the average."""
    keys = ("socket_power", "current_socket_power", "average_socket_power")
    return next((draw for key in keys if (draw := parse_numbers.watts(power.get(key))) is not None), None)


def _power_limit(cap: dict[str, Any], power: dict[str, Any]) -> float | None:
    values = (parse_numbers.number(cap.get("power_cap")), parse_numbers.number(power.get("power_limit")))
    return card_fields.power_limit(
        *(parse_numbers.watts(value, "uW" if value is not None and value > _LARGEST_WATTS else "W") for value in values)
    )


def _temperature(session: _LibrarySession, handle: Any) -> float | None:
    now = session.constant("AmdSmiTemperatureMetric", "CURRENT")
    sensors = (session.constant("AmdSmiTemperatureType", member) for member in ("EDGE", "HOTSPOT", "JUNCTION"))
    readings = (session.ask("amdsmi_get_temp_metric", handle, sensor, now) for sensor in sensors if sensor is not None)
    return next((celsius for raw in readings if (celsius := parse_numbers.celsius(raw)) is not None), None)


def _processes(session: _LibrarySession, handle: Any) -> tuple[Process, ...] | None:
    listed = session.ask("amdsmi_get_gpu_process_list", handle)
    if not isinstance(listed, list):
        return None
    # Before 6.0 the list contained handles, which need a call each.
    described = (
        entry if isinstance(entry, dict) else session.fields("amdsmi_get_gpu_process_info", handle, entry)
        for entry in listed
    )
    return tuple(process for info in described if (process := _process(info)))


def _process(info: dict[str, Any]) -> Process | None:
    memory_mb = card_fields.process_memory(info.get("memory_usage"), info.get("mem", info.get("mem_usage")))
    return card_fields.process(info.get("pid"), info.get("name"), memory_mb)
