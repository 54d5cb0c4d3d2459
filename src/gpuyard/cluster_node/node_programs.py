"""Programs for a cluster node without a daemon.

`meter PID FILE` samples the devices and all processes of a program (its session and its descendants) until it has
ended. FILE holds the usage so far, a `Usage` as JSON, and is always complete. It is written when a peak has grown by
2%, and otherwise when the run has become a tenth longer: a run of days does not write every second. The meter uses at
most a fiftieth of a core. Only SIGKILL ends it before the program has ended.

`report FOLDER` prints what the node has, and whether it sees the folder, for `gpuyard doctor --engine`.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection

import msgspec
import psutil

from gpuyard.model.job import Usage
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.model.units import MB
from gpuyard.policy.usage_curve import add_sample
from gpuyard.probes.fallback_chain import check_probes
from gpuyard.probes.local_machine import local_machine, local_probes
from gpuyard.probes.sampler import SnapshotSource
from gpuyard.system.write_files import write_atomically

_FIRST_S, _FIRST_EVERY_S, _EVERY_S = 2.0, 0.25, 1.0
_REST_FOR_WORK = 50
_LONGER, _GREW = 1.1, 1.02
_PROBES_WITHIN_S = 5.0
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
        while self._runs():
            used_before = time.process_time()
            self._measure()
            every_s = _FIRST_EVERY_S if time.monotonic() < self._started + _FIRST_S else _EVERY_S
            time.sleep(max(every_s, (time.process_time() - used_before) * _REST_FOR_WORK))
        self._write(self._ran_s())

    def _runs(self) -> bool:
        try:
            return self._program.is_running() and self._program.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def _measure(self) -> None:
        processes = _processes_of(self._program)
        memory = memory_of({process.pid for process in processes}, self._machine.snapshot())
        ram_mb = []
        for process in processes:  # memory shared between processes counts for each of them
            with contextlib.suppress(psutil.Error):
                ram_mb.append(process.memory_info().rss / MB)
        ran_s = self._ran_s()
        self._usage = add_sample(self._usage, ran_s, memory, ram_mb=sum(ram_mb) if ram_mb else None)
        if _has_grown(self._written, self._usage) or ran_s > self._written_at_s * _LONGER:
            self._write(ran_s)

    def _ran_s(self) -> float:
        return self._age_s + time.monotonic() - self._started

    def _write(self, ran_s: float) -> None:
        """A failed write is repeated with the next measurement."""
        with contextlib.suppress(OSError):
            write_atomically(self._path, msgspec.json.encode(self._usage), mode=0o600, is_synced=False)
            self._written, self._written_at_s = self._usage, ran_s


def _has_grown(before: Usage, now: Usage) -> bool:
    """Return whether a peak has grown by more than 2%, which is above the usual noise."""
    pairs = [(now.ram_mb, before.ram_mb), *((peak, before.peaks_mb.get(name)) for name, peak in now.peaks_mb.items())]
    return any((new or 0.0) > (old or 0.0) * _GREW for new, old in pairs)


def memory_of(pids: Collection[int], snapshot: Snapshot) -> dict[str, float | None]:
    """Return the memory of these processes on each device they use; None where the driver hides it."""
    found: dict[str, float | None] = {}
    for device in snapshot.usable_devices():
        held = [process.memory_mb for process in device.processes or () if process.pid in pids]
        known = [memory_mb for memory_mb in held if memory_mb is not None]
        if held:
            found[device.id] = sum(known) if len(known) == len(held) else None
    return found


def _processes_of(program: psutil.Process) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.Error):
        found = {process.pid: process for process in (program, *program.children(recursive=True))}
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid not in found and os.getsid(pid) == program.pid:
                found[pid] = psutil.Process(pid)
    return list(found.values())


def meter(pid: int, path: str) -> None:
    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(psutil.NoSuchProcess):
        Meter(psutil.Process(pid), path, local_machine()).run()


def report(folder: str) -> None:
    found = check_probes(local_probes(), _PROBES_WITHIN_S)
    devices = {device.id: device for each in found for device in each.devices or ()}
    cards_mb = [device.memory_total_mb for device in devices.values() if device.memory_total_mb is not None]
    content = {"at": time.time(), "has_cwd": os.path.isdir(folder), "cards_mb": cards_mb}
    sys.stdout.write(f"report={msgspec.json.encode(content).decode()}\n")


def main() -> None:
    if sys.argv[1] == "meter":
        meter(int(sys.argv[2]), sys.argv[3])
    else:
        report(sys.argv[2])
