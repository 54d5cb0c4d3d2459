"""Signals to the processes of attempts, sent by a thread: the number comes later, and a failure is tried again."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from gpuyard.engines.local.attempt_processes import ProcessSignals
from gpuyard.model.job import Attempt, Started

DEADLINE_S = 60.0
ATTEMPT = Attempt(job_id=7, number=1, phase=Started(at=1.0, keeper_pid=9))


class Signals:
    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []
        self.failures: list[Exception] = []
        self.tried = threading.Semaphore(0)
        self.of_queue = ProcessSignals("queue", lambda: None)

    def send_each(self, attempts: Sequence[Attempt], queue: str, signum: int) -> list[int]:
        assert (queue, signum) == ("queue", signal.SIGTERM)
        try:
            if self.failures:
                raise self.failures.pop()
            self.sent.append(tuple(each.job_id for each in attempts))
            return [3] * len(attempts)
        finally:
            self.tried.release()

    def signal(self) -> int | None:
        [count] = self.of_queue.signal([ATTEMPT], signal.SIGTERM, self.send_each)
        return count


@pytest.fixture
def signals() -> Iterator[Signals]:
    signals = Signals()
    yield signals
    signals.of_queue.close()


def count_of(signals: Signals) -> int:
    """Call until the number is known. Each call sends the signal unless it is under way."""
    until = time.monotonic() + DEADLINE_S
    while (count := signals.signal()) is None:
        assert time.monotonic() < until, "the number is never known"
        signals.tried.acquire(timeout=0.01)
    return count


def test_a_signal_is_sent_once_until_its_number_is_returned(signals: Signals) -> None:
    assert count_of(signals) == 3
    assert signals.sent == [(7,)]
    assert count_of(signals) == 3
    assert signals.sent == [(7,), (7,)]


def test_a_failure_is_logged_and_the_next_call_sends_again(signals: Signals, caplog: pytest.LogCaptureFixture) -> None:
    signals.failures.append(OSError("the process table cannot be read"))
    assert count_of(signals) == 3
    assert signals.sent == [(7,)]
    signals.of_queue.close()  # after the thread has ended, its failure is logged
    assert "the process table cannot be read" in caplog.text
