"""What an engine that places work itself accepts now, and how much of it a job needs."""

import math

from msgspec import Struct
from msgspec.structs import asdict

from gpuyard.core.job.job import StopWarning
from gpuyard.core.lease import Need, PartOfDevice

# Ray counts GPUs with four decimal places.
_PARTS = 10_000
_ROUNDING = 1e-6


class Amount(Struct, frozen=True, kw_only=True):
    """An amount of GPUs, CPUs and RAM. None: the engine does not count this resource."""

    gpus: float | None = None
    cpus: float | None = None
    ram_mb: float | None = None


class Offer(Struct, frozen=True, kw_only=True):
    """What an engine accepts now. An engine with its own queue reports neither `free` nor `total`."""

    trouble: str | None = None  # why it accepts nothing at the moment; None if it works
    free: Amount | None = None  # only jobs that fit into it are handed over, in queue order
    total: Amount | None = None  # the upper limit, which may grow
    most_jobs: int | None = None  # limit of live jobs
    card_mb: float | None = None  # memory of each of its GPUs, if configured


class ClusterTerms(Struct, frozen=True, kw_only=True):
    """What an attempt needs from an engine that places it, in place of a claim. `limit_s` is the user's time limit.
    Without one, `expected_s` is far longer than the job ever took. At most `at_most` jobs of `group` run at once.
    `options` are passed to the engine as the user typed them. `warning` is the signal before the end, if wanted."""

    need: Need
    name: str
    priority: int = 0
    cpus: int | None = None
    ram_mb: float | None = None
    limit_s: float | None = None
    expected_s: float | None = None
    group: int | None = None
    at_most: int | None = None
    options: tuple[str, ...] = ()
    warning: StopWarning | None = None


def gpu_count(need: Need, card_mb: float | None) -> float:
    """Return how many GPUs the need is. A job that shares its GPU needs a fraction, if the GPU size is known."""
    if need.devices != 1 or need.is_exclusive:
        return float(need.devices)
    if isinstance(need.memory, PartOfDevice):
        return _rounded(need.memory.part)
    return _rounded(need.required_mb / card_mb) if need.required_mb is not None and card_mb else 1.0


def _rounded(part: float) -> float:
    """Round up, so that a job never gets less than it needs, but keep as many jobs per GPU: three thirds still fit."""
    part = max(part, 1.0 / _PARTS)
    most = max(1, math.floor(1.0 / part + _ROUNDING))
    return min(math.ceil(part * _PARTS - _ROUNDING), _PARTS // most) / _PARTS


def amount_needed(terms: ClusterTerms, card_mb: float | None) -> Amount:
    """Return the resources that a job needs; one CPU by default."""
    return Amount(gpus=gpu_count(terms.need, card_mb), cpus=float(terms.cpus or 1), ram_mb=terms.ram_mb or 0.0)


def subtract(free: Amount, taken: Amount) -> Amount:
    """Subtract `taken` from `free` per field; None stays None."""
    used = asdict(taken)
    left = {name: None if had is None else had - (used[name] or 0.0) for name, had in asdict(free).items()}
    return Amount(**left)
