"""A deadline that several calls share."""

import time


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self._at - time.monotonic())

    def is_over(self) -> bool:
        return self.left() == 0.0
