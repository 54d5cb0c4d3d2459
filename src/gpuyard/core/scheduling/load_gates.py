"""Smoothing: what a figure has been like of late, so that one spike or one lull decides nothing; gates that go by it.

An exponential average that knows how much time passed: a reading loses half of its weight per half-life, however far
apart the samples are. A figure that stays unknown is remembered for a while, then unknown again.
"""

from msgspec import Struct

# After this many half-lives without a reading, what is remembered counts for less than a tenth.
FORGET_AFTER_HALF_LIVES = 4.0


class Smoothed(Struct, frozen=True, kw_only=True):
    """The average as it stood `at` the time of the last reading that was known."""

    value: float | None = None
    at: float | None = None


def smooth(before: Smoothed, reading: float | None, now: float, half_life_s: float) -> Smoothed:
    """The average with one more reading, taken at `now` on a clock that never goes back."""
    if before.value is None or before.at is None:
        return before if reading is None else Smoothed(value=reading, at=now)
    elapsed = now - before.at
    if reading is None:
        return Smoothed() if elapsed > FORGET_AFTER_HALF_LIVES * half_life_s else before
    if half_life_s <= 0:
        return Smoothed(value=reading, at=now)
    kept = 0.5 ** (max(0.0, elapsed) / half_life_s)
    return Smoothed(value=kept * before.value + (1 - kept) * reading, at=now)


class Gate(Struct, frozen=True, kw_only=True):
    """Closed while a figure is beyond its bound; it opens again only when the figure is well within."""

    is_closed: bool = False


def judge_above(gate: Gate, figure: float | None, bound: float | None, margin: float) -> Gate:
    """For a figure that must not be too high. What is unknown closes nothing."""
    if figure is None or bound is None:
        return Gate()
    return Gate(is_closed=figure > (bound - margin if gate.is_closed else bound))


def judge_below(gate: Gate, figure: float | None, bound: float | None, margin: float) -> Gate:
    """For a figure that must not be too low."""
    if figure is None or bound is None:
        return Gate()
    return Gate(is_closed=figure < (bound + margin if gate.is_closed else bound))


class SteadyGate(Struct, frozen=True, kw_only=True):
    """Closed since its figure was beyond its bound; `within_since` says since when it no longer is."""

    is_closed: bool = False
    within_since: float | None = None


def judge_steadily(gate: SteadyGate, is_within: bool | None, now: float, steady_s: float) -> SteadyGate:  # noqa: FBT001
    """It opens once its figure has been within for so long without a break. What is unknown closes nothing."""
    if is_within is None:
        return SteadyGate()
    if not is_within:
        return SteadyGate(is_closed=True)
    if not gate.is_closed:
        return gate
    since = now if gate.within_since is None else min(gate.within_since, now)
    return SteadyGate() if now - since >= steady_s else SteadyGate(is_closed=True, within_since=since)
