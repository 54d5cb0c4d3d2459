"""The host: CPU, memory and load, within the limits of the container we run in.

Rules:
- Never raises: a figure that cannot be read is None.
- A limit may be set at any level from the top of the cgroup tree down to our own group; the tightest one applies. Both
  cgroup versions are read, also side by side. A missing or unreadable file sets no limit.
- Limits rarely change, and finding them costs more than all other figures: they are read every 10 s.
- CPU load is the difference of two readings. Under a CPU quota it is the fraction of the quota that the group uses.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Host
from gpuyard.probes import parse_numbers
from gpuyard.probes.kernel_files import read_text

T = TypeVar("T")

REREAD_LIMITS_AFTER_S = 10.0
_FIRST_WINDOW_S = 0.1
_SHORTEST_WINDOW_S = 0.05  # the kernel counts CPU time in steps of 10 ms: a shorter window is noise
_UNLIMITED_BYTES = 2.0**60  # version 1 says "no limit" with the largest number of pages, a little under 2**63 bytes


class _CpuQuota(Struct, frozen=True, kw_only=True):
    """A quota of CPU time, in CPUs. The file `usage` counts the used time in `unit_s`."""

    cpus: float
    usage: Path
    unit_s: float


class _MemoryLimit(Struct, frozen=True, kw_only=True):
    """A memory limit in bytes of the group at `folder`. The file `usage` counts the bytes in use."""

    size: float
    folder: Path
    usage: str

    def left(self) -> float | None:
        """Return the bytes that may still be used. Under memory pressure the kernel drops the page cache first, also of
        files that are read again and again."""
        used = parse_numbers.number(read_text(self.folder / self.usage))
        statistics = read_text(self.folder / "memory.stat")
        cached = sum(_of_group(statistics, name) or 0.0 for name in ("inactive_file", "active_file"))
        return max(0.0, self.size - max(0.0, used - cached)) if used is not None else None


class _Limits(Struct, frozen=True, kw_only=True):
    memory: tuple[_MemoryLimit, ...]
    cpu: _CpuQuota | None


class _CpuTime(Struct, frozen=True, kw_only=True):
    """Seconds of CPU time that `source` (a quota, or `None` for the machine) used, and could have used, until `at`."""

    source: _CpuQuota | None
    at: float
    used: float
    whole: float


class PsutilHost:
    def __init__(
        self,
        root: Path = Path("/"),
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._root = root
        self._monotonic = monotonic
        self._sleep = sleep
        self._limits: _Limits | None = None
        self._limits_found_at = 0.0
        self._last: _CpuTime | None = None
        self._percent: float | None = None

    def read(self) -> Host:
        now = self._monotonic()
        if self._limits is None or now - self._limits_found_at > REREAD_LIMITS_AFTER_S:
            self._limits, self._limits_found_at = _find_limits(self._root), now
        cpus = _usable_cpus()
        quota = self._limits.cpu
        if quota is not None and cpus is not None and quota.cpus >= cpus:
            quota = None
        total, available, is_limited = _memory(self._limits.memory)
        load = _ask(psutil.getloadavg) or (None, None, None)
        try:
            name = socket.gethostname() or None
        except OSError:
            name = None
        return Host(
            name=name,
            cpu_count=quota.cpus if quota else cpus,
            cpu_percent=self._cpu_percent(quota),
            memory_total_mb=parse_numbers.megabytes(total, "B"),
            memory_available_mb=parse_numbers.megabytes(available, "B"),
            load_1m=load[0],
            load_5m=load[1],
            load_15m=load[2],
            limited_by="cgroup" if quota or is_limited else None,
        )

    def read_memory(self, host: Host) -> Host:
        """Return an earlier reading with the RAM that is available now. Limits are those that `read` found last."""
        total, available, _ = _memory(self._limits.memory if self._limits is not None else ())
        sizes = [parse_numbers.megabytes(size, "B") for size in (total, available)]
        return replace(host, memory_total_mb=sizes[0], memory_available_mb=sizes[1])

    def _cpu_percent(self, quota: _CpuQuota | None) -> float | None:
        before, now = self._last, self._cpu_time(quota)
        if before is not None and now is not None and before.source == now.source:
            if now.at - before.at < _SHORTEST_WINDOW_S:
                return self._percent
        elif now is not None:
            self._sleep(_FIRST_WINDOW_S)
            before, now = now, self._cpu_time(quota)
        self._last = now
        self._percent = _percent(before, now) if now is not None and before is not None else None
        return self._percent

    def _cpu_time(self, quota: _CpuQuota | None) -> _CpuTime | None:
        at = self._monotonic()
        if quota is None:
            spent = _ask(_machine_cpu_time)
            return _CpuTime(source=None, at=at, used=spent[0], whole=spent[1]) if spent else None
        text = read_text(quota.usage)
        used = _field(text, "usage_usec") if quota.usage.name == "cpu.stat" else parse_numbers.number(text)
        if used is None:
            return None
        return _CpuTime(source=quota, at=at, used=used * quota.unit_s, whole=at * quota.cpus)


def _percent(before: _CpuTime, now: _CpuTime) -> float | None:
    used, whole = now.used - before.used, now.whole - before.whole
    if now.source is None:
        used = max(0.0, used)  # the kernel's count of time spent waiting for disks may fall
    return parse_numbers.percent(min(1.0, used / whole) * 100) if whole > 0 else None


def _find_limits(root: Path) -> _Limits:
    """Return the limits in the directories from the top of each cgroup hierarchy down to our group."""
    paths = _paths_of_self(root)
    top = root / "sys/fs/cgroup"
    # Version 2 has one hierarchy, mounted at the top, or in `unified` if version 1 is mounted as well.
    unified = [folder for mount in (top, top / "unified") for folder in _lineage(mount, paths.get("", "/"))]
    memory, cpu, cpuacct = (_lineage(_mount(top, name), paths.get(name, "/")) for name in ("memory", "cpu", "cpuacct"))
    quotas = _cpu_quotas(unified, cpu, cpuacct)
    return _Limits(
        memory=tuple(_memory_limits(unified, memory)), cpu=min(quotas, key=lambda quota: quota.cpus, default=None)
    )


def _memory_limits(unified: Sequence[Path], legacy: Sequence[Path]) -> Iterator[_MemoryLimit]:
    files = [(folder, "memory.max", "memory.current") for folder in unified]
    files += [(folder, "memory.limit_in_bytes", "memory.usage_in_bytes") for folder in legacy]
    for folder, limit_file, usage_file in files:
        size = parse_numbers.number(read_text(folder / limit_file))
        if size is not None and 0 <= size < _UNLIMITED_BYTES:
            yield _MemoryLimit(size=size, folder=folder, usage=usage_file)


def _cpu_quotas(unified: Sequence[Path], cpu: Sequence[Path], cpuacct: Sequence[Path]) -> Iterator[_CpuQuota]:
    for folder in unified:
        quota, _, period = (read_text(folder / "cpu.max") or "").partition(" ")
        cpus = _ratio(quota, period)
        if cpus is not None:
            yield _CpuQuota(cpus=cpus, usage=folder / "cpu.stat", unit_s=1e-6)
    for depth, folder in enumerate(cpu):
        cpus = _ratio(read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))
        if cpus is not None:
            counted = cpuacct[depth] if depth < len(cpuacct) else folder
            yield _CpuQuota(cpus=cpus, usage=counted / "cpuacct.usage", unit_s=1e-9)


def _memory(limits: Sequence[_MemoryLimit]) -> tuple[float | None, float | None, bool]:
    """Return total and available memory in bytes, and whether a limit applies."""
    machine = _ask(psutil.virtual_memory)
    total = float(machine.total) if machine else None
    available = float(machine.available) if machine else None
    is_limited = False
    for limit in limits:
        left = limit.left()
        if total is None or limit.size < total:
            total, is_limited = limit.size, True
        if left is not None and (available is None or left < available):
            available = left
    if total is not None and available is not None:
        available = min(available, total)
    return total, available, is_limited


def _paths_of_self(root: Path) -> dict[str, str]:
    """Return our group in the hierarchy of each controller. Version 2 has the empty name."""
    paths: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mount(top: Path, controller: str) -> Path:
    """Return the mount of a version 1 controller, which may share its directory with another."""
    joint = (top / name for name in ("cpu,cpuacct", "cpuacct,cpu") if controller in {"cpu", "cpuacct"})
    return next((folder for folder in (top / controller, *joint) if _is_folder(folder)), top / controller)


def _lineage(mount: Path, path: str) -> list[Path]:
    """Return the existing directories from `mount` down to `path`, which may be valid only on the host."""
    folders = [mount]
    for part in path.split("/"):
        if part == "..":
            break
        if part:
            folders.append(folders[-1] / part)
    return [folder for folder in folders if _is_folder(folder)]


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _field(text: str | None, name: str) -> float | None:
    """Return the number of the line `name number`, or None."""
    lines = (line.partition(" ") for line in (text or "").splitlines())
    return next((parse_numbers.number(value) for key, _, value in lines if key == name), None)


def _of_group(statistics: str | None, name: str) -> float | None:
    """Return a figure of a group with its children: version 1 counts those separately."""
    whole = _field(statistics, f"total_{name}")
    return _field(statistics, name) if whole is None else whole


def _ratio(quota: str | None, period: str | None) -> float | None:
    allowed, of = parse_numbers.number(quota), parse_numbers.number(period)
    return allowed / of if allowed is not None and of is not None and allowed > 0 and of > 0 else None


def _usable_cpus() -> float | None:
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        try:
            return float(len(os.sched_getaffinity(0)))
        except OSError:
            pass
    count = _ask(psutil.cpu_count)
    return float(count) if count else None


def _machine_cpu_time() -> tuple[float, float]:
    times = psutil.cpu_times()._asdict()
    # Guest time is part of user time: adding it would count it twice.
    whole = sum(spent for kind, spent in times.items() if kind not in {"guest", "guest_nice"})
    return whole - times.get("idle", 0.0) - times.get("iowait", 0.0), whole


def _ask(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except (psutil.Error, OSError, RuntimeError, ValueError, LookupError, AttributeError):
        return None
