"""Intel cards from kernel files, for i915 and xe: identity, sensors, memory size and processes.

Rules:
- Power is an energy counter on most cards: it is known from the second reading on, like utilisation.
- Reading a sensor file accesses the card, and a failing card may never answer: this probe may hang.
- Used memory is unknown: the kernel reports it only per client.
"""

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gpuyard.core.snapshot import Device, Reading, Vendor
from gpuyard.errors import ProbeMissing
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.device_ids import with_distinct_ids
from gpuyard.probes.common.kernel_files import read_text
from gpuyard.probes.intel.fdinfo_clients import FdinfoScan, look, processes, utilization
from gpuyard.probes.intel.kernel_cards import IntelCard, find_files, list_cards

NAME = "sysfs"


class Sensors(Struct, frozen=True, kw_only=True):
    taken_at: float
    energy_j: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


class IntelSysfs:
    name = NAME
    vendor = Vendor.INTEL
    may_hang = True

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._view: FdinfoScan | None = None
        self._sensors: dict[str, Sensors] = {}

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        cards = list_cards(self._root)
        if not cards:
            raise ProbeMissing(NAME, "there is no Intel GPU under /sys/class/drm")
        sensors = {card.id: read_sensors(card, self._clock()) for card in cards}
        view = look(self._root / "proc", deadline, self._clock())
        devices = [self._device(card, sensors[card.id], view, is_only=len(cards) == 1) for card in cards]
        self._view, self._sensors = view, sensors
        return Reading(devices=with_distinct_ids(devices))

    def _device(self, card: IntelCard, sensors: Sensors, view: FdinfoScan, *, is_only: bool) -> Device:
        clients = view.of(card.bus_id, is_only_card=is_only)
        return Device(
            id=card.id,
            vendor=Vendor.INTEL,
            index=card.index,
            name=card.name,
            pci_bus_id=card.bus_id,
            memory_total_mb=card.memory_total_mb,
            utilization_percent=utilization(self._view, view, clients) if self._view else None,
            power_draw_w=_power(self._sensors.get(card.id), sensors),
            power_limit_w=sensors.power_limit_w,
            temperature_c=sensors.temperature_c,
            processes=processes(view, clients),
        )


def read_sensors(card: IntelCard, now: float) -> Sensors:
    """Return the sensors of the card; groups of its parts, such as `i915_gt0`, are ignored."""
    groups = find_files(card.folder, "hwmon/hwmon*")
    group = next((group for group in groups if read_text(group / "name") == card.driver), None)
    if group is None:
        return Sensors(taken_at=now)
    limit = _millionths(group, "power[0-9]_max") or _millionths(group, "power[0-9]_rated_max")
    return Sensors(
        taken_at=now,
        energy_j=_millionths(group, "energy*_input"),
        power_draw_w=_millionths(group, "power*_input"),
        power_limit_w=limit or None,  # i915 reports zero for no limit
        temperature_c=_temperature(group),
    )


def _millionths(group: Path, pattern: str) -> float | None:
    """Return the first readable value: the first file is the card's, later ones its package's."""
    values = (parse_numbers.number(read_text(file)) for file in find_files(group, pattern))
    return next((value / 1e6 for value in values if value is not None and value >= 0), None)


def _temperature(group: Path) -> float | None:
    """Return the package temperature if the sensors have labels, else the first one."""
    files = find_files(group, "temp*_input")
    labels = {file: read_text(file.with_name(file.name.replace("_input", "_label"))) for file in files}
    for file in sorted(files, key=lambda file: labels[file] != "pkg"):
        value = parse_numbers.number(read_text(file))
        if value is not None:
            return parse_numbers.celsius(value / 1000)
    return None


def _power(before: Sensors | None, now: Sensors) -> float | None:
    if now.power_draw_w is not None:
        return round(now.power_draw_w, 2)
    if before is None or before.energy_j is None or now.energy_j is None:
        return None
    elapsed_s, spent_j = now.taken_at - before.taken_at, now.energy_j - before.energy_j
    return round(spent_j / elapsed_s, 2) if elapsed_s > 0 and spent_j >= 0 else None
