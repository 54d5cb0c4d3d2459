"""How often something may happen: some at once, and then so many a second. No clock of its own."""


class Bucket:
    def __init__(self, most: float, per_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left = float(most)
        self._at: float | None = None

    def take(self, now: float) -> float:
        """0 where it may happen, and has; else how many seconds are to pass first."""
        if self._at is not None:
            self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0
