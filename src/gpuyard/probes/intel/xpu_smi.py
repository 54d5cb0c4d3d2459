"""`xpu-smi`: Intel's tool for its discrete cards, and for integrated graphics where Level Zero drives them.

Rules:
- `discovery` runs once, and again after the tool has failed; `dump` and `ps` run each time. A reading without processes
  is still a reading: a problem says so.
- `xpu-smi ps` lists itself as a process on every device. That process is ours and has exited: it is left out.
- Since 2.0 `dump` has no short options, before it had no long ones: the form that works is remembered.
"""

import time
from collections.abc import Callable, Sequence

from msgspec import structs

from gpuyard.core.snapshot import Device, Process, Reading, Vendor
from gpuyard.errors import ProbeCrashed, ProbeError, ProbeMissing, ProbeTimeout
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.multiple_calls import OptionalCall, run_until
from gpuyard.probes.intel.device_naming import within_used
from gpuyard.probes.intel.xpu_smi_fields import free_memory
from gpuyard.probes.intel.xpu_smi_json import find_json, parse_json
from gpuyard.probes.intel.xpu_smi_text import NAME, parse_text

# By their numbers in `xpu-smi dump -h`: utilisation, power, core temperature, used memory. Every release knows them.
_METRICS = "0,1,3,18"
_MEMORY_SIZE = "1,16"
_Dump = Callable[[Sequence[Device]], list[str]]


class XpuSmi:
    name = NAME
    vendor = Vendor.INTEL
    may_hang = False

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._known: tuple[Device, ...] = ()
        self._is_sized = False
        self._dumps: tuple[_Dump, ...] = _DUMPS
        self._ask_users = OptionalCall(NAME, Vendor.INTEL, "who uses the devices is unknown", clock)

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        try:
            known = self._identify(deadline)
            measured = self._measure(known, deadline)
        except ProbeTimeout:
            raise  # keep what was found so far, so that the next reading gets further
        except ProbeError:
            self._known, self._is_sized, self._dumps = (), False, _DUMPS
            raise
        users = self._ask_users.ask(lambda: _ask([NAME, "ps", "-j"], deadline), deadline)
        devices = tuple(_merged(device, measured.get(device.index), _users_of(device, users)) for device in known)
        return Reading(devices=devices, problems=users.problems)

    def _measure(self, known: Sequence[Device], deadline: Deadline) -> dict[int | None, Device]:
        refusals = []
        for dump in self._dumps:
            try:
                measured = _ask(dump(known), deadline)
            except ProbeCrashed as error:
                refusals.append(error)
                continue
            self._dumps = (dump,)
            return _by_index(measured)
        raise refusals[0]

    def _identify(self, deadline: Deadline) -> tuple[Device, ...]:
        if not self._known:
            self._known = _discover(deadline)
        if not self._is_sized:
            self._known = _with_sizes(self._known, deadline)
            self._is_sized = True
        return self._known


def parse(text: str) -> Reading:
    """Parse any output of the tool that lists devices; also of `xpumcli`."""
    document = find_json(text)
    return parse_json(document) if document is not None else parse_text(text)


def _ask(argv: Sequence[str], deadline: Deadline) -> Reading:
    return parse(run_until(argv, deadline).require_success())


def _discover(deadline: Deadline) -> tuple[Device, ...]:
    found = tuple(device for device in _ask([NAME, "discovery", "-j"], deadline).devices if device.index is not None)
    if not found:
        raise ProbeMissing(NAME, "it finds no Intel GPU")
    return found


def _with_sizes(known: tuple[Device, ...], deadline: Deadline) -> tuple[Device, ...]:
    """Add memory sizes by one call for all devices (`discovery -d` needs one each). Old releases lack it."""
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


def _dump_by_short_options(known: Sequence[Device]) -> list[str]:
    indexes = ",".join(str(device.index) for device in known)
    return [NAME, "dump", "-d", indexes, "-m", _METRICS, "-i", "1", "-n", "1"]


def _dump_by_long_options(_: Sequence[Device]) -> list[str]:
    """Dump all devices: these releases accept one device or none."""
    return [NAME, "dump", "--metrics", _METRICS, "--interval", "1", "--number", "1"]


_DUMPS: tuple[_Dump, ...] = (_dump_by_short_options, _dump_by_long_options)


def _users_of(device: Device, users: Reading) -> tuple[Process, ...] | None:
    """Return the processes by device, or None if the call failed."""
    if users.problems:
        return None
    listed = next((found.processes for found in users.devices if found.index == device.index), None)
    return tuple(process for process in listed or () if process.name != NAME)


def _by_index(reading: Reading) -> dict[int | None, Device]:
    return {device.index: device for device in reading.devices}


def _merged(known: Device, measured: Device | None, users: tuple[Process, ...] | None) -> Device:
    """Merge identity and metrics; free memory at the time of the discovery is dropped."""
    used = measured.memory_used_mb if measured else None
    return structs.replace(
        known,
        memory_used_mb=used,
        memory_free_mb=free_memory(known.memory_total_mb, used),
        utilization_percent=measured.utilization_percent if measured else None,
        power_draw_w=measured.power_draw_w if measured else None,
        temperature_c=measured.temperature_c if measured else None,
        processes=within_used(users, used),
    )
