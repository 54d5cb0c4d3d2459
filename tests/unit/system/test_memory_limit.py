"""Threads of a process whose address space is limited."""

import signal
import threading
from collections.abc import Iterator

import pytest

from gpuyard.system.memory_limit import watch_thread_starts
from gpuyard.system.passing_errors import passing_limit, remedy_of


@pytest.fixture
def _own_timer() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_own_timer")
def test_a_thread_that_ends_before_it_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "_start_new_thread", lambda *_: 0)
    watch_thread_starts(0.05)
    with pytest.raises(RuntimeError, match="can't start new thread") as raised:
        threading.Thread(target=print, daemon=True).start()
    limit = passing_limit(raised.value)
    assert limit is not None
    assert remedy_of(limit)


@pytest.mark.usefixtures("_own_timer")
def test_other_waits_go_on() -> None:
    watch_thread_starts(0.02)
    event = threading.Event()
    assert not event.wait(0.2)
    thread = threading.Thread(target=event.set)
    thread.start()
    assert event.wait(10)
    thread.join()
