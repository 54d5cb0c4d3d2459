"""`xpu-smi`: Intel's tool for its discrete cards, and for integrated graphics where Level Zero drives them.

Rules:
- `discovery` runs once, and again after the tool has failed; `dump` and `ps` run each time. A reading without processes
  is still a reading: a problem says so.
- The JSON of `ps` does not say whether its memory is in kB (before 1.3) or KiB: the version does, which a live reading
  asks for once. A saved JSON counts as KiB.
- `xpu-smi ps` lists itself as a process on every device. That process is ours and has exited: it is left out.
- Since 2.0 `dump` has no short options, before it had no long ones: the form that works is remembered.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import structs

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled, ProbeMissing, ProbeTimeout
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.probe_calls import Deadline, OptionalCall, run_until
from gpuyard.probes.intel import xpu_smi_fields as xpu
from gpuyard.probes.intel.intel_cards import within_used, without_shared_uuids
from gpuyard.probes.intel.xpu_smi_fields import NAME
from gpuyard.probes.intel.xpu_smi_text import parse_text

# By their numbers in `xpu-smi dump -h`: utilisation, power, core temperature, used memory. Every release knows them.
_METRICS = "0,1,3,18"
_MEMORY_SIZE = "1,16"
_DUMPS: tuple[tuple[str, ...], ...] = (
    (NAME, "dump", "-d", "{indexes}", "-m", _METRICS, "-i", "1", "-n", "1"),
    # All devices: these releases accept one device or none.
    (NAME, "dump", "--metrics", _METRICS, "--interval", "1", "--number", "1"),
)
_JSON_START = re.compile(r"^[ \t]*(?=\{|\[\s*[\{\]])", re.MULTILINE)
_DECODER = json.JSONDecoder(strict=False)
_VERSION = re.compile(r"\bVersion: *(\d+)\.(\d+)", re.ASCII)
_FIRST_WITH_KIB = (1, 3)
_IDENTITY = {"uuid": "uuid", "name": "device_name", "pci": "pci_bdf_address"}


class XpuSmi:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._known: tuple[Device, ...] = ()
        self._is_sized = False
        self._dumps = _DUMPS
        self._unit_bytes: int | None = None
        self._ask_users = OptionalCall(NAME, Vendor.INTEL, "who uses the devices is unknown", clock)

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        try:
            known = self._identify(deadline)
            measured = self._measure(known, deadline)
        except ProbeTimeout:
            raise  # keep what was found so far, so that the next reading gets further
        except ProbeError:
            self._known, self._is_sized, self._dumps, self._unit_bytes = (), False, _DUMPS, None
            raise
        users = self._ask_users.ask(lambda: self._users(deadline), deadline)
        listed = {device.index: device.processes or () for device in users.devices}
        devices = []
        for device in known:
            processes = tuple(process for process in listed.get(device.index, ()) if process.name != NAME)
            devices.append(_merged(device, measured.get(device.index), None if users.problems else processes))
        return Reading(devices=tuple(devices), problems=users.problems)

    def _users(self, deadline: Deadline) -> Reading:
        if self._unit_bytes is None:
            version = _VERSION.search(run_until([NAME, "-v"], deadline).stdout)
            is_old = version is not None and (int(version[1]), int(version[2])) < _FIRST_WITH_KIB
            self._unit_bytes = xpu.OLD_KB if is_old else xpu.KIB
        return parse(run_until([NAME, "ps", "-j"], deadline).require_success(), self._unit_bytes)

    def _measure(self, known: Sequence[Device], deadline: Deadline) -> dict[int | None, Device]:
        indexes = ",".join(str(device.index) for device in known)
        refusals = []
        for dump in self._dumps:
            try:
                measured = _ask([argument.format(indexes=indexes) for argument in dump], deadline)
            except ProbeCrashed as error:
                refusals.append(error)
                continue
            self._dumps = (dump,)
            return {device.index: device for device in measured.devices}
        raise refusals[0]

    def _identify(self, deadline: Deadline) -> tuple[Device, ...]:
        if not self._known:
            listed = _ask([NAME, "discovery", "-j"], deadline).devices
            self._known = tuple(device for device in listed if device.index is not None)
        if not self._known:
            raise ProbeMissing(NAME, "it finds no Intel GPU")
        if not self._is_sized:
            self._known = _with_sizes(self._known, deadline)
            self._is_sized = True
        return self._known


def parse(text: str, unit_bytes: int = xpu.KIB) -> Reading:
    """Parse any output of the tool that lists devices; also of `xpumcli`. Warnings may precede its JSON.

    unit_bytes: the unit of the memory of processes in JSON.
    """
    start = _JSON_START.search(text)
    return _parse_json(text[start.end() :], unit_bytes) if start else parse_text(text)


def _ask(argv: Sequence[str], deadline: Deadline) -> Reading:
    return parse(run_until(argv, deadline).require_success())


def _with_sizes(known: tuple[Device, ...], deadline: Deadline) -> tuple[Device, ...]:
    """Add memory sizes by one call for all devices (`discovery -d` needs one each). Old releases lack it."""
    if all(device.memory_total_mb is not None for device in known):
        return known
    try:
        sized = _ask([NAME, "discovery", "--dump", _MEMORY_SIZE], deadline)
    except ProbeTimeout:
        raise
    except ProbeError:
        return known
    sizes = {device.index: device.memory_total_mb for device in sized.devices}
    return tuple(
        structs.replace(device, memory_total_mb=device.memory_total_mb or sizes.get(device.index)) for device in known
    )


def _merged(known: Device, measured: Device | None, users: tuple[Process, ...] | None) -> Device:
    """Merge identity and metrics; free memory at the time of the discovery is dropped."""
    figures = ("memory_used_mb", "utilization_percent", "power_draw_w", "temperature_c")
    merged = structs.replace(known, **{figure: getattr(measured, figure, None) for figure in figures})
    used = merged.memory_used_mb
    free = xpu.free_memory(known.memory_total_mb, used)
    return structs.replace(merged, memory_free_mb=free, processes=within_used(users, used))


def _parse_json(text: str, unit_bytes: int) -> Reading:
    """Parse the JSON of `discovery -j`, `stats -d N -j` and `ps -j`."""
    try:
        document = _DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        raise ProbeGarbled(NAME, f"its JSON cannot be read: {str(error)[:100]}") from error
    lists: dict[str, Any] = document if isinstance(document, dict) else {"datas": document}
    said = parse_numbers.words(lists.get("error"))
    if said is not None:
        raise ProbeGarbled(NAME, f"it reports an error: {said[:200]}")
    for key in ("device_util_by_proc_list", "process_list"):
        if isinstance(lists.get(key), list):
            return xpu.of_processes(_processes(lists[key]), unit_bytes)
    listed = next((lists[key] for key in ("device_list", "datas") if isinstance(lists.get(key), list)), [document])
    devices = [device for entry in _objects(listed) if (device := _device(entry)) is not None]
    if not devices and lists.get("device_list") != []:
        raise ProbeGarbled(NAME, "its JSON describes no device")
    return Reading(devices=without_shared_uuids(devices))


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _device(entry: dict[str, Any]) -> Device | None:
    index = parse_numbers.device_index(entry.get("device_id"))
    if isinstance(entry.get("device_level"), list) or isinstance(entry.get("tile_level"), list):
        tiles = [_metrics(tile.get("data_list")) for tile in _objects(entry.get("tile_level"))]
        statistics = xpu.of_device(_metrics(entry.get("device_level")), tiles)
        return xpu.as_device(index, None, statistics) if index is not None else None
    identity = {name: entry.get(key) for name, key in _IDENTITY.items()}
    if not any(parse_numbers.words(value) for value in identity.values()):
        return None
    in_bytes = parse_numbers.megabytes(entry.get("memory_physical_size_byte"), "B")
    device = xpu.identified(index, identity, in_bytes or parse_numbers.megabytes(entry.get("memory_physical_size")))
    return structs.replace(device, memory_free_mb=parse_numbers.megabytes(entry.get("memory_free_size_byte"), "B"))


def _metrics(listed: Any) -> xpu.Metrics:
    return xpu.from_metrics(
        (metric.get("metrics_type"), metric.get("value", metric.get("avg"))) for metric in _objects(listed)
    )


def _processes(entries: Any) -> Iterator[tuple[Any, ...]]:
    for entry in _objects(entries):
        pid = entry.get("process_id", entry.get("pid"))
        yield entry.get("device_id"), pid, entry.get("process_name"), entry.get("mem_size")
