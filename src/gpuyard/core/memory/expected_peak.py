"""How much memory a job without an estimate may come to use on a device: an expected peak, with its spread.

- Before the job uses any memory, the expectation comes from runs of the same program with other arguments, then from
  first runs on this machine of programs with the same framework, then of any program, and at last from the size of the
  device (`assumed_peak`). Few runs count little beside the next wider group (`narrow`).
- While it runs, it holds a level, and a part of its peak may be missing still. The longer its memory has been flat, the
  smaller that part is. How large it was in other runs is learned (`Climb`), per program and per machine.
- Several such jobs on a device need less than the sum of what each may need at worst (`margin_mb`).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache

from msgspec import Struct

from gpuyard.core.scheduling.numbers import (
    ALIKE_JOBS,
    ASSUMED_DEVICE_MB,
    ASSUMED_DEVICE_PART,
    KEPT_RUNS,
    MACHINE_WEIGHT,
    MISSING_WEIGHT,
    PROGRAM_WEIGHT,
)

# For how long memory was flat, and the mean and the spread of the part of the peak that was still missing then.
FLAT_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_ASSUMED_MISSING = (
    (0.60, 0.30), (0.40, 0.35), (0.25, 0.30), (0.15, 0.25), (0.08, 0.20), (0.05, 0.15), (0.04, 0.12), (0.03, 0.10)
)  # fmt: skip


class ExpectedPeak(Struct, frozen=True):
    mean_mb: float
    spread_mb: float

    def at_most_mb(self, sureness: float) -> float:
        """Return what it stays below with the probability that belongs to `sureness`, in standard deviations."""
        return self.mean_mb + sureness * self.spread_mb


class Moments(Struct, frozen=True, array_like=True):
    """The count, the sum and the sum of squares of observed figures."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def plus(self, figure: float) -> "Moments":
        """Return the moments with one more figure. Older figures fade once there are many."""
        part = min(1.0, KEPT_RUNS / (self.count + 1.0))
        return Moments(self.count * part + 1.0, self.total * part + figure, self.squares * part + figure * figure)

    def shrunk(self, mean: float, spread: float, weight: float) -> tuple[float, float]:
        """Return mean and spread together with `weight` assumed figures of that mean and spread."""
        count = self.count + weight
        joint = (self.total + weight * mean) / count
        squares = (self.squares + weight * (mean * mean + spread * spread)) / count
        return joint, math.sqrt(max(0.0, squares - joint * joint))


# The missing parts at each time of FLAT_S.
Climb = tuple[Moments, ...]


def assumed_peak(device_mb: float) -> ExpectedPeak:
    assumed = min(ASSUMED_DEVICE_MB, ASSUMED_DEVICE_PART * device_mb)
    return ExpectedPeak(assumed, assumed)


def peak_of_any(peaks_mb: Sequence[float], assumed: ExpectedPeak) -> ExpectedPeak:
    """Return what to expect of an unknown program, from the peaks of first runs on this machine. `assumed` is what is
    expected without them."""
    return _narrow(assumed, tuple(peaks_mb), MACHINE_WEIGHT)


def peak_of_program(peaks_mb: Sequence[float], of_any: ExpectedPeak) -> ExpectedPeak:
    """Return what to expect of a program, from the peaks of its runs with other arguments."""
    return _narrow(of_any, tuple(peaks_mb), PROGRAM_WEIGHT)


@lru_cache(maxsize=512)
def _narrow(wider: ExpectedPeak, peaks_mb: tuple[float, ...], weight: float) -> ExpectedPeak:
    if not peaks_mb:
        return wider
    moments = Moments(float(len(peaks_mb)), sum(peaks_mb), sum([peak * peak for peak in peaks_mb]))
    return ExpectedPeak(*moments.shrunk(wider.mean_mb, wider.spread_mb, weight))


def missing_part(flat_s: float, climbs: Iterable[Climb]) -> tuple[float, float]:
    """Return mean and spread of the part of its peak that a job lacks once its memory was flat for `flat_s`. `climbs`
    are those of the machine and of the program, the widest first."""
    place = bisect_right(FLAT_S, flat_s)
    mean, spread = _ASSUMED_MISSING[place]
    for climb in climbs:
        if 0 < place <= len(climb):
            mean, spread = climb[place - 1].shrunk(mean, spread, MISSING_WEIGHT)
    return mean, spread


def peak_while_running(level_mb: float, missing: tuple[float, float], before: ExpectedPeak) -> ExpectedPeak:
    """Return what to expect of a job that holds `level_mb` now. `before` is what was expected before it began."""
    mean, spread = missing
    whole = max(before.mean_mb, level_mb)
    return ExpectedPeak(level_mb + mean * whole, math.hypot(spread * whole, mean * before.spread_mb))


def learn_climb(before: Climb, levels_mb: Sequence[float], peak_mb: float) -> Climb:
    """Return the climb with one more run. `levels_mb` are its levels when it had been flat for each time of FLAT_S."""
    if peak_mb <= 0.0:
        return before
    known = (*before, *(Moments() for _ in range(len(levels_mb) - len(before))))
    parts = [max(0.0, peak_mb - level) / peak_mb for level in levels_mb]
    return (*map(Moments.plus, known, parts), *known[len(parts) :])


def sureness_of(quantile: float) -> float:
    """Return the number of standard deviations above the mean that belongs to a quantile of 0.5 or more, to 0.0005 (the
    rational approximation 26.2.23 of Abramowitz and Stegun)."""
    t = math.sqrt(-2.0 * math.log(1.0 - quantile))
    high = 2.515517 + t * (0.802853 + t * 0.010328)
    low = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))
    return max(0.0, t - high / low)


def margin_mb(spreads: float, squares: float, sureness: float) -> float:
    """Return what must stay free beside the means of several jobs, given the sum and the sum of squares of spreads."""
    return sureness * math.sqrt((1.0 - ALIKE_JOBS) * squares + ALIKE_JOBS * spreads * spreads)
