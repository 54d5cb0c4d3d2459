"""Totals of a report, and the builder that sums them up over attempts."""

import math
from collections.abc import Iterator, Mapping
from statistics import median

from msgspec import Struct

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.report.hourly import HOUR_S

_MB_PER_GB = 1024.0
# Outcome, exit status, and where memory was short.
_CauseKey = tuple[str, int | None, str | None]


class WaitTotals(Struct, frozen=True, kw_only=True):
    """Time from being queued to the first start, of jobs that started in the window."""

    jobs: int
    median_s: float | None
    p90_s: float | None
    longest_s: float | None


class MemoryTotals(Struct, frozen=True, kw_only=True):
    """Memory that measured attempts reserved, and how much of it they never used; GPU-hours without a measurement."""

    reserved_gb_hours: float
    unused_gb_hours: float
    unused_percent: float | None
    unknown_gpu_hours: float


class Cause(Struct, frozen=True, kw_only=True):
    """An outcome other than success: number of attempts, and how many of them belong to jobs that succeeded later."""

    outcome: str
    status: int | None
    where: str | None
    attempts: int
    healed: int


class ReportTotals(Struct, frozen=True, kw_only=True):
    gpu_hours: float
    suspended_hours: float
    jobs: int
    attempts: int
    succeeded: int
    running: int
    waits: WaitTotals
    memory: MemoryTotals
    causes: tuple[Cause, ...]


class ReportGroup(ReportTotals, frozen=True, kw_only=True):
    """Totals of one user, workspace or name. `group` is None for the row that sums up the remaining `groups`."""

    group: str | None
    groups: int


class TotalsBuilder:
    """Running sums of one group of jobs."""

    def __init__(self) -> None:
        self.gpu_s = self.suspended_s = self.unknown_s = 0.0
        self.reserved_mb_s = self.unused_mb_s = 0.0
        self.attempts = self.succeeded = self.running = 0
        self.jobs: set[int] = set()
        self.waits: list[float] = []
        self.causes: dict[_CauseKey, tuple[int, int]] = {}

    def note_end(
        self, outcome: str | None, status: int | None, lacked: str | None, *, is_healed: bool, has_started: bool
    ) -> None:
        """Count an attempt by its outcome; None for an attempt that still runs."""
        if outcome is None:
            self.running += has_started
        elif outcome == OutcomeKind.SUCCEEDED:
            self.succeeded += 1
        else:
            # The exit status of a stopped program only says which signal ended it.
            cause = (outcome, status if outcome == OutcomeKind.FAILED else None, lacked)
            self._add_cause(cause, 1, int(is_healed))

    def _add_cause(self, cause: _CauseKey, attempts: int, healed: int) -> None:
        before = self.causes.get(cause, (0, 0))
        self.causes[cause] = (before[0] + attempts, before[1] + healed)

    def merge(self, other: "TotalsBuilder") -> None:
        """Add the sums of another group."""
        for name in ("gpu_s", "suspended_s", "unknown_s", "reserved_mb_s", "unused_mb_s", "attempts", "succeeded",
                     "running"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.jobs |= other.jobs
        self.waits += other.waits
        for cause, (attempts, healed) in other.causes.items():
            self._add_cause(cause, attempts, healed)

    def totals(self) -> ReportTotals:
        waits = sorted(self.waits)
        return ReportTotals(
            gpu_hours=self.gpu_s / HOUR_S,
            suspended_hours=self.suspended_s / HOUR_S,
            jobs=len(self.jobs),
            attempts=self.attempts,
            succeeded=self.succeeded,
            running=self.running,
            waits=WaitTotals(
                jobs=len(waits),
                median_s=median(waits) if waits else None,
                p90_s=waits[math.ceil(0.9 * len(waits)) - 1] if waits else None,
                longest_s=waits[-1] if waits else None,
            ),
            memory=MemoryTotals(
                reserved_gb_hours=self.reserved_mb_s / _MB_PER_GB / HOUR_S,
                unused_gb_hours=self.unused_mb_s / _MB_PER_GB / HOUR_S,
                unused_percent=100 * self.unused_mb_s / self.reserved_mb_s if self.reserved_mb_s else None,
                unknown_gpu_hours=self.unknown_s / HOUR_S,
            ),
            causes=tuple(_causes(self.causes)),
        )


def _causes(causes: Mapping[_CauseKey, tuple[int, int]]) -> Iterator[Cause]:
    """Yield causes, the most frequent first."""
    for (outcome, status, where), (attempts, healed) in sorted(
        causes.items(), key=lambda item: (-item[1][0], item[0][0], item[0][1] or 0, item[0][2] or "")
    ):
        yield Cause(outcome=outcome, status=status, where=where, attempts=attempts, healed=healed)
