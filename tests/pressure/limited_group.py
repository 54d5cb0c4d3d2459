"""Control groups with limits of RAM and CPU time, so that a run can use up "the machine" without harming others.

Both versions of control groups work, if this process may make groups: mostly that takes root. All figures are read
from the kernel's files here, and not with gpuyard's own code.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.torture.own_processes import reap_for

_TOP = Path("/sys/fs/cgroup")
_MB = 1 << 20
_PERIOD_US = 100_000
# The group gets its CPU time although the machine has other work; by default, a group has the weight 100.
_WEIGHT, _SHARES_PER_WEIGHT = 300, 10
_REMOVED_WITHIN_S = 20.0


class NoGroups(Exception):
    """This process may not make control groups."""


class LimitedGroup:
    """One group in the hierarchy of version 2, or one in each hierarchy of version 1, with the same name."""

    def __init__(self, name: str, ram_mb: float, cpus: float | None = None) -> None:
        is_second = (_TOP / "cgroup.controllers").exists()
        self._is_second = is_second
        self._memory = _TOP / name if is_second else _TOP / "memory" / name
        self._cpu = self._memory if is_second else _TOP / "cpu" / name
        self._used = self._memory if is_second else _TOP / "cpuacct" / name
        self.total_mb, self.cpus = ram_mb, cpus
        try:
            for folder in self._folders:
                folder.mkdir(exist_ok=True)
            self._write_limits(ram_mb, cpus)
        except OSError as error:
            self.remove()
            raise NoGroups(f"no control groups can be made here: {error}") from error

    @property
    def _folders(self) -> list[Path]:
        return list(dict.fromkeys((self._memory, self._cpu, self._used)))

    def _write_limits(self, ram_mb: float, cpus: float | None) -> None:
        ram, quota = str(int(ram_mb * _MB)), -1 if cpus is None else int(cpus * _PERIOD_US)
        if self._is_second:
            _write(self._memory / "memory.max", ram)
            _write(self._cpu / "cpu.max", f"{'max' if cpus is None else quota} {_PERIOD_US}")
            _write(self._cpu / "cpu.weight", str(_WEIGHT))
        else:
            _write(self._memory / "memory.limit_in_bytes", ram)
            _write(self._cpu / "cpu.cfs_quota_us", str(quota))
            _write(self._cpu / "cpu.shares", str(_WEIGHT * _SHARES_PER_WEIGHT))

    def enter(self) -> None:
        """Move this process into the group. What it starts from then on is in there, too."""
        for folder in self._folders:
            _write(folder / "cgroup.procs", "0")

    def available_mb(self) -> float:
        """Return the RAM that programs in the group can still take: the kernel drops the page cache before it kills."""
        used = int((self._memory / ("memory.current" if self._is_second else "memory.usage_in_bytes")).read_text())
        fields = _fields(self._memory / "memory.stat")
        prefix = "" if self._is_second else "total_"
        cached = fields[f"{prefix}inactive_file"] + fields[f"{prefix}active_file"]
        return self.total_mb - (used - cached) / _MB

    def kernel_kills(self) -> int:
        """Return how many processes the kernel has killed for lack of RAM."""
        return _fields(self._memory / ("memory.events" if self._is_second else "memory.oom_control"))["oom_kill"]

    def cpu_used_s(self) -> float:
        if self._is_second:
            return _fields(self._used / "cpu.stat")["usage_usec"] / 1e6
        return int((self._used / "cpuacct.usage").read_text()) / 1e9

    def remove(self) -> None:
        """Remove the group when the last process in it has ended; leave it after 20 s."""
        deadline = time.monotonic() + _REMOVED_WITHIN_S
        for folder in self._folders:
            while folder.exists():
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                if time.monotonic() > deadline:
                    return
                time.sleep(0.05)


def in_limited_group(script: str, ram_mb: float, cpus: float | None, run: Callable[[int, LimitedGroup], int]) -> int:
    """Make a group for a run of `scripts/SCRIPT`, and return the run's exit status; 2 if no group can be made. `run`
    gets the pid of the process that reaps its orphans, and the group."""
    try:
        group = LimitedGroup(f"gpuyard-{script}-{os.getpid()}-{int(time.time())}", ram_mb, cpus)
    except NoGroups as error:
        sys.stderr.write(f"scripts/{script}: {error}; run it as root\n")
        return 2
    try:
        return reap_for(lambda outer: run(outer, group))
    finally:
        group.remove()


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)  # without O_CREAT: a missing file means that the limit is not supported
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _fields(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}
