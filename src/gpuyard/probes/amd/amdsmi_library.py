"""The `amdsmi` Python library that ROCm installs: the cheapest probe, which can hang in the driver; and kernel files
for memory that is read often, some microseconds for each.

- It is imported at the first read, and stays initialised until it fails. A figure that a card, a release or our
  permissions do not provide is unknown; only a missing card list is an error.
- Its list of processes is never read often: it looks through the open files of every process on the machine. What a
  program holds is `/sys/class/kfd/kfd/proc/PID/vram_GPU` of the compute driver, for programs of all users. Its pids are
  those of the first pid namespace, so in a container they are not used. Processes that do not compute, such as a
  desktop's, keep the figure of the last full reading while they live.
- Partitions of a card share the kernel's files: their memory is unknown there."""

import contextlib
import ctypes
import importlib
import io
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpuyard.errors import ProbeCrashed, ProbeDenied, ProbeError, ProbeMissing
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.amd.amd_smi import Record, device_of, memory, process_of, without_repeated_memory
from gpuyard.probes.devices_and_processes import with_distinct_ids
from gpuyard.probes.kernel_files import cards_of_compute_driver, names_in, read_text, sees_all_processes

NAME = "amdsmi"
# Errors of the wrapper when a release lacks a function, an enum or a key, or decodes bytes that are not text.
_ODD_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError, ctypes.ArgumentError,
)  # fmt: skip


