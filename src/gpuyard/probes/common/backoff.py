"""Exponential backoff after failures: one second, doubled with each failure, at most a minute."""

_MISSING_S = 60.0
_LONGEST_S = 60.0
_MOST_DOUBLINGS = 10  # 2.0 ** 1024 overflows


class Backoff:
    def __init__(self) -> None:
        self._failures = 0
        self._until = 0.0

    def is_resting(self, now: float) -> bool:
        return self._failures > 0 and now < self._until

    def fail(self, kind: str, now: float) -> None:
        """Record a failure of this kind of ProbeError. A missing tool is not looked for again within a minute."""
        self._failures += 1
        doublings = min(self._failures - 1, _MOST_DOUBLINGS)
        self._until = now + (_MISSING_S if kind == "missing" else min(_LONGEST_S, 2.0**doublings))

    def succeed(self) -> None:
        self._failures = 0
