"""The processes that use a card, from `/proc/<pid>/fdinfo/<fd>` of open files under `/dev/dri`.

Rules:
- A client is one open file of a card. Processes that share it show the same numbers, so it counts once, for the first.
- Other users' processes cannot be read, and those outside our container are not listed. A partial scan can show that a
  card is used, never that it is unused.
- Busy time is a running total: utilisation needs two scans. A client that is missing in the first one is left out.
- Only memory on the card counts, not memory of the host.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from gpuyard.core.snapshot import Process
from gpuyard.probes.common import parse_numbers
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.device_ids import pci_bus_id
from gpuyard.probes.common.kernel_files import read_text
from gpuyard.probes.intel.device_naming import one_per_pid

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # constant in the kernel for the initial namespace; containers have others
_DRIVERS = frozenset({"i915", "xe"})
_DEVICE_MEMORY = re.compile(r"drm-(resident|total)-(?:stolen-)?(?:local|vram)\d*", re.ASCII)
_ENGINE = re.compile(r"drm-(engine-capacity|engine|total-cycles|cycles)-(.+)", re.ASCII)


class DrmClient(Struct, frozen=True, kw_only=True):
    """`busy_ns` counts nanoseconds (i915); `cycles` count against `total_cycles` of the same engine (xe)."""

    key: str
    bus_id: str | None
    process: Process
    busy_ns: Mapping[str, float] = {}
    cycles: Mapping[str, float] = {}
    total_cycles: Mapping[str, float] = {}
    capacity: Mapping[str, float] = {}


class FdinfoScan(Struct, frozen=True, kw_only=True):
    """The clients at one moment. `is_whole` is True if every process could be read."""

    taken_at: float
    clients: tuple[DrmClient, ...]
    is_whole: bool

    def of(self, place: str | None, *, is_only_card: bool) -> tuple[DrmClient, ...]:
        """Return the clients of a card. Kernels before 6.0 may omit the bus id: then they belong to the only card."""
        return tuple(
            client for client in self.clients if client.bus_id == place or (client.bus_id is None and is_only_card)
        )


def look(proc: Path, deadline: Deadline, now: float) -> FdinfoScan:
    found: dict[str, DrmClient] = {}
    pids = _pids(proc)
    is_whole = 1 in pids and _link(proc / "self/ns/pid") == _FIRST_PID_NAMESPACE
    for pid in pids:
        if deadline.is_over():
            is_whole = False
            break
        try:
            for client in _clients_of(proc / str(pid), pid):
                found.setdefault(client.key, client)
        except PermissionError:
            is_whole = False
        except OSError:
            continue  # the process has exited
    return FdinfoScan(taken_at=now, clients=tuple(found.values()), is_whole=is_whole)


def parse_fdinfo(text: str, pid: int, name: str | None = None) -> DrmClient | None:
    """Return the client of one open file, or None if it is not a file of an Intel card."""
    pairs = dict(_pairs(text))
    client_id = pairs.get("drm-client-id")
    if pairs.get("drm-driver") not in _DRIVERS or not client_id:
        return None
    place = pci_bus_id(pairs.get("drm-pdev"))
    counters: dict[str, dict[str, float]] = {"engine": {}, "cycles": {}, "total-cycles": {}, "engine-capacity": {}}
    for key, value in pairs.items():
        match = _ENGINE.fullmatch(key)
        count = parse_numbers.number(value)
        if match and count is not None:
            counters[match[1]][match[2]] = count
    return DrmClient(
        key=f"{place} {client_id}",
        bus_id=place,
        process=Process(pid=pid, memory_mb=_device_memory(pairs), name=name),
        busy_ns=counters["engine"],
        cycles=counters["cycles"],
        total_cycles=counters["total-cycles"],
        capacity=counters["engine-capacity"],
    )


def processes(view: FdinfoScan, clients: Sequence[DrmClient]) -> tuple[Process, ...] | None:
    listed = one_per_pid(client.process for client in clients)
    return listed if listed or view.is_whole else None


def utilization(before: FdinfoScan, now: FdinfoScan, clients: Sequence[DrmClient]) -> float | None:
    """Return the utilisation of the busiest engine class between two scans."""
    if not (before.is_whole and now.is_whole) and not clients:
        return None
    earlier = {client.key: client for client in before.clients}
    elapsed_ns = (now.taken_at - before.taken_at) * 1e9
    shares: dict[str, float] = {}
    for client in clients:
        for engine, share in _shares(earlier.get(client.key), client, elapsed_ns):
            shares[engine] = shares.get(engine, 0.0) + share
    busiest = parse_numbers.percent(100 * max(shares.values(), default=0.0))
    return busiest or (busiest if before.is_whole and now.is_whole else None)


def _shares(before: DrmClient | None, now: DrmClient, elapsed_ns: float) -> Iterator[tuple[str, float]]:
    if before is None:
        return
    for engine, count in now.busy_ns.items():
        yield engine, _share(count - before.busy_ns.get(engine, count), elapsed_ns, now.capacity.get(engine))
    for engine, count in now.cycles.items():
        total = now.total_cycles.get(engine, 0.0) - before.total_cycles.get(engine, 0.0)
        yield engine, _share(count - before.cycles.get(engine, count), total, now.capacity.get(engine))


def _share(busy: float, elapsed: float, capacity: float | None) -> float:
    return max(0.0, busy / elapsed / (capacity or 1.0)) if elapsed > 0 else 0.0


def _device_memory(pairs: Mapping[str, str]) -> float | None:
    held: dict[str, list[float]] = {"resident": [], "total": []}
    for key, value in pairs.items():
        match = _DEVICE_MEMORY.fullmatch(key)
        size = parse_numbers.megabytes(value, "B") if match else None
        if match and size is not None:
            held[match[1]].append(size)
    sizes = held["resident"] or held["total"]
    return round(sum(sizes), 2) if sizes else None


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def _pids(proc: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isascii() and name.isdigit())
    except OSError:
        return []


def _clients_of(folder: Path, pid: int) -> Iterator[DrmClient]:
    name: str | None = None
    for number in os.listdir(folder / "fd"):
        if "/dri/" not in (_link(folder / "fd" / number) or ""):
            continue
        name = name or parse_numbers.words(read_text(folder / "comm"))
        client = parse_fdinfo(read_text(folder / "fdinfo" / number) or "", pid, name)
        if client is not None:
            yield client


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
