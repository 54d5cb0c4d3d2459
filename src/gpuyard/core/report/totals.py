"""The figures of a report: what a number of attempts come to together, and the tally that adds them up."""

import math
from collections.abc import Iterator, Mapping
from statistics import median

from msgspec import Struct

from gpuyard.core.job.job import OutcomeKind
from gpuyard.core.report.hourly import HOUR_S

_MB_PER_GB = 1024.0
# How it ended, with which status, and where memory was lacking.
_CauseKey = tuple[str, int | None, str | None]


class WaitTotals(Struct, frozen=True, kw_only=True):
    """From being queued to the first start, of those that started in the window."""

    jobs: int
    median_s: float | None
    p90_s: float | None
    longest_s: float | None


class MemoryTotals(Struct, frozen=True, kw_only=True):
    """Of the attempts that were measured what was reserved, and what of that was never used; how long others had
    devices."""

    reserved_gb_hours: float
    unused_gb_hours: float
    unused_percent: float | None
    unknown_gpu_hours: float


class Cause(Struct, frozen=True, kw_only=True):
    """A way in which attempts ended other than well, and how many of them were of jobs that succeeded later."""

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


class TotalsBuilder:
    """What a group comes to, as it is added up."""

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
        """`None` of one that goes on."""
        if outcome is None:
            self.running += has_started
        elif outcome == OutcomeKind.SUCCEEDED:
            self.succeeded += 1
        else:
            # Of one that was made to stop, the status says only how.
            told = status if outcome == OutcomeKind.FAILED else None
            self._note((outcome, told, lacked), 1, int(is_healed))

    def _note(self, cause: _CauseKey, attempts: int, healed: int) -> None:
        before = self.causes.get(cause, (0, 0))
        self.causes[cause] = (before[0] + attempts, before[1] + healed)

    def take(self, other: "TotalsBuilder") -> None:
        for name in ("gpu_s", "suspended_s", "unknown_s", "reserved_mb_s", "unused_mb_s", "attempts", "succeeded",
                     "running"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.jobs |= other.jobs
        self.waits += other.waits
        for cause, (attempts, healed) in other.causes.items():
            self._note(cause, attempts, healed)

    def figures(self) -> ReportTotals:
        return ReportTotals(
            gpu_hours=self.gpu_s / HOUR_S,
            suspended_hours=self.suspended_s / HOUR_S,
            jobs=len(self.jobs),
            attempts=self.attempts,
            succeeded=self.succeeded,
            running=self.running,
            waits=_waits(self.waits),
            memory=MemoryTotals(
                reserved_gb_hours=self.reserved_mb_s / _MB_PER_GB / HOUR_S,
                unused_gb_hours=self.unused_mb_s / _MB_PER_GB / HOUR_S,
                unused_percent=100 * self.unused_mb_s / self.reserved_mb_s if self.reserved_mb_s else None,
                unknown_gpu_hours=self.unknown_s / HOUR_S,
            ),
            causes=tuple(_causes(self.causes)),
        )


def _waits(waits: list[float]) -> WaitTotals:
    if not waits:
        return WaitTotals(jobs=0, median_s=None, p90_s=None, longest_s=None)
    ordered = sorted(waits)
    p90 = ordered[math.ceil(0.9 * len(ordered)) - 1]
    return WaitTotals(jobs=len(ordered), median_s=median(ordered), p90_s=p90, longest_s=ordered[-1])


def _causes(causes: Mapping[_CauseKey, tuple[int, int]]) -> Iterator[Cause]:
    """The most frequent first."""
    for (outcome, status, where), (attempts, healed) in sorted(
        causes.items(), key=lambda item: (-item[1][0], item[0][0], item[0][1] or 0, item[0][2] or "")
    ):
        yield Cause(outcome=outcome, status=status, where=where, attempts=attempts, healed=healed)
