"""How much longer a program takes beside other jobs than alone, fitted to its finished runs.

The slow-down of a job is 1 + k * L, where L is the load of its neighbours on its devices (1.0 is one fully busy device)
and k its coefficient: beside a job that keeps the device fully busy it takes 1 + k times as long.

- Before anything is measured, k is PRIOR_PART of the job's own load. Of the forms that were tried on 1,388 measured
  pairs of jobs, this fits best: a job that hardly uses the device is hardly slowed.
- A fit is a line through ln(duration) over ln(1 + L) of the runs of one command. Runs of equal L say nothing about k.
  Durations that differ for other reasons pull k towards what is known already: the noise decides how much a run counts.
  Noise, too, starts from that of all programs on the machine.
- The fit of a program is the sum of the fits within its commands, as other arguments take other times, and that of the
  machine is the sum over all programs. Each is what the narrower one starts from: on a host with too few cores, jobs
  of all programs slow each other. The last _KEPT_RUNS runs count most.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

# The loads of jobs that were not measured yet, and the part of the own load that k is expected to be.
UNKNOWN_LOAD_PERCENT = 50.0
PRIOR_PART = 0.5
# k is never believed to be larger: one run that hung would keep all others away.
_MOST = 4.0
_KEPT_RUNS = 16.0
# How far the slopes of programs differ, how much the durations of a command vary by themselves (both as standard
# deviations of logarithms), and how many runs that variation counts for.
_SPREAD, _USUAL_NOISE, _NOISE_RUNS = 0.3, 0.1, 2.0


class SlowdownFit(Struct, frozen=True, kw_only=True):
    """The runs so far, as means and sums of squares. `beside` is ln(1 + L), `log_s` is ln(duration)."""

    runs: float = 0.0
    beside: float = 0.0
    log_s: float = 0.0
    beside_squares: float = 0.0
    products: float = 0.0
    log_s_squares: float = 0.0


class RunBeside(Struct, frozen=True, kw_only=True):
    """A finished run: its logarithms, and what they add to the sums of squares of its command."""

    beside: float
    log_s: float
    beside_squares: float = 0.0
    products: float = 0.0
    log_s_squares: float = 0.0


def run_beside(command: SlowdownFit, seconds: float, neighbours_percent: float) -> RunBeside:
    """Return a run of the command for `add_run`. `command` is the fit before the run."""
    beside, log_s = math.log1p(max(0.0, neighbours_percent) / 100.0), math.log(max(seconds, 1e-3))
    part = command.runs / (command.runs + 1.0)
    off_beside, off_log_s = beside - command.beside, log_s - command.log_s
    return RunBeside(
        beside=beside,
        log_s=log_s,
        beside_squares=part * off_beside**2,
        products=part * off_beside * off_log_s,
        log_s_squares=part * off_log_s**2,
    )


def add_run(fit: SlowdownFit, run: RunBeside) -> SlowdownFit:
    """Return the fit of a command, or of its program, with one more run."""
    kept = min(1.0, (_KEPT_RUNS - 1.0) / fit.runs) if fit.runs else 1.0
    runs = fit.runs * kept + 1.0
    return SlowdownFit(
        runs=runs,
        beside=fit.beside + (run.beside - fit.beside) / runs,
        log_s=fit.log_s + (run.log_s - fit.log_s) / runs,
        beside_squares=fit.beside_squares * kept + run.beside_squares,
        products=fit.products * kept + run.products,
        log_s_squares=fit.log_s_squares * kept + run.log_s_squares,
    )


def prior_coefficient(load_percent: float | None) -> float:
    """Return k of a job with this load, before any of its runs is known."""
    load = UNKNOWN_LOAD_PERCENT if load_percent is None else load_percent
    return PRIOR_PART * min(load, 100.0) / 100.0


def coefficient(fits: Iterable[SlowdownFit], load_percent: float | None = None) -> float | None:
    """Return k, at least 0; None if no run says anything about it. `fits` are those of the machine, of the program and
    of the command: each starts from what the one before says."""
    found, noise, is_known = prior_coefficient(load_percent), _USUAL_NOISE**2, False
    for fit in fits:
        if fit.beside_squares > 0.0:
            noise = _noise(fit, noise)
            found, is_known = _fitted(fit, found, noise), True
    return found if is_known else None


def _noise(fit: SlowdownFit, expected: float) -> float:
    """Return the variance of the durations around the line, pulled towards what is expected. Two runs are always on a
    line, so they say nothing about it: without the noise of all programs, they would be believed whatever they show."""
    unexplained = max(0.0, fit.log_s_squares - fit.products**2 / fit.beside_squares)
    return (unexplained + _NOISE_RUNS * expected) / (max(0.0, fit.runs - 2.0) + _NOISE_RUNS)


def _fitted(fit: SlowdownFit, expected: float, noise: float) -> float:
    """Return k of the line through the runs, pulled towards what is expected. The slope of ln(1 + k * L) over
    ln(1 + L) is k * (1 + L) / (1 + k * L); it is compared at the mean of the runs."""
    load = math.expm1(fit.beside)
    expected_slope = expected * (1.0 + load) / (1.0 + expected * load)
    weight = noise / _SPREAD**2
    slope = max(0.0, (fit.products + weight * expected_slope) / (fit.beside_squares + weight))
    return slope / max(slope / _MOST, 1.0 + load * (1.0 - slope))


def slowdown(coefficient_: float, neighbours_percent: float) -> float:
    """Return how many times as long a job takes beside neighbours of this load."""
    return 1.0 + coefficient_ * max(0.0, neighbours_percent) / 100.0


def throughput(members: Sequence[tuple[float, float]], foreign_percent: float) -> float:
    """Return the work that jobs with these loads and coefficients do on one device, as a multiple of one job alone."""
    total = sum([load for load, _ in members]) + foreign_percent
    # As `slowdown` does, without a call for each: this runs for each device on which a waiting job may start.
    beside = [(each, total - load) for load, each in members]
    return sum([1.0 / (1.0 + each * max(0.0, others) / 100.0) for each, others in beside])
