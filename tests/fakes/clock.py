"""A clock that moves only when the test moves it."""


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.time = now
        self.suspended_s = 0.0
        self.shift = 0.0  # what the wall clock is ahead of `now`

    def now(self) -> float:
        return 1_763_000_000.0 + self.time

    def monotonic(self) -> float:
        return self.time

    def asleep(self) -> float:
        return self.suspended_s

    def to_wall(self, at: float) -> float:
        return at + self.shift

    def from_wall(self, at: float) -> float:
        return at - self.shift

    def sleep(self, seconds: float) -> None:
        self.time += seconds
