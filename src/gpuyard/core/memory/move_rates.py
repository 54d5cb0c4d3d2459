"""How fast this machine moves the GPU memory of programs to RAM and back, learned from each suspension (ADR 85).

- A driver moves the memory of a program by one thread of it, so the rates of several programs add up, until the
  machine's memory is the limit (`together_mb_s`).
- A program that parks its memory itself is many times faster.
- A rate is the mean of the last figure and of what was known, so that it follows a change within a few moves. Small
  moves are not learned from: they take as long as the start of a process.
"""

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

_LEAST_MB = 1024.0
_NEW_PART = 0.5
# What each move takes besides its memory: the start of the helper process, and the driver's calls.
_OVERHEAD_S = 0.5


class MoveRates(Struct, frozen=True, kw_only=True):
    """MB per second. The defaults are between those of slow and fast machines with an H200
    (docs/internals/measurements.md)."""

    out_mb_s: float = 2500.0
    back_mb_s: float = 5000.0
    parked_out_mb_s: float = 40000.0
    parked_back_mb_s: float = 20000.0
    together_mb_s: float = 6000.0

    def out_s(self, memory_mb: float, *, is_parked: bool = False) -> float:
        """Return how long it takes until the memory of one program is free."""
        return _OVERHEAD_S + memory_mb / (self.parked_out_mb_s if is_parked else self.out_mb_s)

    def back_s(self, memory_mb: float, *, is_parked: bool = False) -> float:
        return _OVERHEAD_S + memory_mb / (self.parked_back_mb_s if is_parked else self.back_mb_s)

    def all_out_s(self, moves: Iterable[tuple[float, bool]]) -> float:
        """Return how long it takes to move several programs side by side; each is given as MB and whether it parks."""
        known = list(moves)
        by_driver = [memory_mb for memory_mb, is_parked in known if not is_parked]
        alone = [self.out_s(memory_mb, is_parked=is_parked) for memory_mb, is_parked in known]
        shared = _OVERHEAD_S + sum(by_driver) / self.together_mb_s if len(by_driver) > 1 else 0.0
        return max((*alone, shared), default=0.0)


def learn_out(rates: MoveRates, memory_mb: float, seconds: float, *, is_parked: bool) -> MoveRates:
    """Return the rates after a program was moved out while no other was."""
    found = _rate(memory_mb, seconds)
    if found is None:
        return rates
    if is_parked:
        return replace(rates, parked_out_mb_s=_mean(rates.parked_out_mb_s, found))
    alone = _mean(rates.out_mb_s, found)
    return replace(rates, out_mb_s=alone, together_mb_s=max(alone, rates.together_mb_s))


def learn_back(rates: MoveRates, memory_mb: float, seconds: float, *, is_parked: bool) -> MoveRates:
    """Return the rates after a program was moved back while no other was."""
    found = _rate(memory_mb, seconds)
    if found is None:
        return rates
    if is_parked:
        return replace(rates, parked_back_mb_s=_mean(rates.parked_back_mb_s, found))
    return replace(rates, back_mb_s=_mean(rates.back_mb_s, found))


def learn_together(rates: MoveRates, memory_mb: float, seconds: float) -> MoveRates:
    """Return the rates after several programs with `memory_mb` in all were moved out side by side."""
    found = _rate(memory_mb, seconds)
    if found is None:
        return rates
    return replace(rates, together_mb_s=max(rates.out_mb_s, _mean(rates.together_mb_s, found)))


def _rate(memory_mb: float, seconds: float) -> float | None:
    """Return the rate of a move; None if it was too small to say anything."""
    if memory_mb < _LEAST_MB or seconds <= 0.0:
        return None
    return memory_mb / max(seconds - _OVERHEAD_S, seconds / 10)


def _mean(known: float, found: float) -> float:
    return round(known + _NEW_PART * (found - known), 1)
