"""Read how much space disks have free, without ever waiting for one: `statvfs` may hang for ever on a network disk
whose server is gone, so each reading is made in a thread of its own. A disk is read every 5 s while its figure is
asked for; one that is nearly full four times a second: jobs that start one after the other may fill it meanwhile."""

import os
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from gpuyard.model.units import MB
from gpuyard.policy.disk_and_system_limits import DiskFigure
from gpuyard.system.worker_threads import NoAnswerYet, WorkerThread

# A figure is read again after FRESH_S, and used until it is STALE_S old. One within NEAR_MB of the limit: for NEAR_S.
FRESH_S, STALE_S = 5.0, 30.0
NEAR_MB, NEAR_S = 4096.0, 0.25
# A disk that takes longer does not answer.
SILENT_S = 2.0


class _Entry(Struct):
    figure: DiskFigure | None = None
    read_at: float = float("-inf")
    asked_at: float | None = None  # since when it is being read
    is_awaited: bool = False  # there was no figure to return


def read_disk(folder: str) -> DiskFigure:
    """Return the free space of the disk of a folder, or of the nearest folder above it that exists. May hang."""
    path = folder
    while True:
        try:
            found = os.statvfs(path)
        except FileNotFoundError:
            if os.path.dirname(path) == path:
                return DiskFigure(folder=folder)
            path = os.path.dirname(path)
            continue
        except OSError:
            return DiskFigure(folder=folder)
        if not found.f_blocks:  # procfs, for example, has none: that is no full disk
            return DiskFigure(folder=folder)
        free_mb, total_mb = (blocks * found.f_frsize / MB for blocks in (found.f_bavail, found.f_blocks))
        return DiskFigure(folder=folder, free_mb=free_mb, total_mb=total_mb)


def read_disk_in_time(folder: str, timeout_s: float = SILENT_S) -> DiskFigure:
    """Return the free space, or a figure without one if the disk does not answer in time."""
    worker: WorkerThread[DiskFigure] = WorkerThread("gpuyard-disk")
    worker.start(lambda: read_disk(folder))
    try:
        return worker.finish(timeout_s)
    except NoAnswerYet:
        return DiskFigure(folder=folder, silent_s=timeout_s)


class DiskWatch:
    """Figures of disks by folder. `on_read` is called, in another thread, when a figure is there that was asked for."""

    def __init__(
        self,
        on_read: Callable[[], None] = lambda: None,
        read: Callable[[str], DiskFigure] = read_disk,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_read = on_read
        self._read = read
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # the one asked for last is the last

    def figure(self, folder: str, least_mb: float) -> DiskFigure | None:
        """Return the figure of the folder's disk, to compare with `least_mb`; None while it is being read. Never
        waits."""
        with self._lock:
            now = self._monotonic()
            entry = self._entries[folder] = self._entries.pop(folder, _Entry())
            age_s, fresh_s, stale_s = now - entry.read_at, FRESH_S, STALE_S
            free_mb = entry.figure.free_mb if entry.figure else None
            if free_mb is not None and free_mb < least_mb + NEAR_MB:
                # A figure below the limit is used until the next one is there: it lets nothing start.
                fresh_s, stale_s = NEAR_S, STALE_S if free_mb < least_mb else NEAR_S
            if age_s > fresh_s and entry.asked_at is None:
                if sum(each.asked_at is not None for each in self._entries.values()) >= 16:  # those of dead disks
                    return entry.figure or DiskFigure(folder=folder)
                self._begin(folder, entry, now)
            if entry.asked_at is not None and now - entry.asked_at > SILENT_S:
                return DiskFigure(folder=folder, silent_s=now - entry.asked_at)
            entry.is_awaited = age_s > stale_s
            return None if entry.is_awaited else entry.figure

    def known(self) -> dict[str, DiskFigure]:
        """Return the last figure of each folder that was asked for."""
        with self._lock:
            return {folder: each.figure for folder, each in self._entries.items() if each.figure is not None}

    def _begin(self, folder: str, entry: _Entry, now: float) -> None:
        """Start to read. Of more than 256 folders, forget those that were not asked for in the longest time."""
        entry.asked_at = now
        idle = [each for each, other in self._entries.items() if other.asked_at is None]
        for each in idle[: max(0, len(self._entries) - 256)]:
            del self._entries[each]
        threading.Thread(target=self._finish, args=(folder, entry), name="gpuyard-disk", daemon=True).start()

    def _finish(self, folder: str, entry: _Entry) -> None:
        figure = self._read(folder)
        with self._lock:
            is_awaited, entry.is_awaited = entry.is_awaited, False
            entry.figure, entry.read_at, entry.asked_at = figure, self._monotonic(), None
        if is_awaited:
            self._on_read()
