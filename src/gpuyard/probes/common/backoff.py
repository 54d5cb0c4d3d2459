"""How long something that failed is left alone: for a second at first, twice as long each time, a minute at most."""

_MISSING_S = 60.0
_LONGEST_S = 60.0
_MOST_DOUBLINGS = 10  # a thousand would be too large a number


class Backoff:
    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def is_resting(self, now: float) -> bool:
        return self._failures > 0 and now < self._until

    def fail(self, kind: str, now: float) -> None:
        """`kind` as of a ProbeError: what is not installed will not appear within a second."""
        self._failures += 1
        doublings = min(self._failures - 1, _MOST_DOUBLINGS)
        self._until = now + (_MISSING_S if kind == "missing" else min(_LONGEST_S, 2.0**doublings))

    def succeed(self) -> None:
        self._failures = 0
