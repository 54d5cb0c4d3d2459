import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from gpuyard.system.file_locks import DeferInterrupts


class Stopped(BaseException):
    pass


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def deferred(*numbers: int, steps: list[str]) -> None:
    with DeferInterrupts():
        with DeferInterrupts():
            for number in numbers:
                signal.raise_signal(number)
            steps.append("inner")
        steps.append("outer")


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)])
def test_a_signal_is_handled_when_the_outermost_block_is_left(number: int, error: type[BaseException]) -> None:
    signal.signal(signal.SIGTERM, stop)
    handler, steps = signal.getsignal(number), list[str]()
    with pytest.raises(error):
        deferred(number, steps=steps)
    assert steps == ["inner", "outer"]
    assert signal.getsignal(number) is handler


def test_a_handler_that_was_not_restored_passes_signals_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may come while handlers are restored."""
    install = signal.signal
    with DeferInterrupts():
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(signal, "signal", install)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_threads_defer_nothing() -> None:
    handler = signal.getsignal(signal.SIGINT)
    seen = []

    def look() -> None:
        with DeferInterrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]
