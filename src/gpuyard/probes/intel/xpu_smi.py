"""`xpu-smi`: Intel's tool for its discrete cards, and for integrated graphics where Level Zero drives them.

Rules:
- What a device is (`discovery`) is asked once, and again after the tool has failed; what it does (`dump`, `ps`) each
  time. Without the list of processes a reading is poorer, and still a reading: a problem says so.
- `xpu-smi ps` lists itself as a user of every device. That process is ours and has ended by then: it is left out.
"""

import time
from collections.abc import Sequence

from msgspec import Struct, structs

from gpuyard.core.model import Device, Problem, Process, Reading, Vendor
from gpuyard.errors import ProbeError, ProbeMissing, ProbeTimeout
from gpuyard.probes.intel.xpu_json import find_json, parse_json
from gpuyard.probes.intel.xpu_text import NAME, parse_text
from gpuyard.probes.tool import run_tool

# By their numbers in `xpu-smi dump -h`: utilisation, power, core temperature, used memory. Every release knows them.
_METRICS = "0,1,3,18"
_MEMORY_SIZE = "1,16"


class XpuSmi:
    name = NAME
    vendor = Vendor.INTEL
    may_hang = False

    def __init__(self) -> None:
        self._known: tuple[Device, ...] = ()
        self._is_sized = False

    def read(self, timeout_s: float) -> Reading:
        deadline = time.monotonic() + timeout_s
        try:
            known = self._identify(deadline)
            measured = _by_index(_ask(_dump_command(known), deadline))
        except ProbeTimeout:
            raise  # what was learnt so far stays, so that the next reading gets further
        except ProbeError:
            self._known, self._is_sized = (), False
            raise
        users = _read_users(deadline)
        devices = tuple(_merged(device, measured.get(device.index), users) for device in known)
        return Reading(devices=devices, problems=users.problems)

    def _identify(self, deadline: float) -> tuple[Device, ...]:
        if not self._known:
            self._known = _discover(deadline)
        if not self._is_sized:
            self._known = _with_sizes(self._known, deadline)
            self._is_sized = True
        return self._known


class Users(Struct, frozen=True, kw_only=True):
    """Who uses which device; `None` where that could not be asked."""

    by_index: dict[int | None, Device] | None = None
    problems: tuple[Problem, ...] = ()

    def of(self, device: Device) -> tuple[Process, ...] | None:
        if self.by_index is None:
            return None
        found = self.by_index.get(device.index)
        return tuple(process for process in (found.processes or () if found else ()) if process.name != NAME)


def parse(text: str) -> Reading:
    """Any of the tool's outputs that tell of devices; of `xpumcli`'s too."""
    document = find_json(text)
    return parse_json(document) if document is not None else parse_text(text)


def _ask(argv: Sequence[str], deadline: float) -> tuple[Device, ...]:
    left = max(0.0, deadline - time.monotonic())
    return parse(run_tool(argv, left).require_success()).devices


def _discover(deadline: float) -> tuple[Device, ...]:
    found = tuple(device for device in _ask([NAME, "discovery", "-j"], deadline) if device.index is not None)
    if not found:
        raise ProbeMissing(NAME, "it finds no Intel GPU")
    return found


def _with_sizes(known: tuple[Device, ...], deadline: float) -> tuple[Device, ...]:
    """One call for all devices, where `discovery -d` would take one for each. Old releases do not have it."""
    if all(device.memory_total_mb is not None for device in known):
        return known
    try:
        sized = _by_index(_ask([NAME, "discovery", "--dump", _MEMORY_SIZE], deadline))
    except ProbeTimeout:
        raise
    except ProbeError:
        return known
    sizes = {index: device.memory_total_mb for index, device in sized.items()}
    return tuple(
        structs.replace(device, memory_total_mb=device.memory_total_mb or sizes.get(device.index)) for device in known
    )


def _dump_command(known: Sequence[Device]) -> list[str]:
    indexes = ",".join(str(device.index) for device in known)
    return [NAME, "dump", "-d", indexes, "-m", _METRICS, "-i", "1", "-n", "1"]


def _read_users(deadline: float) -> Users:
    try:
        return Users(by_index=_by_index(_ask([NAME, "ps", "-j"], deadline)))
    except ProbeError as error:
        message = f"who uses the devices is unknown: {error.message}"
        problem = Problem(source=NAME, kind=error.kind, message=message, hint=error.hint, vendor=Vendor.INTEL)
        return Users(problems=(problem,))


def _by_index(devices: Sequence[Device]) -> dict[int | None, Device]:
    return {device.index: device for device in devices}


def _merged(known: Device, measured: Device | None, users: Users) -> Device:
    """Memory that was free at the discovery is no figure of now."""
    used = measured.memory_used_mb if measured else None
    return structs.replace(
        known,
        memory_used_mb=used,
        memory_free_mb=_free(known.memory_total_mb, used),
        utilization_percent=measured.utilization_percent if measured else None,
        power_draw_w=measured.power_draw_w if measured else None,
        temperature_c=measured.temperature_c if measured else None,
        processes=users.of(known),
    )


def _free(total: float | None, used: float | None) -> float | None:
    return round(total - used, 2) if total is not None and used is not None and used <= total else None
