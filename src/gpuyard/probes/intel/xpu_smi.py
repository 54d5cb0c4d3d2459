"""`xpu-smi`: Intel's tool for its discrete cards, and for integrated graphics where Level Zero drives them.

- `discovery` (JSON, and CSV for memory sizes) runs once, and again after the tool has failed; `dump` (CSV) and `ps`
  (JSON) run each time. A reading without processes is still a reading: a problem says so.
- The memory of processes counts as KiB, which is right since 1.3. Level Zero may count a buffer several times for one
  process (intel/compute-runtime#964): a figure above the used memory of the device is unknown.
- `xpu-smi ps` lists itself as a process on every device. That process is ours and has exited: it is left out.
- Since 2.0 `dump` has no short options, before it had no long ones: the form that works is remembered. Its columns are
  named as nvidia-smi does since then (`power.draw (W)`), in words before."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import structs

from gpuyard.errors import ProbeCrashed, ProbeError, ProbeGarbled, ProbeMissing, ProbeTimeout
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.devices_and_processes import pci_bus_id, without_memory_above
from gpuyard.probes.intel.sysfs import device_id, processes_of, without_shared_uuids
from gpuyard.probes.run_tool import Deadline, OptionalCall, run_until

NAME = "xpu-smi"
# By their numbers in `xpu-smi dump -h`: utilisation, power, core temperature, used memory. Every release knows them.
_METRICS = "0,1,3,18"
_DUMPS: tuple[tuple[str, ...], ...] = (
    (NAME, "dump", "-d", "{indexes}", "-m", _METRICS, "-i", "1", "-n", "1"),
    # All devices: these releases accept one device or none.
    (NAME, "dump", "--metrics", _METRICS, "--interval", "1", "--number", "1"),
)
_JSON_START = re.compile(r"^[ \t]*(?=\{|\[\s*[\{\]])", re.MULTILINE)
_CSV_START = re.compile(r'^[ \t]*"?(?:Timestamp"?[ ]*,|Device ID"?[ ]*,)', re.MULTILINE | re.IGNORECASE)
_COLUMNS: tuple[tuple[re.Pattern[str], str, Callable[[Any], float | None]], ...] = (
    (
        re.compile(r"gpu utilization|average % utilization|utilization\.gpu\b"),
        "utilization_percent",
        parse_numbers.percent,
    ),
    (re.compile(r"gpu power\b|power\.draw(?!\.)"), "power_draw_w", parse_numbers.watts),
    (re.compile(r"gpu core temperature|temperature\.gpu\b"), "temperature_c", parse_numbers.celsius),
    (re.compile(r"gpu memory used|memory\.used\b"), "memory_used_mb", parse_numbers.megabytes),
    (re.compile(r"memory physical size"), "memory_total_mb", parse_numbers.megabytes),
)


class XpuSmi:
    def __init__(self) -> None:
        self._known: tuple[Device, ...] = ()
        self._is_sized = False
        self._dumps = _DUMPS
        self._users = OptionalCall(Vendor.INTEL, "who uses the devices is unknown")

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
        users = self._users.read(lambda: _ask([NAME, "ps", "-j"], deadline), deadline)
        listed = {device.index: device.processes or () for device in users.devices}
        devices = []
        for device in known:
            processes = tuple(process for process in listed.get(device.index, ()) if process.name != NAME)
            devices.append(_merged(device, measured.get(device.index), None if users.problems else processes))
        return Reading(devices=tuple(devices), problems=users.problems)

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
            if any(device.memory_total_mb is None for device in self._known):
                self._known = _with_sizes(self._known, deadline)
            self._is_sized = True
        return self._known


def _ask(argv: Sequence[str], deadline: Deadline) -> Reading:
    return parse(run_until(argv, deadline).require_success())


def _with_sizes(known: tuple[Device, ...], deadline: Deadline) -> tuple[Device, ...]:
    """Add memory sizes by one call for all devices (`discovery -d` needs one each). Old releases lack it."""
    try:
        sized = _ask([NAME, "discovery", "--dump", "1,16"], deadline)
    except ProbeTimeout:
        raise
    except ProbeError:
        return known
    sizes = {device.index: device.memory_total_mb for device in sized.devices}
    return tuple(
        structs.replace(device, memory_total_mb=device.memory_total_mb or sizes.get(device.index)) for device in known
    )


def _merged(known: Device, measured: Device | None, users: tuple[Process, ...] | None) -> Device:
    """Merge identity and metrics."""
    figures = ("memory_used_mb", "utilization_percent", "power_draw_w", "temperature_c")
    merged = structs.replace(known, **{figure: getattr(measured, figure, None) for figure in figures})
    total, used = merged.memory_total_mb, merged.memory_used_mb
    free = round(total - used, 2) if total is not None and used is not None and used <= total else None
    return without_memory_above(structs.replace(merged, memory_free_mb=free, processes=users), used)


def parse(text: str) -> Reading:
    """Parse the JSON of `discovery` and `ps`, or the CSV of `dump` and `discovery`. Warnings may precede either."""
    start = _JSON_START.search(text)
    if start is not None:
        return _parse_json(text[start.end() :])
    start = _CSV_START.search(text)
    if start is None:
        raise ProbeGarbled(NAME, "its output is no list of devices")
    return _parse_csv(text[start.start() :].splitlines())


def _parse_csv(lines: Sequence[str]) -> Reading:
    """Return the devices by number. `dump` prints rows for as long as it runs: the last complete one counts."""
    try:
        titles, *rows = csv.reader(lines, skipinitialspace=True)
    except csv.Error as error:
        raise ProbeGarbled(NAME, f"its CSV cannot be read: {error}") from error
    titles = [title.strip().lower() for title in titles]
    known = {place: column for place, title in enumerate(titles) for column in _COLUMNS if column[0].match(title)}
    number = next((place for place, title in enumerate(titles) if title in {"deviceid", "device id"}), None)
    if number is None or not known or "tileid" in titles:
        raise ProbeGarbled(NAME, f"no column of whole devices is known: {', '.join(titles)[:100]!r}")
    found = {}
    for row in rows:
        index = parse_numbers.device_index(row[number]) if len(row) >= len(titles) else None
        if index is not None:
            figures: dict[str, Any] = {field: read(row[place]) for place, (_, field, read) in known.items()}
            found[index] = Device(id=device_id(index), vendor=Vendor.INTEL, index=index, **figures)
    if not found:
        raise ProbeGarbled(NAME, "its list of devices has no rows")
    return Reading(devices=tuple(found.values()))


def _parse_json(text: str) -> Reading:
    try:
        document = json.JSONDecoder(strict=False).raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        raise ProbeGarbled(NAME, f"its JSON cannot be read: {str(error)[:100]}") from error
    lists: dict[str, Any] = document if isinstance(document, dict) else {}
    said = parse_numbers.words(lists.get("error"))
    if said is not None:
        raise ProbeGarbled(NAME, f"it reports an error: {said[:200]}")
    for key in ("device_util_by_proc_list", "process_list"):
        if isinstance(lists.get(key), list):
            return _users_in(_objects(lists[key]))
    listed = lists.get("device_list")
    devices = [_identified(entry) for entry in _objects(listed)]
    if not devices and listed != []:
        raise ProbeGarbled(NAME, "its JSON describes no device")
    return Reading(devices=without_shared_uuids(devices))


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _identified(entry: dict[str, Any]) -> Device:
    index, place = parse_numbers.device_index(entry.get("device_id")), pci_bus_id(entry.get("pci_bdf_address"))
    in_bytes = parse_numbers.megabytes(entry.get("memory_physical_size_byte"), "B")
    return Device(
        id=device_id(index, parse_numbers.words(entry.get("uuid")), place),
        vendor=Vendor.INTEL,
        index=index,
        name=parse_numbers.words(entry.get("device_name")),
        pci_bus_id=place,
        # The driver reports zero for unknown.
        memory_total_mb=in_bytes or parse_numbers.megabytes(entry.get("memory_physical_size")) or None,
    )


def _users_in(entries: Iterable[dict[str, Any]]) -> Reading:
    """Return the devices with only their processes."""
    users: dict[int, list[Process]] = {}
    for entry in entries:
        index = parse_numbers.device_index(entry.get("device_id"))
        pid = parse_numbers.process_id(entry.get("process_id", entry.get("pid")))
        if index is not None and pid is not None:
            memory_mb = parse_numbers.megabytes(parse_numbers.number(entry.get("mem_size")), "KiB")
            name = parse_numbers.words(entry.get("process_name"))
            users.setdefault(index, []).append(Process(pid=pid, memory_mb=memory_mb, name=name))
    devices = (
        Device(id=device_id(index), vendor=Vendor.INTEL, index=index, processes=processes_of(users[index]))
        for index in sorted(users)
    )
    return Reading(devices=tuple(devices))
