"""Calls that make up a reading: a deadline that they share, optional calls, and what becomes of a failure.

A failed call backs off for one second, doubled with each failure, at most a minute.
"""

import re
import time
from collections.abc import Callable, Sequence

from gpuyard.core.snapshot import Problem, Reading, Vendor
from gpuyard.errors import ProbeError, ProbeTimeout
from gpuyard.probes.common.run_tool import ToolOutput, run_tool

_MISSING_S = 60.0
_LONGEST_S = 60.0
_MOST_DOUBLINGS = 10  # 2.0 ** 1024 overflows
_TIME_GIVEN = re.compile(r" within \d+(?:\.\d+)? s\b")


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._at - time.monotonic())

    def is_over(self) -> bool:
        return self.left() == 0.0


class Backoff:
    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def is_resting(self, now: float) -> bool:
        return self._failures > 0 and now < self._until

    def fail(self, kind: str, now: float) -> None:
        """Record a failure of this kind of ProbeError. A missing tool is not looked for again within a minute."""
        self._failures += 1
        doublings = min(self._failures - 1, _MOST_DOUBLINGS)
        self._until = now + (_MISSING_S if kind == "missing" else min(_LONGEST_S, 2.0**doublings))

    def succeed(self) -> None:
        self._failures = 0


def as_problem(error: ProbeError, vendor: Vendor) -> Problem:
    return Problem(source=error.source, kind=error.kind, message=error.message, hint=error.hint, vendor=vendor)


def problem_beside(error: ProbeError, vendor: Vendor, about: str | None = None) -> Problem:
    """Return the problem of one failed call in a reading that otherwise succeeded; `about` names the failed part.

    The remaining time differs between readings, so the message leaves it out: otherwise it would look new each time.
    """
    message = _TIME_GIVEN.sub(" in time", f"{about}: {error.message}" if about else error.message)
    return Problem(source=error.source, kind=error.kind, message=message, hint=error.hint, vendor=vendor)


def run_until(argv: Sequence[str], deadline: Deadline, *, enough: Callable[[bytes], bool] | None = None) -> ToolOutput:
    """Run the tool within the remaining time. Raise ProbeTimeout without starting it if none remains."""
    if deadline.is_over():
        raise ProbeTimeout(argv[0], f"no time was left for `{' '.join(argv)}`")
    return run_tool(argv, deadline.left(), enough=enough)


class OptionalCall:
    """An optional call of a reading. While it backs off after a failure, it returns the same problem again."""

    def __init__(self, source: str, vendor: Vendor, about: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._vendor = vendor
        self._about = about
        self._clock = clock
        self._backoff = Backoff()
        self._failed = Reading()

    def ask(self, call: Callable[[], Reading], deadline: Deadline) -> Reading:
        """Return the reading of `call`, or a reading that has only the problem with it."""
        if self._backoff.is_resting(self._clock()):
            return self._failed
        if deadline.is_over():
            # The other calls used up the time. Backing off here would retry it in step with them.
            return self._without(ProbeTimeout(self._source, "no time was left for it"))
        try:
            answer = call()
        except ProbeError as error:
            self._backoff.fail(error.kind, self._clock())
            self._failed = self._without(error)
            return self._failed
        self._backoff.succeed()
        return answer

    def _without(self, error: ProbeError) -> Reading:
        return Reading(problems=(problem_beside(error, self._vendor, self._about),))
