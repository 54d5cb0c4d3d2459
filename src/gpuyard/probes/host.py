"""The host: CPU, memory and load, within the limits of the container we run in. A figure that cannot be read is None.

- A limit may be set at any level from the top of the cgroup tree down to our own group; the tightest one applies. Both
  cgroup versions are read, also side by side. Finding limits costs more than all other figures: once in 10 s.
- CPU load is the difference of two readings. Under a CPU quota it is the fraction of the quota that the group uses."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.machine_snapshot import Host
from gpuyard.probes.kernel_files import read_text
from gpuyard.probes.parse_numbers import megabytes, number, percent

T = TypeVar("T")

REREAD_LIMITS_AFTER_S = 10.0


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
        used = number(read_text(self.folder / self.usage))
        figures = _fields(read_text(self.folder / "memory.stat"))
        # Version 1 counts a group with its children separately.
        cached = sum(figures.get(f"total_{name}", figures.get(name, 0.0)) for name in ("inactive_file", "active_file"))
        return max(0.0, self.size - max(0.0, used - cached)) if used is not None else None


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
        self._limits: tuple[_MemoryLimit, ...] = ()
        self._quota: _CpuQuota | None = None
        self._limits_found_at = float("-inf")
        self._last: _CpuTime | None = None
        self._percent: float | None = None

    def read(self) -> Host:
        now = self._monotonic()
        if now - self._limits_found_at > REREAD_LIMITS_AFTER_S:
            (self._limits, self._quota), self._limits_found_at = _find_limits(self._root), now
        cpus, quota = _usable_cpus(), self._quota
        if quota is not None and cpus is not None and quota.cpus >= cpus:
            quota = None
        total, available, is_limited = self._memory()
        load = _ask(psutil.getloadavg) or (None, None, None)
        return Host(
            name=_ask(socket.gethostname) or None,
            cpu_count=quota.cpus if quota else cpus,
            cpu_percent=self._cpu_percent(quota),
            memory_total_mb=megabytes(total, "B"),
            memory_available_mb=megabytes(available, "B"),
            load_1m=load[0],
            load_5m=load[1],
            load_15m=load[2],
            limited_by="cgroup" if quota or is_limited else None,
        )

    def read_memory(self, host: Host) -> Host:
        """Return an earlier reading with the RAM that is available now. Limits are those that `read` found last."""
        total, available, _ = self._memory()
        return replace(host, memory_total_mb=megabytes(total, "B"), memory_available_mb=megabytes(available, "B"))

    def _memory(self) -> tuple[float | None, float | None, bool]:
        """Return total and available memory in bytes, and whether a limit applies."""
        machine = _ask(psutil.virtual_memory)
        total = float(machine.total) if machine else None
        available = float(machine.available) if machine else None
        is_limited = False
        for limit in self._limits:
            left = limit.left()
            if total is None or limit.size < total:
                total, is_limited = limit.size, True
            if left is not None and (available is None or left < available):
                available = left
        if total is not None and available is not None:
            available = min(available, total)
        return total, available, is_limited

    def _cpu_percent(self, quota: _CpuQuota | None) -> float | None:
        before, now = self._last, self._cpu_time(quota)
        if before is not None and now is not None and before.source == now.source:
            if now.at - before.at < 0.05:  # the kernel counts CPU time in steps of 10 ms: a shorter window is noise
                return self._percent
        elif now is not None:
            self._sleep(0.1)
            before, now = now, self._cpu_time(quota)
        self._last, self._percent = now, None
        if now is not None and before is not None and now.whole > before.whole:
            used = now.used - before.used
            if now.source is None:
                used = max(0.0, used)  # the kernel's count of time spent waiting for disks may fall
            self._percent = percent(min(1.0, used / (now.whole - before.whole)) * 100)
        return self._percent

    def _cpu_time(self, quota: _CpuQuota | None) -> _CpuTime | None:
        at = self._monotonic()
        if quota is None:
            times = _ask(lambda: psutil.cpu_times()._asdict())
            if times is None:
                return None
            # Guest time is part of user time: adding it would count it twice.
            whole = sum(spent for kind, spent in times.items() if kind not in {"guest", "guest_nice"})
            used = whole - times.get("idle", 0.0) - times.get("iowait", 0.0)
            return _CpuTime(source=None, at=at, used=used, whole=whole)
        text = read_text(quota.usage)
        counted = _fields(text).get("usage_usec") if quota.usage.name == "cpu.stat" else number(text)
        if counted is None:
            return None
        return _CpuTime(source=quota, at=at, used=counted * quota.unit_s, whole=at * quota.cpus)


def _find_limits(root: Path) -> tuple[tuple[_MemoryLimit, ...], _CpuQuota | None]:
    """Return the limits in the directories from the top of each cgroup hierarchy down to our group."""
    paths: dict[str, str] = {}  # our group in the hierarchy of each controller; version 2 has the empty name
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        paths.update(dict.fromkeys(controllers.split(","), path))
    top = root / "sys/fs/cgroup"
    # Version 2 has one hierarchy, mounted at the top, or in `unified` if version 1 is mounted as well.
    unified = [folder for mount in (top, top / "unified") for folder in _lineage(mount, paths.get("", "/"))]
    legacy = {}
    for name in ("memory", "cpu", "cpuacct"):  # the last two may share a directory
        joint = ("cpu,cpuacct", "cpuacct,cpu") if name != "memory" else ()
        mount = next((top / each for each in (name, *joint) if _is_folder(top / each)), top / name)
        legacy[name] = _lineage(mount, paths.get(name, "/"))
    files = [(folder, "memory.max", "memory.current") for folder in unified]
    files += [(folder, "memory.limit_in_bytes", "memory.usage_in_bytes") for folder in legacy["memory"]]
    sizes = ((number(read_text(folder / limit)), folder, usage) for folder, limit, usage in files)
    quotas = [
        _quota(*(read_text(folder / "cpu.max") or "").partition(" ")[::2], folder / "cpu.stat", 1e-6)
        for folder in unified
    ]
    for depth, folder in enumerate(legacy["cpu"]):
        quota, period = (read_text(folder / f"cpu.cfs_{each}_us") for each in ("quota", "period"))
        counted = legacy["cpuacct"][depth] if depth < len(legacy["cpuacct"]) else folder
        quotas.append(_quota(quota, period, counted / "cpuacct.usage", 1e-9))
    # Version 1 says "no limit" with the largest number of pages, a little under 2**63 bytes.
    limits = tuple(
        _MemoryLimit(size=size, folder=folder, usage=usage)
        for size, folder, usage in sizes
        if size is not None and 0 <= size < 2.0**60
    )
    return limits, min(filter(None, quotas), key=lambda quota: quota.cpus, default=None)


def _quota(quota: str | None, period: str | None, usage: Path, unit_s: float) -> _CpuQuota | None:
    allowed, of = number(quota), number(period)
    if allowed is None or of is None or allowed <= 0 or of <= 0:
        return None
    return _CpuQuota(cpus=allowed / of, usage=usage, unit_s=unit_s)


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
    return bool(_ask(path.is_dir))


def _fields(text: str | None) -> dict[str, float]:
    """Return the numbers of lines `name number`."""
    lines = (line.partition(" ") for line in (text or "").splitlines())
    return {name: value for name, _, raw in lines if (value := number(raw)) is not None}


def _usable_cpus() -> float | None:
    cpus = _ask(lambda: os.sched_getaffinity(0))  # macOS has none
    count = len(cpus) if cpus else _ask(psutil.cpu_count)
    return float(count) if count else None


def _ask(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except (psutil.Error, OSError, RuntimeError, ValueError, LookupError, AttributeError):
        return None
