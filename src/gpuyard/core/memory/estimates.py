"""What jobs need and how long they take, learned from those that ran: from the exact command to the program alone.

- A fingerprint is that of the exact command with its configuration, or of the program, whose script counts as such. The
  most specific one that has been seen wins.
- Memory is admitted at a high quantile of the peaks of late, plus a margin that shrinks with evidence. A program that
  was seen with other arguments only gets more of a margin than the same command, and counts as unknown where its
  few runs were unlike each other.
- A run that was cut short says only that it needs at least so much; one that ran out of memory, more than that.
- What nobody measured teaches nothing: no peak is not a peak of zero, unless somebody looked often enough and saw
  nobody at all on its devices.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from gpuyard.core.job.job import JobSpec

KEPT_PEAKS = 32
_QUANTILE = 0.95
# Of the peak: what stays however often it was seen, and what a single run adds.
_MARGINS = {True: (0.02, 0.10), False: (0.05, 0.25)}
_LEAST_MARGIN_MB = 256.0
# What one command took says nothing yet about the program's others.
_LEAST_RUNS = {True: 1, False: 2}
_ALIKE, _MANY_RUNS = 1.5, 8


class Profile(Struct, frozen=True, kw_only=True):
    """What was learned under one fingerprint. Times are of the runs that succeeded; `peaks_mb` are the most that each
    of the last runs held on one device; `floor_mb` is what was not enough; the last prediction stands beside what was.
    """

    label: str = ""
    is_exact: bool = True
    count: int = 0
    least_s: float | None = None
    mean_s: float | None = None
    most_s: float | None = None
    peaks_mb: tuple[float, ...] = ()
    floor_mb: float | None = None
    ram_mb: float | None = None
    load_percent: float | None = None
    predicted_mb: float | None = None
    actual_mb: float | None = None
    seen_at: float = 0.0


class FinishedRun(Struct, frozen=True, kw_only=True):
    """What one attempt has to teach; what is `None` was not measured."""

    seconds: float | None = None
    peak_mb: float | None = None
    ram_mb: float | None = None
    load_percent: float | None = None
    predicted_mb: float | None = None
    lacked_mb: float | None = None
    is_whole: bool = True
    at: float = 0.0


class Estimate(Struct, frozen=True, kw_only=True):
    """How long a job will take: at least, most likely, at most; `None` where nothing says so."""

    least_s: float | None = None
    likely_s: float | None = None
    most_s: float | None = None


@lru_cache(maxsize=1024)
def fingerprints(words: Sequence[str], cwd: str = "", configuration: str = "") -> tuple[str, str]:
    """The exact command's, and the program's. A script that is named from where one stands is that one alone."""
    program = find_program(words, cwd)
    return _digest("\0".join((*program, *words, configuration))), _digest("\0".join(program))


def find_program(words: Sequence[str], cwd: str = "") -> tuple[str, str]:
    """An interpreter's script, or its module, counts as the program."""
    if not words:
        return "", ""
    script = next((word for word in words[1:] if not word.startswith("-") and "." in word), "")
    if "-m" in words[:-1]:
        script = words[words.index("-m") + 1]
    program = words[0]
    return _from(cwd, program) if "/" in program else program, _from(cwd, script) if script else ""


def _from(cwd: str, path: str) -> str:
    return path if path.startswith("/") or not cwd else f"{cwd}/{path}"


def learn(before: Profile, run: FinishedRun) -> Profile:
    """The profile with one more run; where that was cut short, only what it proves."""
    after = replace(before, seen_at=run.at)
    if run.lacked_mb is not None:
        after = replace(after, floor_mb=max(after.floor_mb or 0.0, run.lacked_mb))
    if run.seconds is not None and run.is_whole:
        after = _with_duration(after, run.seconds)
    if run.peak_mb is not None and (run.is_whole or run.peak_mb > max(before.peaks_mb, default=math.inf)):
        after = replace(after, peaks_mb=(*before.peaks_mb, run.peak_mb)[-KEPT_PEAKS:])
    if run.is_whole and run.peak_mb is not None:
        after = replace(after, predicted_mb=run.predicted_mb, actual_mb=run.peak_mb)
    return replace(
        after,
        ram_mb=_most(before.ram_mb, run.ram_mb),
        load_percent=run.load_percent if run.load_percent is not None else before.load_percent,
    )


def memory_estimate(profile: Profile) -> float | None:
    """What a run of it is given: the high quantile with its margin, and more than what was not enough."""
    if len(profile.peaks_mb) < _LEAST_RUNS[profile.is_exact]:
        return None
    peaks = sorted(profile.peaks_mb)
    high = peaks[min(len(peaks) - 1, math.floor(_QUANTILE * len(peaks)))]
    lasting, first = _MARGINS[profile.is_exact]
    margin = max(_LEAST_MARGIN_MB, high * (lasting + first / math.sqrt(len(peaks))))
    return max(high + margin, (profile.floor_mb or 0.0) * (1.0 + lasting))


def is_consistent(profile: Profile) -> bool:
    """Where a program's arguments change what it needs, a few other runs do not say how much this one does."""
    peaks = profile.peaks_mb
    if profile.is_exact or len(peaks) >= _MANY_RUNS:
        return True
    return max(peaks, default=0.0) <= _ALIKE * min(peaks, default=0.0)


def prediction_error(profile: Profile) -> float | None:
    """The last prediction less what was used, as a part of what was used."""
    if profile.predicted_mb is None or not profile.actual_mb:
        return None
    return (profile.predicted_mb - profile.actual_mb) / profile.actual_mb


def estimate(spec: JobSpec, learned: Profile | None) -> Estimate:
    """What the user said, else what was seen; no job takes longer than its limit."""
    if spec.duration_s is not None:
        told = Estimate(least_s=spec.duration_s, likely_s=spec.duration_s, most_s=spec.duration_s)
    elif learned is not None:
        told = Estimate(least_s=learned.least_s, likely_s=learned.mean_s, most_s=learned.most_s)
    else:
        told = Estimate()
    if spec.time_limit_s is None:
        return told
    limit = spec.time_limit_s
    return Estimate(
        least_s=None if told.least_s is None else min(told.least_s, limit),
        likely_s=None if told.likely_s is None else min(told.likely_s, limit),
        most_s=min(limit + spec.grace_s, float("inf") if told.most_s is None else told.most_s),
    )


def _with_duration(before: Profile, seconds: float) -> Profile:
    count = before.count + 1
    mean = before.mean_s or 0.0
    return replace(
        before,
        count=count,
        least_s=seconds if before.least_s is None else min(before.least_s, seconds),
        mean_s=mean + (seconds - mean) / count,
        most_s=seconds if before.most_s is None else max(before.most_s, seconds),
    )


def _most(before: float | None, now: float | None) -> float | None:
    return now if before is None else before if now is None else max(before, now)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=12).hexdigest()
