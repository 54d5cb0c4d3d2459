"""Shared by unit tests: a queue database in memory, and a wall clock that is stepped."""

import time
from collections.abc import Callable, Iterator

import pytest

from tests.unit.store import QueueDb


@pytest.fixture
def queue_db() -> Iterator[QueueDb]:
    made = QueueDb()
    yield made
    made.db.close()


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Step the wall clock of this process by the given seconds."""
    real = time.time

    def step(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + seconds)

    return step
