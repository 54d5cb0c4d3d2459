"""How starts on this machine go on after a limit of the system has kept a program from starting.

A limit passes: processes end, disk space is freed. So the job waits as before, and no attempt is used up. Nothing
starts for a while, which doubles with each failure, from 1 s to 30 s. Then one job is tried. If it is not reported back
within 1 s, it has begun, and all others may start.

A limit may concern one job alone, such as a program on a broken disk. So that such a job does not stop the others, it
is set aside for 30 s: at once if the limit concerns its own files, else after three failures in a row.
"""

from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.scheduling.numbers import FIRST_DELAY_S, LONGEST_DELAY_S, REPORTED_WITHIN_S

_MOST_IN_A_ROW = 3


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
        return replace(
            self,
            limit=limit,
            delay_s=delay_s,
            retry_at=now + delay_s,
            tried_at=None,
            failed_job=job_id,
            in_a_row=in_a_row,
        )

    def after_start(self, now: float) -> Self:
        """Note a start: if nothing is heard of it, the limit has passed."""
        return self if self.limit is None else replace(self, tried_at=now, retry_at=now + REPORTED_WITHIN_S)

    def at(self, now: float) -> Self:
        """Return the state at this time: without a limit once the job that was tried has begun."""
        return type(self)() if self.tried_at is not None and now >= self.retry_at else self

    def is_set_aside(self, limit: ResourceLimit, job_id: int) -> bool:
        """Return whether the job is to wait for 30 s, so that another one can be tried."""
        return limit.is_own or (job_id == self.failed_job and self.in_a_row >= _MOST_IN_A_ROW)

    def most_starts(self, now: float) -> int | None:
        """Return how many jobs may start; None for any number."""
        if self.limit is None:
            return None
        return int(self.tried_at is None and now >= self.retry_at)
