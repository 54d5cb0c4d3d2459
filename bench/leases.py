"""What the ledger costs: from a release to the next waiter's grant, and a lease that nobody else wants.

As a program it is one of the two processes that hand over: it takes and releases as it is told on its input.
"""

import fcntl
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpuyard.core.lease import Need
from gpuyard.core.snapshot import Host, Snapshot
from gpuyard.leases.ledger import Ledger
from gpuyard.probes.simulated_devices import SimulatedDevices
from gpuyard.wait_for_devices import Acquisition

_HAND_OVERS = 200
_HOLD_S = 0.005  # long enough for the other one to wait in earnest


def bench_leases(row: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        floor = _hand_over_s("flock", folder)
        row("bare flock, release to the next grant", floor)
        row("lease, release to the next grant", _hand_over_s("lease", folder), "flock", floor)
        floor = _median_s(lambda: _make_lock_remove(folder / "file"))
        row("make, lock and remove a file", floor)
        row("lease, acquire and release", _median_s(lambda: _acquire_and_release(folder)), "file", floor)


def _median_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_HAND_OVERS):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _hand_over_s(way: str, folder: Path) -> float:
    """The median over two processes that alternate."""
    holder, waiter = _Other(way, folder), _Other(way, folder)
    holder.tell("take")
    holder.hear("had")
    taken = []
    for _ in range(_HAND_OVERS):
        waiter.tell("take")
        waiter.hear("waiting")
        time.sleep(_HOLD_S)
        holder.tell("release")
        taken.append(waiter.hear("had") - holder.hear("released"))
        holder, waiter = waiter, holder
    holder.end()
    waiter.end()
    return statistics.median(taken)


class _Other:
    def __init__(self, way: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.leases", way, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")

    def hear(self, word: str) -> float:
        """When it happened there: the clock is the same for all processes."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told, at = line.split()
            if told == word:
                return float(at)
        raise AssertionError(f"it ended before it was '{word}'")

    def end(self) -> None:
        self._process.communicate()


def _take_and_release(way: str, folder: Path) -> None:
    take = {"flock": _flock, "lease": _acquire}[way]
    release: Callable[[], None] = _nothing
    for line in sys.stdin:
        if line.strip() == "take":
            release = take(folder)
            _say("had")
        else:
            at = time.monotonic()
            release()
            _say("released", at)


def _say(word: str, at: float | None = None) -> None:
    print(word, time.monotonic() if at is None else at, flush=True)


def _flock(folder: Path) -> Callable[[], None]:
    descriptor = os.open(folder / "flock", os.O_RDWR | os.O_CREAT)
    _say("waiting")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return lambda: os.close(descriptor)


def _acquire(folder: Path) -> Callable[[], None]:
    devices = SimulatedDevices("1x24GB", folder / "simulated")
    ledger = Ledger(folder / "ledger")
    ledger.folder.mkdir(exist_ok=True)
    acquisition = Acquisition(
        ledger, lambda: Snapshot(taken_at=None, host=Host(), devices=devices.read(1.0).devices), Need()
    )
    return acquisition.wait(60.0, 10.0, lambda _: _say("waiting")).release


def _acquire_and_release(folder: Path) -> None:
    release = _acquire(folder)
    release()


def _make_lock_remove(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path.unlink()
    os.close(descriptor)


def _nothing() -> None:
    """What there is to release before anything was taken."""


if __name__ == "__main__":
    _take_and_release(sys.argv[1], Path(sys.argv[2]))
