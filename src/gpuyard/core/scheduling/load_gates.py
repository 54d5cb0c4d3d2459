"""Smoothed figures, and gates that open and close by them, so that a single spike or lull decides nothing.

Smoothing is an exponential average by time: a reading loses half of its weight per half-life, however far apart the
samples are. A figure that can no longer be read is remembered for a while, then counts as unknown.
"""

from msgspec import Struct

from gpuyard.core.scheduling.numbers import FORGET_AFTER_HALF_LIVES


class Smoothed(Struct, frozen=True, kw_only=True):
    """The average, and the time of the last known reading."""

    value: float | None = None
    at: float | None = None


def smooth(before: Smoothed, reading: float | None, now: float, half_life_s: float) -> Smoothed:
    """Return the average with one more reading, taken at `now` on a monotonic clock."""
    if before.value is None or before.at is None:
        return before if reading is None else Smoothed(value=reading, at=now)
    elapsed = now - before.at
    if reading is None:
        return Smoothed() if elapsed > FORGET_AFTER_HALF_LIVES * half_life_s else before
    if half_life_s <= 0:
        return Smoothed(value=reading, at=now)
    kept = 0.5 ** (max(0.0, elapsed) / half_life_s)
    return Smoothed(value=kept * before.value + (1 - kept) * reading, at=now)


def is_above(figure: float | None, limit: float | None, margin: float, *, was_above: bool) -> bool:
    """Return whether the figure exceeds the limit, or did and is not below it by a margin yet. Unknown: False."""
    if figure is None or limit is None:
        return False
    return figure > (limit - margin if was_above else limit)


def is_below(figure: float | None, limit: float | None, margin: float, *, was_below: bool) -> bool:
    """Return whether the figure is below the limit, or was and is not above it by a margin yet. Unknown: False."""
    if figure is None or limit is None:
        return False
    return figure < (limit + margin if was_below else limit)


class SteadyGate(Struct, frozen=True, kw_only=True):
    """Closes when a figure exceeds its limit. `within_since`: since when the figure of a closed gate is within."""

    is_closed: bool = False
    within_since: float | None = None


def judge_steadily(gate: SteadyGate, is_within: bool | None, now: float, steady_s: float) -> SteadyGate:  # noqa: FBT001
    """Reopen after `steady_s` seconds continuously within the limit. An unknown figure opens the gate."""
    if is_within is None:
        return SteadyGate()
    if not is_within:
        return SteadyGate(is_closed=True)
    if not gate.is_closed:
        return gate
    since = now if gate.within_since is None else min(gate.within_since, now)
    return SteadyGate() if now - since >= steady_s else SteadyGate(is_closed=True, within_since=since)