class AmdSmiLibrary:
    name = NAME
    vendor = Vendor.AMD
    may_hang = True

    def __init__(self, root: Path = Path("/")) -> None:
        self._session: _LibrarySession | None = None
        self._handles: dict[str, Any] = {}
        self._root = root
        self._kfd = root / "sys/class/kfd/kfd"
        self._numbers: Mapping[str, int] = {}  # of the compute driver for each card, by PCI bus id

    def read(self, timeout_s: float) -> Reading:  # noqa: ARG002 - a driver call cannot be interrupted
        session, self._session = self._session or _LibrarySession(_import_amdsmi()), None
        handles = session.handles()
        devices = with_distinct_ids(_device(session, index, handle) for index, handle in enumerate(handles))
        self._session, self._handles = session, {device.id: handles[number] for number, device in enumerate(devices)}
        cards = cards_of_compute_driver(self._kfd / "topology/nodes") if sees_all_processes(self._root) else []
        times = Counter(bus_id for _, bus_id in cards)
        self._numbers = {bus_id: number for number, bus_id in cards if times[bus_id] == 1}  # no partitions
        return Reading(devices=tuple(self._with_processes(without_repeated_memory(devices))))

    def read_memory(self, devices: Sequence[Device]) -> list[Device]:
        """Read how much of each card is used, by files of the kernel, or a call that reads one of them; and what each
        computing process holds."""
        found = []
        for device in devices:
            figures = None
            if device.pci_bus_id is not None and "#" not in device.id:  # no partition
                folder = self._root / "sys/bus/pci/devices" / device.pci_bus_id
                texts = (read_text(folder / f"mem_info_vram_{each}") for each in ("total", "used"))
                total_mb, used_mb = (parse_numbers.megabytes(text, "B") for text in texts)
                figures = (total_mb, used_mb) if total_mb and used_mb is not None else None
            session, handle = self._session, self._handles.get(device.id)
            if figures is None and session is not None and handle is not None and device.memory_total_mb is not None:
                vram = session.constant("AmdSmiMemoryType", "VRAM")
                used = parse_numbers.megabytes(session.ask("amdsmi_get_gpu_memory_usage", handle, vram), "B")
                figures = None if used is None else (device.memory_total_mb, used)
            if figures is not None:
                found.append(replace(device, **memory(*figures)))
        return self._with_processes(found)

    def _with_processes(self, devices: Sequence[Device]) -> list[Device]:
        """Return the devices with what each computing process holds now, as far as the kernel says."""
        numbers = {
            each.id: number
            for each in devices
            if "#" not in each.id and (number := self._numbers.get(each.pci_bus_id or "")) is not None
        }
        held_mb: dict[int, dict[int, float]] = {number: {} for number in numbers.values()}  # by card and pid
        for name in names_in(self._kfd / "proc") if numbers else ():
            pid = parse_numbers.process_id(name)
            for number in held_mb if pid is not None else ():
                held = parse_numbers.megabytes(read_text(self._kfd / "proc" / name / f"vram_{number}"), "B")
                if held is not None and pid is not None:
                    held_mb[number][pid] = held
        return [
            replace(each, processes=self._joined(each, held_mb[numbers[each.id]])) if each.id in numbers else each
            for each in devices
        ]

    def _joined(self, device: Device, held_mb: Mapping[int, float]) -> tuple[Process, ...] | None:
        proc = self._root / "proc"
        known = {process.pid: process for process in device.processes or ()}
        processes = [
            replace(process, memory_mb=held_mb.get(pid, process.memory_mb))
            for pid, process in known.items()
            if pid in held_mb or (proc / str(pid)).exists()
        ]
        for pid, held in held_mb.items():
            if held and pid not in known:
                name = parse_numbers.words(read_text(proc / str(pid) / "comm"))
                processes.append(Process(pid=pid, memory_mb=held, name=name))
        # Programs that do not compute are unknown here: none of the others does not mean that there is none.
        return tuple(processes) if processes or device.processes is not None else None


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
    # A virtual environment does not contain ROCm's own package folder.
    folder = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "share/amd_smi")
    if os.path.isdir(folder) and folder not in sys.path:
        sys.path.append(folder)
    try:
        # Without its libamd_smi.so the package prints advice to standard output, which is ours.
        with contextlib.redirect_stdout(io.StringIO()):
            return importlib.import_module("amdsmi")
    except ImportError as error:
        raise ProbeMissing(NAME, f"the Python library cannot be imported: {_one_line(error)}") from error
    except (LookupError, OSError) as error:
        raise ProbeMissing(NAME, f"its libamd_smi.so cannot be loaded: {_one_line(error)}") from error
    except (*_ODD_FAILURES, SyntaxError, SystemExit) as error:
        hint = "the library and the ROCm release may not belong together"
        raise ProbeCrashed(NAME, f"its import failed: {_one_line(error)}", hint=hint) from error


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
    power, cap = session.fields("amdsmi_get_power_info", handle), session.fields("amdsmi_get_power_cap_info", handle)
    record = {
        "gpu": index,
        "bdf": session.ask("amdsmi_get_gpu_device_bdf", handle),
        "uuid": session.ask("amdsmi_get_gpu_device_uuid", handle),
        "asic": session.fields("amdsmi_get_gpu_asic_info", handle),
        "mem_usage": _memory(session, handle),
        "usage": session.fields("amdsmi_get_gpu_activity", handle),
        "power": power,
        "limit": {"socket_power": _watts(cap.get("power_cap")), "current_power": _watts(power.get("power_limit"))},
        "temperature": {"edge": _temperature(session, handle)},
    }
    return replace(device_of(index, record), processes=_processes(session, handle))


def _memory(session: _LibrarySession, handle: Any) -> Record:
    """Return the memory; releases report bytes, or MB by an older call."""
    vram = session.constant("AmdSmiMemoryType", "VRAM")
    total = {"value": session.ask("amdsmi_get_gpu_memory_total", handle, vram), "unit": "B"}
    used = {"value": session.ask("amdsmi_get_gpu_memory_usage", handle, vram), "unit": "B"}
    if parse_numbers.megabytes(total) and parse_numbers.megabytes(used) is not None:
        return {"total_vram": total, "used_vram": used}
    usage = session.fields("amdsmi_get_gpu_vram_usage", handle)
    coarse_total, coarse_used = usage.get("vram_total"), usage.get("vram_used")
    return {
        "total_vram": coarse_total if parse_numbers.megabytes(coarse_total) else total,
        "used_vram": used if parse_numbers.megabytes(coarse_used) is None else coarse_used,
    }


def _watts(raw: Any) -> float | None:
    # No card's cap is above 10 kW or below 10 mW: releases from 6.0 on count in microwatts, those before in watts.
    value = parse_numbers.number(raw)
    return parse_numbers.watts(value, "uW" if value is not None and value > 10_000 else "W")


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
    return tuple(process for info in described if (process := process_of(info)))
