"""Cost of the ledger: from a release to the grant of the next ticket, and an uncontended lease.

Run as a program, it is one of the two processes that hand over: it acquires and releases by commands on standard input.
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

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.wait_for_devices import Acquisition
from gpuyard.model.lease import Need
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.probes.simulated_devices import SimulatedDevices

_HAND_OVERS = 200
_HOLD_S = 0.005  # long enough for the other process to block


def bench_leases(row: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        floor = _hand_over_s("flock", folder)
        row("bare flock, release to the next grant", floor)
        row("lease, release to the next grant", _hand_over_s("lease", folder), "flock", floor)
        floor = _median_s(lambda: _create_lock_remove(folder / "file"))
        row("create, lock and remove a file", floor)
        row("lease, acquire and release", _median_s(lambda: _acquire_and_release(folder)), "file", floor)


def _median_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_HAND_OVERS):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _hand_over_s(method: str, folder: Path) -> float:
    """Return the median of hand-overs between two processes that alternate."""
    holder, waiter = _Partner(method, folder), _Partner(method, folder)
    holder.send("acquire")
    holder.event_at("acquired")
    taken = []
    for _ in range(_HAND_OVERS):
        waiter.send("acquire")
        waiter.event_at("waiting")
        time.sleep(_HOLD_S)
        holder.send("release")
        taken.append(waiter.event_at("acquired") - holder.event_at("released"))
        holder, waiter = waiter, holder
    holder.end()
    waiter.end()
    return statistics.median(taken)


class _Partner:
    def __init__(self, method: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.leases", method, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def send(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")

    def event_at(self, event: str) -> float:
        """Wait for the event, and return its time by the monotonic clock, which all processes share."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reported, at = line.split()
            if reported == event:
                return float(at)
        raise AssertionError(f"the process ended before '{event}'")

    def end(self) -> None:
        self._process.communicate()


def _follow_commands(method: str, folder: Path) -> None:
    acquire = {"flock": _flock, "lease": _acquire}[method]
    release: Callable[[], None] = _nothing
    for line in sys.stdin:
        if line.strip() == "acquire":
            release = acquire(folder)
            _report("acquired")
        else:
            at = time.monotonic()
            release()
            _report("released", at)


def _report(event: str, at: float | None = None) -> None:
    print(event, time.monotonic() if at is None else at, flush=True)


def _flock(folder: Path) -> Callable[[], None]:
    descriptor = os.open(folder / "flock", os.O_RDWR | os.O_CREAT)
    _report("waiting")
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return lambda: os.close(descriptor)


def _acquire(folder: Path) -> Callable[[], None]:
    devices = SimulatedDevices("1x24GB", folder / "simulated")
    ledger = Ledger(folder / "ledger")
    ledger.folder.mkdir(exist_ok=True)
    acquisition = Acquisition(
        ledger, lambda: Snapshot(taken_at=None, host=Host(), devices=devices.read(1.0).devices), Need()
    )
    return acquisition.wait(60.0, 10.0, lambda _: _report("waiting")).release


def _acquire_and_release(folder: Path) -> None:
    release = _acquire(folder)
    release()


def _create_lock_remove(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path.unlink()
    os.close(descriptor)


def _nothing() -> None:
    """Release nothing, before the first acquisition."""


if __name__ == "__main__":
    _follow_commands(sys.argv[1], Path(sys.argv[2]))
