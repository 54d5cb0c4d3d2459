"""No job starts while a disk that it needs is nearly full: that of the queue's state, of its logs, or of its output.

The limit is `[host] min_free_disk`, or that of the job (`--min-free-disk`) for the disks that it writes to. Until
`watch` is called there are no disks, and no limit.
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from gpuyard.control.transitions import JobTransitions
from gpuyard.core.scheduling.disk_space import CONFIGURED, DiskFigure, disk_reason, output_folders
from gpuyard.core.scheduling.wait_reasons import Reason
from gpuyard.ports import DiskSpace

_OPTION = "--min-free-disk, or min_free_disk under [host],"


class WatchedDisk(Struct, frozen=True, kw_only=True):
    """A disk of the queue: `what` is "state" or "logs"; or "output", a disk that jobs write to."""

    what: str
    figure: DiskFigure


class DiskGate:
    def __init__(self, transitions: JobTransitions) -> None:
        self._transitions = transitions
        self._disks: DiskSpace | None = None
        self._folders: Mapping[str, str] = {}

    def watch(self, disks: DiskSpace, folders: Mapping[str, str]) -> None:
        """Limit starts by these disks. `folders` are the queue's own, by what is in them."""
        self._disks, self._folders = disks, folders

    def closed_reasons(self, least_mb: float) -> Iterator[Reason]:
        """Yield why no job at all may start now."""
        found: dict[object, Reason] = {}
        for what, folder in self._folders.items():
            reason = self._reason(folder, least_mb, f"the disk of the queue's {what}", CONFIGURED)
            if reason is not None:
                found.setdefault(reason.text if reason.had is None else reason.had, reason)  # once if it is one disk
        yield from found.values()

    def notices(self, least_mb: float) -> list[str]:
        """Return what users should know about the disks of the queue."""
        reasons = [reason for reason in self.closed_reasons(least_mb) if reason.remedy]
        return [f"no job starts: {reason.text}; {reason.remedy}" for reason in reasons]

    def job_reasons(self, job_id: int, least_mb: float) -> tuple[Reason, ...]:
        """Return why this job may not start now: the disks that it writes to. `least_mb` is the configured limit."""
        spec = self._transitions.estimates.job(job_id).spec
        own_mb = spec.disk.min_free_mb
        folders = dict.fromkeys(output_folders(spec), "the disk of its output")
        if own_mb is not None and own_mb > least_mb:
            folders = {folder: f"the disk of the queue's {what}" for what, folder in self._folders.items()} | folders
        limit = least_mb if own_mb is None else own_mb
        found = (self._reason(folder, limit, what, _OPTION) for folder, what in folders.items())
        return tuple(reason for reason in found if reason is not None)

    def watched(self) -> list[WatchedDisk]:
        """Return the disks of the queue, and others that jobs write to, with their last figures."""
        if self._disks is None:
            return []
        for folder in self._folders.values():
            self._disks.figure(folder, 0.0)  # reads it again if it is old
        known = self._disks.known()
        own = [
            WatchedDisk(what=what, figure=known[folder]) for what, folder in self._folders.items() if folder in known
        ]
        theirs = known.keys() - set(self._folders.values())
        return own + [WatchedDisk(what="output", figure=known[folder]) for folder in sorted(theirs)]

    def _reason(self, folder: str, least_mb: float, what: str, limit: str) -> Reason | None:
        if self._disks is None or least_mb <= 0:
            return None
        return disk_reason(self._disks.figure(folder, least_mb), least_mb, what, limit)
