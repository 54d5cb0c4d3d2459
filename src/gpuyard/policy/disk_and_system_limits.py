"""What keeps jobs from starting for a while: too little free disk space, and limits of the system, after which one job
is tried first.
"""

import itertools
from collections.abc import Iterator
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.job_spec import DiskLimits, JobSpec
from gpuyard.model.units import format_size
from gpuyard.policy.numbers import FIRST_DELAY_S, LONGEST_DELAY_S, REPORTED_WITHIN_S
from gpuyard.policy.wait_reasons import Reason, ReasonKind

CONFIGURED = "min_free_disk under [host] in the configuration"


class DiskFigure(Struct, frozen=True, kw_only=True):
    """The disk of a folder; None: unknown. `silent_s`: for how long it has not answered."""

    folder: str
    free_mb: float | None = None
    total_mb: float | None = None
    silent_s: float | None = None


def disk_reason(figure: DiskFigure | None, least_mb: float, what: str, remedy: str) -> Reason | None:
    """Return why nothing that writes to this disk may start now. Without a `figure`, the disk is being read."""
    if least_mb <= 0:
        return None
    if figure is None:
        return Reason(ReasonKind.DISK_FULL, f"the free space of {what} is being read")
    where, free_mb = f"{what} ({figure.folder})", figure.free_mb
    if figure.silent_s is not None:
        text = f"{where} has not answered for {figure.silent_s:.0f} s"
        return Reason(ReasonKind.DISK_FULL, text, needed=least_mb)
    if free_mb is None or free_mb >= least_mb:
        return None
    text, remedy = (
        f"{where} has {format_size(free_mb)} free < {format_size(least_mb)}",
        f"free some space; {remedy} is the limit",
    )
    return Reason(ReasonKind.DISK_FULL, text, had=free_mb, needed=least_mb, remedy=remedy)


def writes_files(spec: JobSpec) -> bool:
    """Return whether disks other than those of the queue matter to the job, or a limit of its own."""
    return not spec.engine and (spec.output is not None or spec.error is not None or spec.disk != DiskLimits())


def output_folders(spec: JobSpec) -> Iterator[str]:
    """Yield the folders that the job writes to, as far as they are known before the first placeholder."""
    folders: list[str] = []
    for pattern in (each for each in (spec.output, spec.error) if each is not None):
        path = pattern if pattern.startswith("/") else f"{spec.cwd}/{pattern}"
        known = itertools.takewhile(lambda name: "%" not in name and "{" not in name, path.split("/")[:-1])
        folders.append("/".join(known) or "/")
    yield from dict.fromkeys([*folders, *(() if spec.disk.output_root is None else (spec.disk.output_root,))])


class ResourceLimit(Struct, frozen=True, kw_only=True):
    """What kept a program from starting. `is_own`: it concerns only files that its job names."""

    text: str
    remedy: str = ""
    is_own: bool = False


class StartBackoff(Struct, frozen=True, kw_only=True):
    """`tried_at` is the start of the one job that is tried after a delay."""

    limit: ResourceLimit | None = None
    delay_s: float = 0.0
    retry_at: float = 0.0
    tried_at: float | None = None
    failed_job: int | None = None  # the last one that failed, `in_a_row` times
    in_a_row: int = 0

    def after_failure(self, limit: ResourceLimit, job_id: int, now: float) -> Self:
        """Wait for longer. Further failures of the same batch, which come during the wait, make it no longer."""
        if self.limit is not None and self.tried_at is None and now < self.retry_at:
            return replace(self, limit=limit)
        delay_s = min(LONGEST_DELAY_S, max(FIRST_DELAY_S, 2 * self.delay_s))
        in_a_row = self.in_a_row + 1 if job_id == self.failed_job else 1
        return type(self)(limit=limit, delay_s=delay_s, retry_at=now + delay_s, failed_job=job_id, in_a_row=in_a_row)

    def after_start(self, now: float) -> Self:
        """Note a start: if nothing is heard of it, the limit has passed."""
        return self if self.limit is None else replace(self, tried_at=now, retry_at=now + REPORTED_WITHIN_S)

    def at(self, now: float) -> Self:
        """Return the state at this time: without a limit once the job that was tried has begun."""
        return type(self)() if self.tried_at is not None and now >= self.retry_at else self

    def is_set_aside(self, limit: ResourceLimit, job_id: int) -> bool:
        """Return whether the job is to wait for 30 s, so that another one can be tried."""
        return limit.is_own or (job_id == self.failed_job and self.in_a_row >= 3)

    def most_starts(self, now: float) -> int | None:
        """Return how many jobs may start; None for any number."""
        if self.limit is None:
            return None
        return int(self.tried_at is None and now >= self.retry_at)
