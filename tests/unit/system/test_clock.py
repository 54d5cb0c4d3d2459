"""Two clocks are read at the same moment, even if the process is stopped in between."""

import time
from collections.abc import Iterator

import pytest

from gpuyard.model.queue_time import start_queue_time
from gpuyard.system import clock
from gpuyard.system.clock import QueueClock, asleep, read_clocks, wall_time_of

NOW = 1_763_000_000.0


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped for an hour after it has read the first clock for the first time."""

    def moments() -> Iterator[float]:
        yield from (100.0, 3700.0)
        while True:
            yield 3700.0

    since_boot = moments()
    monkeypatch.setattr(clock, "since_boot", lambda: next(since_boot))
    monkeypatch.setattr(time, "time", lambda: NOW + 3700.0)
    monkeypatch.setattr(time, "monotonic", lambda: 3690.0)


@pytest.mark.usefixtures("stopped")
def test_clocks_are_read_again_if_the_process_was_stopped_in_between() -> None:
    assert read_clocks(time.time) == (3700.0, NOW + 3700.0)


@pytest.mark.usefixtures("stopped")
def test_a_stopped_process_does_not_look_like_a_machine_that_slept() -> None:
    assert asleep() == 10.0


@pytest.mark.usefixtures("stopped")
def test_a_time_since_boot_has_its_wall_time_although_the_process_was_stopped() -> None:
    steps: list[float] = []
    queue_clock = QueueClock(start_queue_time(None, "boot", 50.0, NOW + 50.0, None), steps.append)
    queue_clock.look()
    assert steps == []
    assert wall_time_of(3600.0) == NOW + 3600.0
