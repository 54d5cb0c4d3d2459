"""Work for engines that place it themselves: what one of them will take now, and how much a need is of it."""

import math

from msgspec import Struct

from gpuyard.core.lease import Need

# Ray counts GPUs to four places.
_PARTS = 10_000
_ROUNDING = 1e-6


class Amount(Struct, frozen=True, kw_only=True):
    """Of GPUs, CPUs and RAM; what is `None` is not counted there."""

    gpus: float | None = None
    cpus: float | None = None
    ram_mb: float | None = None


class Offer(Struct, frozen=True, kw_only=True):
    """What an engine will take now. Nothing while it is in `trouble`; at most `most_jobs` at a time; where `free` is
    told, only what fits, in the order of the queue, of a `total` that may grow. Its GPUs have `card_mb` each, where
    somebody has said so."""

    trouble: str | None = None
    free: Amount | None = None
    total: Amount | None = None
    most_jobs: int | None = None
    card_mb: float | None = None


class ClusterTerms(Struct, frozen=True, kw_only=True):
    """On what terms an attempt is handed over, in place of a claim: what it needs, for how long, how urgent it is.

    `limit_s` is the user's; `expected_s` is where there is none: it never took nearly as long. At most `at_most` of its
    `group` run at once. `options` are for that engine alone, as they were typed.
    """

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


def gpus_of(need: Need, card_mb: float | None) -> float:
    """How many GPUs that is, or which part of one: a job that shares its GPU asks for its share, where the size of the
    cards is known."""
    if need.devices != 1 or need.is_exclusive:
        return float(need.devices)
    part = need.part
    if need.memory_mb is not None:
        part = need.memory_mb / card_mb if card_mb else None
    return 1.0 if part is None else _rounded(part)


def _rounded(part: float) -> float:
    """Up: a little too much asked for is better than a little too little. But as many as fill a card fit there: three
    of a third each."""
    part = max(part, 1.0 / _PARTS)
    most = max(1, math.floor(1.0 / part + _ROUNDING))
    return min(math.ceil(part * _PARTS - _ROUNDING), _PARTS // most) / _PARTS


def amount_of(terms: ClusterTerms, card_mb: float | None) -> Amount:
    """Whoever says nothing of CPUs takes one."""
    return Amount(gpus=gpus_of(terms.need, card_mb), cpus=float(terms.cpus or 1), ram_mb=terms.ram_mb or 0.0)


def less(free: Amount, taken: Amount) -> Amount:
    """What is left; what is not counted stays so."""

    def left(had: float | None, used: float | None) -> float | None:
        return None if had is None else had - (used or 0.0)

    return Amount(
        gpus=left(free.gpus, taken.gpus), cpus=left(free.cpus, taken.cpus), ram_mb=left(free.ram_mb, taken.ram_mb)
    )
