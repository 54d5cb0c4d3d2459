"""Readings of the machine during a run, by a thread with its own code: RAM, CPU time and disks of a limited group."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from tests.pressure.limited_group import LimitedGroup

_EVERY_S = 0.05
_MB = 1 << 20


class MachineReading(Struct, frozen=True, kw_only=True):
    """What was there at a moment of the monotonic clock. `free_disk_mb` is by the name of the disk."""

    at: float
    available_mb: float
    cpu_used_s: float
    free_disk_mb: Mapping[str, float] = {}


class MachineWatch:
    def __init__(self, group: LimitedGroup, disks: Mapping[str, Path] | None = None) -> None:
        self.readings: list[MachineReading] = []
        self._group, self._disks = group, disks or {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(_EVERY_S):
            self.readings.append(
                MachineReading(
                    at=time.monotonic(),
                    available_mb=self._group.available_mb(),
                    cpu_used_s=self._group.cpu_used_s(),
                    free_disk_mb={name: free_mb(path) for name, path in self._disks.items()},
                )
            )

    def lowest_mb(self, since: float) -> float:
        """Return the lowest RAM that was available since a moment."""
        return min((each.available_mb for each in self.readings if each.at >= since), default=self._group.total_mb)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()


def free_mb(path: Path) -> float:
    """Return the free space of the disk of a folder."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize / _MB
