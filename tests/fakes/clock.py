"""A clock that moves only when the test moves it."""


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.time = now

    def now(self) -> float:
        return 1_763_000_000.0 + self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
