"""How long jobs take, learned from those that ran: per fingerprint, from the exact command to the program alone."""

import hashlib
from collections.abc import Sequence

from msgspec import Struct

from gpuyard.core.jobs import JobSpec


class Durations(Struct, frozen=True, kw_only=True):
    """Of the runs that succeeded."""

    count: int
    least_s: float
    mean_s: float
    most_s: float


class Estimate(Struct, frozen=True, kw_only=True):
    """How long a job will take: at least, most likely, at most; `None` where nothing says so."""

    least_s: float | None = None
    likely_s: float | None = None
    most_s: float | None = None


def fingerprints(words: Sequence[str]) -> tuple[str, str]:
    """The exact command's, and the program's: an interpreter's script counts as the program."""
    script = next((word for word in words[1:] if not word.startswith("-") and "." in word), "")
    return _digest("\0".join(words)), _digest(f"{words[0]}\0{script}" if words else "")


def learn(before: Durations | None, seconds: float) -> Durations:
    if before is None:
        return Durations(count=1, least_s=seconds, mean_s=seconds, most_s=seconds)
    count = before.count + 1
    return Durations(
        count=count,
        least_s=min(before.least_s, seconds),
        mean_s=before.mean_s + (seconds - before.mean_s) / count,
        most_s=max(before.most_s, seconds),
    )


def estimate(spec: JobSpec, learned: Durations | None) -> Estimate:
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


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=12).hexdigest()
