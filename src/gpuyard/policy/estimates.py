"""Estimate the memory and duration of jobs from past runs.

The most specific fingerprint with past runs wins: of the command, else of the program; a first run is expected as those
of wider groups were, with a spread. A run that was cut short proves only that it needs at least its peak.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.model.energy import learn_power
from gpuyard.model.job_spec import JobSpec
from gpuyard.policy import numbers

# For how long memory was flat, when the part of the peak that was still missing then is learned.
FLAT_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


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
        part = min(1.0, numbers.KEPT_RUNS / (self.count + 1.0))
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
    assumed = min(numbers.ASSUMED_DEVICE_MB, numbers.ASSUMED_DEVICE_PART * device_mb)
    return ExpectedPeak(assumed, assumed)


@lru_cache(maxsize=512)
def narrowed(wider: ExpectedPeak, peaks_mb: tuple[float, ...], weight: float) -> ExpectedPeak:
    """Return what to expect after runs with these peaks, where what was expected without them counts as much as
    `weight` runs: MACHINE_WEIGHT for first runs of any program, PROGRAM_WEIGHT for those of its program."""
    if not peaks_mb:
        return wider
    moments = Moments(float(len(peaks_mb)), sum(peaks_mb), sum([peak * peak for peak in peaks_mb]))
    return ExpectedPeak(*moments.shrunk(wider.mean_mb, wider.spread_mb, weight))


def missing_part(flat_s: float, climbs: Iterable[Climb]) -> tuple[float, float]:
    """Return mean and spread of the part of its peak that a job lacks after `flat_s`. The widest climb comes first."""
    assumed = (
        (0.60, 0.30), (0.40, 0.35), (0.25, 0.30), (0.15, 0.25), (0.08, 0.20), (0.05, 0.15), (0.04, 0.12), (0.03, 0.10)
    )  # fmt: skip
    place = bisect_right(FLAT_S, flat_s)
    mean, spread = assumed[place]
    for climb in climbs:
        if 0 < place <= len(climb):
            mean, spread = climb[place - 1].shrunk(mean, spread, numbers.MISSING_WEIGHT)
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
    """Return the standard deviations that belong to a quantile from 0.5 on, to 0.0005 (Abramowitz, Stegun 26.2.23)."""
    t = math.sqrt(-2.0 * math.log(1.0 - quantile))
    high = 2.515517 + t * (0.802853 + t * 0.010328)
    low = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308))
    return max(0.0, t - high / low)


KEPT_PEAKS = KEPT_DURATIONS = 32
ProfileKind: TypeAlias = Literal["command", "program", "machine"]


class Profile(Struct, frozen=True, kw_only=True):
    label: str = ""
    is_exact: bool = True
    is_of_any: bool = False  # learned from first runs of any program
    count: int = 0  # number of successful runs
    durations_s: tuple[float, ...] = ()  # of the last of them, up to KEPT_DURATIONS
    peaks_mb: tuple[float, ...] = ()  # the peak on one device of each of the last runs, up to KEPT_PEAKS
    climb: Climb = ()  # how much of the peak was missing when memory had been flat for a while
    floor_mb: float | None = None  # memory that was not enough
    ram_mb: float | None = None
    ram_peaks_mb: tuple[float, ...] = ()  # the peak of RAM of each of the last runs, up to 16
    cpu_uses: tuple[float, ...] = ()  # how many CPUs each of the last runs kept busy
    load_percent: float | None = None
    power_w: float | None = None  # the highest power per GPU of recent runs
    predicted_mb: float | None = None  # the last prediction
    actual_mb: float | None = None  # the peak of that run
    seen_at: float = 0.0
    preallocates: str = ""  # its peaks are of runs in which this framework preallocated

    @property
    def kind(self) -> ProfileKind:
        """What it was learned from: runs of one command, of one program, or first runs of any."""
        return "command" if self.is_exact else "machine" if self.is_of_any else "program"

    @property
    def least_s(self) -> float | None:
        return min(self.durations_s, default=None)

    @property
    def mean_s(self) -> float | None:
        return sum(self.durations_s) / len(self.durations_s) if self.durations_s else None

    @property
    def most_s(self) -> float | None:
        return max(self.durations_s, default=None)


class FinishedRun(Struct, frozen=True, kw_only=True):
    """What one attempt teaches; None is unmeasured."""

    seconds: float | None = None
    peak_mb: float | None = None
    flat_levels_mb: tuple[float, ...] = ()
    ram_mb: float | None = None
    cpus_used: float | None = None  # CPU time by run time
    load_percent: float | None = None
    power_w: float | None = None
    predicted_mb: float | None = None
    preallocates: str = ""  # the framework that took most of a device at once: its peak says nothing about its need
    lacked_mb: float | None = None  # after running out of memory, the least that would have been enough
    is_whole: bool = True  # false for a run that was cut short
    at: float = 0.0


class Estimate(Struct, frozen=True, kw_only=True):
    """How long a job will take; None where unknown. What was learned bounds it with a margin."""

    least_s: float | None = None
    likely_s: float | None = None
    most_s: float | None = None


def fingerprints(
    command: Sequence[str], cwd: str = "", configuration: str = "", vendor: str | None = None
) -> tuple[str, str]:
    """Return those of the command and of the program (a relative script has its `cwd`), by `vendor` if several."""
    program = (*find_program(command, cwd), *(() if vendor is None else ("", vendor)))
    return _digest("\0".join((*program, *command, configuration))), _digest("\0".join(program))


@lru_cache(maxsize=64)
def machine_fingerprint(vendor: str | None, framework: str = "") -> str:
    """Return the fingerprint under which all first runs on this machine are learned, or those with a framework."""
    return _digest("\0".join(("", "machine", framework, *(() if vendor is None else (vendor,)))))


def find_program(command: Sequence[str], cwd: str = "") -> tuple[str, str]:
    """Return the program and, for an interpreter, its script or module."""
    if not command:
        return "", ""
    program, script = command[0], next((word for word in command[1:] if not word.startswith("-") and "." in word), "")
    if "-m" in command[:-1]:
        script = command[command.index("-m") + 1]
    within = f"{cwd}/" if cwd else ""
    if "/" in program and not program.startswith("/"):
        program = within + program
    return program, script if script.startswith("/") or not script else within + script


def learn(before: Profile, run: FinishedRun) -> Profile:
    """Return the profile with one more run. Peaks from before a program began or ceased to preallocate go."""
    if run.peak_mb is not None and run.is_whole and run.preallocates != before.preallocates:
        before = replace(before, preallocates=run.preallocates, peaks_mb=(), floor_mb=None)
    after = replace(before, seen_at=run.at)
    if run.lacked_mb is not None:
        after = replace(after, floor_mb=max(after.floor_mb or 0.0, run.lacked_mb))
    if run.seconds is not None and run.is_whole:
        durations = (*before.durations_s, round(run.seconds, 3))[-KEPT_DURATIONS:]
        after = replace(after, count=before.count + 1, durations_s=durations)
    if run.peak_mb is not None and (run.is_whole or run.peak_mb > max(before.peaks_mb, default=math.inf)):
        after = replace(after, peaks_mb=(*before.peaks_mb, run.peak_mb)[-KEPT_PEAKS:])
    if run.is_whole and run.peak_mb is not None:
        climb = learn_climb(before.climb, run.flat_levels_mb, run.peak_mb)
        after = replace(after, climb=climb, predicted_mb=run.predicted_mb, actual_mb=run.peak_mb)
    if run.ram_mb is not None and (run.is_whole or run.ram_mb > max(before.ram_peaks_mb, default=0.0)):
        after = replace(after, ram_peaks_mb=(*before.ram_peaks_mb, round(run.ram_mb, 1))[-numbers.KEPT_HOST_USES :])
    if run.cpus_used is not None and run.is_whole:
        after = replace(after, cpu_uses=(*before.cpu_uses, round(run.cpus_used, 2))[-numbers.KEPT_HOST_USES :])
    return replace(
        after,
        ram_mb=max((each for each in (before.ram_mb, run.ram_mb) if each is not None), default=None),
        load_percent=run.load_percent if run.load_percent is not None else before.load_percent,
        power_w=learn_power(before.power_w, run.power_w),
    )


def memory_estimate(profile: Profile) -> float | None:
    """Return the memory that the next run gets: the quantile with its margin, and more than what was not enough."""
    if len(profile.peaks_mb) < (1 if profile.is_exact else 2):  # one run of another command says nothing yet
        return None
    high = _high(profile.peaks_mb)
    # The part of the peak that is always added, and the part that shrinks with more runs.
    lasting, first = (0.02, 0.10) if profile.is_exact else (0.05, 0.25)
    margin = max(256.0, high * (lasting + first / math.sqrt(len(profile.peaks_mb))))
    return max(high + margin, (profile.floor_mb or 0.0) * (1.0 + lasting))


def _high(figures: Sequence[float]) -> float:
    """Return the high quantile; of a few figures, the highest."""
    return sorted(figures)[math.floor(numbers.PEAK_QUANTILE * len(figures))]


def is_consistent(profile: Profile) -> bool:
    """Return whether the peaks are alike: where arguments change the need, runs with others do not predict it."""
    peaks = profile.peaks_mb
    return profile.is_exact or max(peaks, default=0.0) <= numbers.ALIKE_FACTOR * min(peaks, default=0.0)


def prediction_error(profile: Profile) -> float | None:
    """Return the last prediction minus the actual use, as a part of the actual use."""
    if profile.predicted_mb is None or not profile.actual_mb:
        return None
    return (profile.predicted_mb - profile.actual_mb) / profile.actual_mb


def estimate(spec: JobSpec, learned: Profile | None) -> Estimate:
    """Return the declared duration, else the learned one; no job takes longer than its time limit."""
    if spec.duration_s is not None:
        found = Estimate(least_s=spec.duration_s, likely_s=spec.duration_s, most_s=spec.duration_s)
    elif learned is not None and learned.durations_s:
        durations = learned.durations_s
        margin = 1.0 + (1.0 if learned.is_exact else 4.0) / len(durations)
        low = -_high([-duration for duration in durations])
        found = Estimate(least_s=low / margin, likely_s=learned.mean_s, most_s=_high(durations) * margin)
    else:
        found = Estimate()
    if (limit := spec.time_limit_s) is None:
        return found
    return Estimate(
        least_s=None if found.least_s is None else min(found.least_s, limit),
        likely_s=None if found.likely_s is None else min(found.likely_s, limit),
        most_s=min(limit + spec.grace_s, math.inf if found.most_s is None else found.most_s),
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=12).hexdigest()
