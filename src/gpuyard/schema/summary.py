"""The summary of a night: what succeeded and failed, and why; what runs and waits; what it cost."""

from typing import Annotated

from msgspec import Meta, Struct

from gpuyard.core.report.energy import EnergyTotals
from gpuyard.core.report.queue_summary import FailureCause, JobsNow
from gpuyard.schema.queue import Iso


class SummaryQuery(Struct, frozen=True, kw_only=True):
    since: Annotated[
        str,
        Meta(
            description="the time of day, date or time ago that it begins at, such as 22:00, 2026-11-18T22:00 or 8h; "
            "default: the last 18:00 that was at least 6 h ago"
        ),
    ] = ""


class QueueSummary(Struct, frozen=True, kw_only=True):
    """`succeeded`, `failed`, `rejected` and `cancelled` count jobs that ended since then, and are still so.
    `failed_ids` are the failed ones, such as `3-5 9`, which `causes` counts by cause. `energy` is that of the
    `gpu_hours` since then, with what it cost where a price is configured. `unbrought` has a line for each snapshot with
    results that could not be brought back to the tree."""

    since: Iso
    until: Iso
    host: str | None
    succeeded: int
    failed: int
    rejected: int
    cancelled: int
    failed_ids: str
    causes: list[FailureCause]
    now: JobsNow
    gpu_hours: float
    energy: EnergyTotals
    unbrought: list[str]
