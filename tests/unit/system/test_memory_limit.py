"""Threads of a process whose address space is limited."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gpuyard.system.system_limits import watch_thread_starts


@pytest.fixture
def _own_timer() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


_STARTS_A_THREAD = """
import threading
from gpuyard.system.system_limits import watch_thread_starts
from gpuyard.system.system_limits import passing_limit, remedy_of
threading._start_new_thread = lambda *_: 0
watch_thread_starts(0.05)
try:
    threading.Thread(target=print, daemon=True).start()
except RuntimeError as error:
    print(error)
    print(remedy_of(passing_limit(error)))
"""


def test_a_thread_that_ends_before_it_begins_is_not_waited_for() -> None:
    """In a process of its own: if it is waited for, the test fails and ends."""
    shown = subprocess.run(
        [sys.executable, "-c", _STARTS_A_THREAD], check=True, capture_output=True, text=True, timeout=20
    )
    error, remedy = shown.stdout.splitlines()
    assert "can't start new thread" in error
    assert remedy != "None"


@pytest.mark.usefixtures("_own_timer")
def test_other_waits_go_on() -> None:
    watch_thread_starts(0.02)
    event = threading.Event()
    assert not event.wait(0.2)
    thread = threading.Thread(target=event.set)
    thread.start()
    assert event.wait(10)
    thread.join()
