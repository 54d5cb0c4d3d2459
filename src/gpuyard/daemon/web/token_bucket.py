"""A rate limit: a burst, then a number per second. The caller passes the time."""


class Bucket:
    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left = float(burst)
        self._at: float | None = None

    def take(self, now: float) -> float:
        """Take one and return 0, or return the seconds to wait until one is available."""
        if self._at is not None:
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0
