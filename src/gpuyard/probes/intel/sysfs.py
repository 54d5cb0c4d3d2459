"""Intel cards from kernel files, for i915 and xe: identity, sensors, memory size and processes; ids for all tools.

- A device's id is the vendor's UUID, else its PCI bus id such as `0000:03:00.0`, else `intel-<index>`. Early drivers
  give every card of one model the same UUID: such cards are identified by PCI bus id.
- Cards are numbered in the order of their PCI bus ids: the numbers in `card0`, `card1` change from boot to boot.
  Integrated graphics sit at 0000:00:02.0 on every machine, and have no memory of their own.
- Power is an energy counter on most cards: it is known from the second reading on, like utilisation. Used memory is
  unknown: the kernel reports it only per client. Reading a sensor accesses the card: this probe may hang.

Processes are in `/proc/<pid>/fdinfo/<fd>` of open files under `/dev/dri`:
- A client is one open file of a card. Processes that share it show the same numbers, so it counts once, for the first.
- Other users' processes cannot be read, and those outside our container are not listed. A partial scan can show that a
  card is used, never that it is unused. A client that is missing in the scan before is left out of the utilisation."""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from gpuyard.errors import ProbeMissing
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes import parse_numbers
from gpuyard.probes.devices_and_processes import one_per_pid, pci_bus_id, with_distinct_ids
from gpuyard.probes.kernel_files import names_in, read_text, sees_all_processes
from gpuyard.probes.run_tool import Deadline

DRIVERS = frozenset({"i915", "xe"})
_NAMES = {
    "0bd5": "Data Center GPU Max 1550", "0bda": "Data Center GPU Max 1100", "4905": "Iris Xe MAX Graphics",
    "5690": "Arc A770M Graphics", "5691": "Arc A730M Graphics", "5692": "Arc A550M Graphics",
    "5693": "Arc A370M Graphics", "5694": "Arc A350M Graphics", "56a0": "Arc A770 Graphics",
    "56a1": "Arc A750 Graphics", "56a2": "Arc A580 Graphics", "56a5": "Arc A380 Graphics",
    "56a6": "Arc A310 Graphics", "56c0": "Data Center GPU Flex 170", "56c1": "Data Center GPU Flex 140",
    "e20b": "Arc B580 Graphics", "e20c": "Arc B570 Graphics",
}  # fmt: skip


def device_id(index: int | None, uuid: str | None = None, bus_id: str | None = None) -> str:
    return uuid or bus_id or f"intel-{index or 0}"


def without_shared_uuids(devices: Sequence[Device]) -> tuple[Device, ...]:
    times = Counter(device.id for device in devices)
    return with_distinct_ids(
        structs.replace(device, id=device_id(device.index, None, device.pci_bus_id)) if times[device.id] > 1 else device
        for device in devices
    )


def processes_of(clients: Iterable[Process]) -> tuple[Process, ...]:
    return tuple(sorted(one_per_pid(clients, adds=True), key=lambda process: process.pid))


class IntelCard(Struct, frozen=True, kw_only=True):
    """An Intel card. `folder` is its directory in the tree of PCI devices, `identity` the fields of a Device that the
    kernel knows."""

    folder: Path
    driver: str
    bus_id: str | None
    identity: dict[str, Any]


def list_cards(root: Path = Path("/")) -> tuple[IntelCard, ...]:
    """Return the cards in PCI bus order; cards without a bus id come last."""
    nodes = (node for node in find_files(root / "sys/class/drm", "card*") if node.name[4:].isdecimal())
    found = {card.folder: card for card in map(_card, nodes) if card is not None}
    ordered = sorted(found.values(), key=lambda card: (card.bus_id is None, card.bus_id or "", card.folder))
    for index, card in enumerate(ordered):
        card.identity.update(id=device_id(index, None, card.bus_id), index=index)
    return tuple(ordered)


