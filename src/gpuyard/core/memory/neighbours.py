"""How much other work was beside an attempt on its devices, as means over its run time.

Samples come at uneven times, and a neighbour that is seen now was not there since the last sample: so each interval
counts with the figures that were seen at its start.
"""

from msgspec import Struct

from gpuyard.core.memory.slowdown import UNKNOWN_LOAD_PERCENT

# For how long a measured load counts as much as the assumption about it: programs begin with imports, at no load.
_ASSUMED_S = 20.0


class Neighbours(Struct, frozen=True, kw_only=True):
    """Means over the first `seconds` of the run time, and the figures since then."""

    seconds: float = 0.0
    percent: float = 0.0  # the sum of the neighbours' loads
    jobs: float = 0.0  # their number
    percent_now: float = 0.0
    jobs_now: float = 0.0


def note_neighbours(before: Neighbours | None, at_s: float, percent: float, jobs: float) -> Neighbours:
    """Return the means up to `at_s` seconds after the start, with the figures that hold from then on."""
    if before is None:
        return Neighbours(seconds=at_s, percent=percent, jobs=jobs, percent_now=percent, jobs_now=jobs)
    part = (at_s - before.seconds) / at_s if at_s > before.seconds else 0.0
    return Neighbours(
        seconds=max(before.seconds, at_s),
        percent=before.percent + (before.percent_now - before.percent) * part,
        jobs=before.jobs + (before.jobs_now - before.jobs) * part,
        percent_now=percent,
        jobs_now=jobs,
    )


def assumed_load(learned_percent: float | None, measured_percent: float | None, ran_s: float) -> float:
    """Return the load of a running job: learned, else measured so far, which counts more the longer it runs."""
    if learned_percent is not None:
        return learned_percent
    if measured_percent is None:
        return UNKNOWN_LOAD_PERCENT
    return (measured_percent * ran_s + UNKNOWN_LOAD_PERCENT * _ASSUMED_S) / (ran_s + _ASSUMED_S)
