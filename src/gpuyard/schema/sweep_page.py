"""The answer about the runs of a sweep or an array."""

from msgspec import Struct

from gpuyard.schema.jobs import JobRow
from gpuyard.schema.queue import Iso
from gpuyard.schema.sweeps import GroupProgress, SweepColumn


class SweepRun(JobRow, frozen=True, kw_only=True):
    """`cells` has a value for each column of the table."""

    cells: list[str | float | None]


class SweepPage(Struct, frozen=True, kw_only=True):
    """`command` has its placeholders; `total` counts the runs on all pages, and `next` is the `after` of the next page,
    None on the last one."""

    id: int
    name: str | None
    tag: str | None
    command: str
    submitted_at: Iso
    varies: tuple[str, ...]
    progress: GroupProgress
    columns: list[SweepColumn]
    jobs: list[SweepRun]
    next: int | None
    total: int
