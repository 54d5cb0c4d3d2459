"""How a process waits for a lease: it shows that it runs, and an interrupt leaves nothing held."""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.ledger.file_watch import FileWatch
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.ledger_status import read_ledger_status
from gpuyard.ledger.lock_file import LockFile
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from tests.known import known
from tests.unit.ledger import DEADLINE_S, ME, child, take

_WATCHED = ("/gpuyard/ledger/", "/system/file_locks.py")


def one_device() -> Snapshot:
    return Snapshot(taken_at=time.time(), host=Host(), devices=(Device(id="G0", vendor=Vendor.NVIDIA, index=0),))


def acquire(ledger: Ledger) -> None:
    Acquisition(ledger, one_device, Need(), mutex_timeout_s=DEADLINE_S).wait(DEADLINE_S, DEADLINE_S).release()


def test_a_waiting_process_beats_between_two_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    held = known(ledger.claim(ME, take("G0"), DEADLINE_S))
    now, waits = time.monotonic(), list[float]()
    beats: list[float] = []

    def wait(_: FileWatch, timeout_s: float, __: object) -> bool:
        nonlocal now
        now += timeout_s
        waits.append(timeout_s)
        if len(waits) == 4:
            held.release()
        return len(waits) == 4

    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        patch.setattr(FileWatch, "wait", wait)
        patch.setattr(LockFile, "beat", lambda self: beats.append(now))
        Acquisition(ledger, one_device, Need()).wait(DEADLINE_S, 60.0).release()
    assert max(waits) <= 5.0
    assert len(beats) >= 4


def test_nothing_starts_before_the_floor_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 GB, 2 GB stay free: for requests with and without RAM of their own."""
    available_mb, now = 1900.0, time.monotonic()

    def machine() -> Snapshot:
        host = Host(memory_total_mb=24 * 1024.0, memory_available_mb=available_mb)
        return replace(one_device(), host=host)

    acquisition = Acquisition(Ledger(tmp_path), machine, Need())
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert acquisition.attempt() is None
    (reason,) = acquisition.reasons
    assert reason.text == "1.9 GB of RAM available, and 2 GB stay free"
    available_mb, now = 9000.0, now + 1.0
    assert acquisition.attempt() is None, "a moment is not enough"
    now += 6.0
    known(acquisition.attempt()).release()


class Interruption:
    """Sends this process a SIGINT at the n-th line of the ledger's code that it runs."""

    def __init__(self, at: int) -> None:
        self._left = at

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in _WATCHED):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def interrupt_everywhere(connection: Connection, folder: Path, is_taken: bool) -> None:
    """Interrupt an acquisition at each of its lines. Send what was wrong afterwards, and the number of lines."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ledger = Ledger(folder)
    acquire(ledger)
    wrong: list[str] = []
    line = 0
    while not wrong:
        line += 1
        other = ledger.claim(ME, take("G0"), DEADLINE_S) if is_taken else None
        interruption = Interruption(line)
        error = interrupted(interruption, functools.partial(acquire_beside, ledger, other))
        if other is not None:
            other.release()
        if error is not None:
            wrong.append(f"line {line}: {error!r}")
        wrong += [f"line {line}: {each}" for each in left_behind(ledger)]
        if not interruption.has_come:
            break
    connection.send((wrong, line))


def acquire_beside(ledger: Ledger, other: LockFile | None) -> None:
    """Acquire the device. If another lease holds it, that lease ends when the acquisition waits."""

    def on_wait(_: object) -> None:
        if other is not None:
            other.release()

    acquisition = Acquisition(ledger, one_device, Need(), mutex_timeout_s=DEADLINE_S)
    acquisition.wait(DEADLINE_S, DEADLINE_S, on_wait).release()


def interrupted(interruption: Interruption, act: Callable[[], None]) -> BaseException | None:
    """Return an error other than the interrupt."""
    sys.settrace(interruption)
    try:
        act()
    except KeyboardInterrupt:
        return None
    except BaseException as error:  # noqa: BLE001 - it is the result
        return error
    finally:
        sys.settrace(None)
    return None


def left_behind(ledger: Ledger) -> list[str]:
    found = [f"held {each}" for each in (*ledger.leases(), *ledger.contents().tickets)]
    try:
        with hold_mutex(ledger.folder, 0.0):
            pass
    except OSError as error:
        found.append(str(error))
    except Exception as error:  # noqa: BLE001 - the ledger's own error
        found.append(str(error))
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        found.append(f"the handler {signal.getsignal(signal.SIGINT)}")
    return found


@pytest.mark.parametrize("is_taken", [False, True], ids=["at once", "after a wait"])
def test_an_interrupt_at_any_line_leaves_nothing_held(tmp_path: Path, is_taken: bool) -> None:
    with child(interrupt_everywhere, tmp_path, is_taken) as process:
        wrong, lines = process.receive()
    assert wrong == []
    assert lines > 100
    assert os.listdir(tmp_path) == []


def test_below_the_floor_the_ram_of_the_machine_is_what_processes_wait_for(tmp_path: Path) -> None:
    """Of 24 GB, 2 GB stay free."""
    ledger = Ledger(tmp_path)
    ticket = ledger.take_ticket(ME, Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
    device = Device(id="G0", vendor=Vendor.NVIDIA, index=0)
    texts = []
    for available_mb in (1500.0, 9000.0):
        host = Host(memory_total_mb=24 * 1024.0, memory_available_mb=available_mb)
        status = read_ledger_status(ledger, Snapshot(taken_at=0.0, host=host, devices=(device,)))
        texts.append([reason.text for waiting in status.waiting for reason in waiting.reasons])
    ticket.release()
    assert texts == [["1.5 GB of RAM available, and 2 GB stay free"], []]
