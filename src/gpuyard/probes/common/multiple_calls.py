"""Several tool calls that make up one reading: they share a deadline, and some are optional."""

import re
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from gpuyard.core.snapshot import Problem, Reading, Vendor
from gpuyard.errors import ProbeError, ProbeTimeout
from gpuyard.probes.common.backoff import Backoff
from gpuyard.probes.common.deadline import Deadline
from gpuyard.probes.common.error_to_problem import as_problem
from gpuyard.probes.common.run_tool import ToolOutput, run_tool

_TIME_GIVEN = re.compile(r" within \d+(?:\.\d+)? s\b")


def run_until(argv: Sequence[str], deadline: Deadline, *, enough: Callable[[bytes], bool] | None = None) -> ToolOutput:
    """Run the tool within the remaining time. Raise ProbeTimeout without starting it if none remains."""
    if deadline.is_over():
        raise ProbeTimeout(argv[0], f"no time was left for `{' '.join(argv)}`")
    return run_tool(argv, deadline.left(), enough=enough)


def problem_beside(error: ProbeError, vendor: Vendor, about: str | None = None) -> Problem:
    """Return the problem of one failed call in a reading that otherwise succeeded.

    The remaining time differs between readings, so the message leaves it out: otherwise it would look new each time.
    """
    problem = as_problem(error, vendor, about)
    return replace(problem, message=_TIME_GIVEN.sub(" in time", problem.message))


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
