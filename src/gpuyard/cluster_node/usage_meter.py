"""Measure what one program uses while it runs on a cluster node without a daemon.

Runs as `python -m gpuyard.cluster_node.usage_meter PID FILE`. It samples the devices and all processes of the program
(its session and its descendants) until the program has ended. FILE holds the usage so far, a `core.job.job.Usage` as
JSON, and is always complete. It is written when a peak has grown by 2%, and otherwise when the run has become a tenth
longer: the curve is never far behind, and a run of days does not write every second.

The meter uses at most a fiftieth of a core. Only SIGKILL ends it before the program has ended.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Collection

import msgspec
import psutil

from gpuyard.core.job.job import Usage
from gpuyard.core.memory.usage_curve import add_sample
from gpuyard.core.snapshot import Device, Snapshot
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.sampler import SnapshotSource

_FIRST_S, _FIRST_EVERY_S, _EVERY_S = 2.0, 0.25, 1.0
_REST_FOR_WORK = 50
_LONGER, _GREW = 1.1, 1.02
_MB = 1048576
_IGNORED = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}


class Meter:
    def __init__(self, program: psutil.Process, path: str, machine: SnapshotSource) -> None:
        self._program = program
        self._path = path
        self._machine = machine
        self._started = time.monotonic()
        # The start times are known to the second only, but their difference is exact.
        self._age_s = psutil.Process().create_time() - program.create_time()
        self._usage = Usage()
        self._written = Usage()
        self._written_at_s = 0.0

    def run(self) -> None:
        end = _ProgramEnd(self._program)
        while True:
            used_before = time.process_time()
            self._measure()
            if end.happens_within(self._pause_s(time.process_time() - used_before)):
                break
        self._write(self._ran_s())

    def _pause_s(self, used_s: float) -> float:
        is_new = time.monotonic() < self._started + _FIRST_S
        return max(_FIRST_EVERY_S if is_new else _EVERY_S, used_s * _REST_FOR_WORK)

    def _measure(self) -> None:
        processes = _processes_of(self._program)
        memory = memory_of({process.pid for process in processes}, self._machine.snapshot())
        ran_s = self._ran_s()
        self._usage = add_sample(self._usage, ran_s, memory, ram_mb=_ram_mb(processes))
        if _has_grown(self._written, self._usage) or ran_s > self._written_at_s * _LONGER:
            self._write(ran_s)

    def _ran_s(self) -> float:
        return self._age_s + time.monotonic() - self._started

    def _write(self, ran_s: float) -> None:
        """A failed write is repeated with the next measurement."""
        draft = f"{self._path}.draft"
        with contextlib.suppress(OSError):
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(self._usage))
            os.replace(draft, self._path)
            self._written, self._written_at_s = self._usage, ran_s


def _has_grown(before: Usage, now: Usage) -> bool:
    """Return whether a peak has grown by more than 2%, which is above the usual noise."""
    pairs = [(now.ram_mb, before.ram_mb), *((peak, before.peaks_mb.get(name)) for name, peak in now.peaks_mb.items())]
    return any((new or 0.0) > (old or 0.0) * _GREW for new, old in pairs)


class _ProgramEnd:
    """Wait for the end of a program: with a pidfd where the system has one, else by polling."""

    def __init__(self, program: psutil.Process) -> None:
        self._program = program
        self._poll: select.poll | None = None
        with contextlib.suppress(AttributeError, OSError):
            descriptor = os.pidfd_open(program.pid)
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)

    def happens_within(self, seconds: float) -> bool:
        if self._poll is not None:
            return bool(self._poll.poll(seconds * 1000)) or not self._program.is_running()
        time.sleep(seconds)
        try:
            return self._program.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def memory_of(pids: Collection[int], snapshot: Snapshot) -> dict[str, float | None]:
    """Return the memory of these processes on each device they use; None where the driver hides it."""
    return {
        device.id: _held_on(device, pids)
        for device in snapshot.usable_devices()
        if any(process.pid in pids for process in device.processes or ())
    }


def _held_on(device: Device, pids: Collection[int]) -> float | None:
    held = [process.memory_mb for process in device.processes or () if process.pid in pids]
    known = [memory_mb for memory_mb in held if memory_mb is not None]
    return sum(known) if len(known) == len(held) else None


def _processes_of(program: psutil.Process) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        found = {process.pid: process for process in (program, *program.children(recursive=True))}
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid not in found and os.getsid(pid) == program.pid:
                found[pid] = psutil.Process(pid)
    return list(found.values())


def _ram_mb(processes: Collection[psutil.Process]) -> float | None:
    """Return the sum of their RAM. Memory shared between processes counts for each of them."""
    held = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            held.append(process.memory_info().rss / _MB)
    return sum(held) if held else None


def main() -> None:
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(psutil.NoSuchProcess):
        Meter(psutil.Process(int(sys.argv[1])), sys.argv[2], local_machine()).run()


if __name__ == "__main__":
    main()