def find_files(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _card(node: Path) -> IntelCard | None:
    folder = Path(os.path.realpath(node / "device"))
    lines = (line.partition("=") for line in (read_text(folder / "uevent") or "").splitlines())
    event, link = {key: value for key, _, value in lines}, folder / "driver"
    driver = os.path.basename(os.path.realpath(link)) if os.path.islink(link) else event.get("DRIVER", "")
    if read_text(folder / "vendor") != "0x8086" or driver not in DRIVERS:
        return None
    place = pci_bus_id(event.get("PCI_SLOT_NAME")) or pci_bus_id(folder.name)
    model = (read_text(folder / "device") or "0x?").removeprefix("0x").lower()
    total_mb = None
    # xe reports it per tile, Intel's builds of i915 per card, the mainline i915 not at all.
    tiles = find_files(folder, "tile*/physical_vram_size_bytes")
    for files in (tiles, [node / "lmem_total_bytes"], [folder / "lmem_total_bytes"]):
        sizes = [parse_numbers.megabytes(read_text(file), "B") or 0.0 for file in files]
        if total_mb is None and sizes and all(sizes) and place != "0000:00:02.0":
            total_mb = round(sum(sizes), 2)
    identity = {"name": f"Intel {_NAMES.get(model, f'Graphics [{model}]')}", "memory_total_mb": total_mb}
    return IntelCard(folder=folder, driver=driver, bus_id=place, identity={**identity, "pci_bus_id": place})


# The probe

NAME = "sysfs"
_DEVICE_MEMORY = re.compile(r"drm-(resident|total)-(?:stolen-)?(?:local|vram)\d*", re.ASCII)
_ENGINE = re.compile(r"drm-(engine-capacity|engine|total-cycles|cycles)-(.+)", re.ASCII)


class _Sensors(Struct, frozen=True, kw_only=True):
    taken_at: float
    energy_j: float | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


class DrmClient(Struct, frozen=True, kw_only=True):
    """`counters` are by kind, then engine: "engine" counts nanoseconds (i915), "cycles" against "total-cycles" (xe)."""

    key: str
    bus_id: str | None
    process: Process
    counters: Mapping[str, Mapping[str, float]]


class FdinfoScan(Struct, frozen=True, kw_only=True):
    """The clients at one moment. `is_whole` is True if every process could be read."""

    taken_at: float
    clients: tuple[DrmClient, ...]
    is_whole: bool


class IntelSysfs:
    name = NAME
    vendor = Vendor.INTEL
    may_hang = True

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._view: FdinfoScan | None = None
        self._sensors: dict[str, _Sensors] = {}

    def read(self, timeout_s: float) -> Reading:
        deadline = Deadline(timeout_s)
        cards = list_cards(self._root)
        if not cards:
            raise ProbeMissing(NAME, "there is no Intel GPU under /sys/class/drm")
        sensors = {card.identity["id"]: _read_sensors(card, self._clock()) for card in cards}
        view = _scan_clients(self._root, deadline, self._clock())
        devices = [self._device(card, sensors[card.identity["id"]], view, is_only=len(cards) == 1) for card in cards]
        self._view, self._sensors = view, sensors
        return Reading(devices=with_distinct_ids(devices))

    def _device(self, card: IntelCard, sensors: _Sensors, view: FdinfoScan, *, is_only: bool) -> Device:
        # Kernels before 6.0 may omit the bus id: then the client belongs to the only card.
        places = (card.bus_id, None) if is_only else (card.bus_id,)
        clients = [client for client in view.clients if client.bus_id in places]
        processes = processes_of(client.process for client in clients)
        return Device(
            vendor=Vendor.INTEL,
            **card.identity,
            utilization_percent=_utilization(self._view, view, clients) if self._view else None,
            power_draw_w=_power(self._sensors.get(card.identity["id"]), sensors),
            power_limit_w=sensors.power_limit_w,
            temperature_c=sensors.temperature_c,
            processes=processes if processes or view.is_whole else None,
        )


def _read_sensors(card: IntelCard, now: float) -> _Sensors:
    """Return the sensors of the card; groups of its parts, such as `i915_gt0`, are ignored."""
    groups = find_files(card.folder, "hwmon/hwmon*")
    group = next((group for group in groups if read_text(group / "name") == card.driver), None)
    if group is None:
        return _Sensors(taken_at=now)
    # The package's temperature if the sensors have labels, else the first one.
    files = find_files(group, "temp*_input")
    files.sort(key=lambda file: read_text(file.with_name(file.name.replace("_input", "_label"))) != "pkg")
    degrees = (value for file in files if (value := parse_numbers.number(read_text(file))) is not None)
    limit_w = _millionths(group, "power[0-9]_max") or _millionths(group, "power[0-9]_rated_max")
    return _Sensors(
        taken_at=now,
        energy_j=_millionths(group, "energy*_input"),
        power_draw_w=_millionths(group, "power*_input"),
        power_limit_w=limit_w or None,  # i915 reports zero for no limit
        temperature_c=parse_numbers.celsius(next(degrees, float("nan")) / 1000),
    )


def _millionths(group: Path, pattern: str) -> float | None:
    """Return the first readable value: the first file is the card's, later ones its package's."""
    values = (parse_numbers.number(read_text(file)) for file in find_files(group, pattern))
    return next((value / 1e6 for value in values if value is not None and value >= 0), None)


def _power(before: _Sensors | None, now: _Sensors) -> float | None:
    if now.power_draw_w is not None:
        return round(now.power_draw_w, 2)
    if before is None or before.energy_j is None or now.energy_j is None:
        return None
    elapsed_s, spent_j = now.taken_at - before.taken_at, now.energy_j - before.energy_j
    return round(spent_j / elapsed_s, 2) if elapsed_s > 0 and spent_j >= 0 else None


def _scan_clients(root: Path, deadline: Deadline, now: float) -> FdinfoScan:
    found: dict[str, DrmClient] = {}
    pids = sorted(int(name) for name in names_in(root / "proc") if name.isascii() and name.isdigit())
    is_whole = 1 in pids and sees_all_processes(root)
    for pid in pids:
        if deadline.is_over():
            is_whole = False
            break
        try:
            for client in _clients_of(root / "proc" / str(pid), pid):
                found.setdefault(client.key, client)
        except PermissionError:
            is_whole = False
        except OSError:
            continue  # the process has exited
    return FdinfoScan(taken_at=now, clients=tuple(found.values()), is_whole=is_whole)


def parse_fdinfo(text: str, pid: int, name: str | None = None) -> DrmClient | None:
    """Return the client of one open file, or None if it is not a file of an Intel card."""
    lines = (line.partition(":") for line in text.splitlines())
    pairs = {key.strip(): value.strip() for key, _, value in lines}
    client_id = pairs.get("drm-client-id")
    if pairs.get("drm-driver") not in DRIVERS or not client_id:
        return None
    place = pci_bus_id(pairs.get("drm-pdev"))
    counters: dict[str, dict[str, float]] = {"engine": {}, "cycles": {}, "total-cycles": {}, "engine-capacity": {}}
    held_mb: dict[str, list[float]] = {"resident": [], "total": []}
    for key, value in pairs.items():
        count, size_mb = parse_numbers.number(value), parse_numbers.megabytes(value, "B")
        if count is not None and (engine := _ENGINE.fullmatch(key)):
            counters[engine[1]][engine[2]] = count
        elif size_mb is not None and (memory := _DEVICE_MEMORY.fullmatch(key)):
            held_mb[memory[1]].append(size_mb)
    sizes = held_mb["resident"] or held_mb["total"]
    process = Process(pid=pid, memory_mb=round(sum(sizes), 2) if sizes else None, name=name)
    return DrmClient(key=f"{place} {client_id}", bus_id=place, process=process, counters=counters)


def _utilization(before: FdinfoScan, now: FdinfoScan, clients: Sequence[DrmClient]) -> float | None:
    """Return the utilisation of the busiest engine class between two scans."""
    if not (before.is_whole and now.is_whole) and not clients:
        return None
    earlier = {client.key: client for client in before.clients}
    elapsed_ns = (now.taken_at - before.taken_at) * 1e9
    shares: dict[str, float] = {}
    for client in clients:
        found = _shares(earlier[client.key], client, elapsed_ns) if client.key in earlier else {}
        for engine, share in found.items():
            shares[engine] = shares.get(engine, 0.0) + share
    busiest = parse_numbers.percent(100 * max(shares.values(), default=0.0))
    return busiest or (busiest if before.is_whole and now.is_whole else None)


def _shares(before: DrmClient, now: DrmClient, elapsed_ns: float) -> dict[str, float]:
    """Return the part of the time for which the client has used each engine."""
    shares: dict[str, float] = {}
    cycles = [client.counters["total-cycles"] for client in (before, now)]
    for kind in ("engine", "cycles"):
        for engine, count in now.counters[kind].items():
            busy = count - before.counters[kind].get(engine, count)
            elapsed = elapsed_ns if kind == "engine" else cycles[1].get(engine, 0.0) - cycles[0].get(engine, 0.0)
            capacity = now.counters["engine-capacity"].get(engine) or 1.0
            shares[engine] = shares.get(engine, 0.0) + (max(0.0, busy / elapsed / capacity) if elapsed > 0 else 0.0)
    return shares


def _clients_of(folder: Path, pid: int) -> Iterator[DrmClient]:
    name: str | None = None
    for number in os.listdir(folder / "fd"):
        try:
            target = os.readlink(folder / "fd" / number)
        except OSError:
            continue
        if "/dri/" in target:
            name = name or parse_numbers.words(read_text(folder / "comm"))
            client = parse_fdinfo(read_text(folder / "fdinfo" / number) or "", pid, name)
            if client is not None:
                yield client
