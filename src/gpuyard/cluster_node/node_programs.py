"""Programs for a cluster node without a daemon.

`meter PID FILE` samples the devices and all processes of a program (its session and its descendants) until it has
ended. FILE holds the usage so far, a `Usage` as JSON, and is always complete. The meter uses at most a fiftieth of a
core, and only SIGKILL ends it earlier.

`report FOLDER` prints what the node has, and whether it sees the folder, for `gpuyard doctor --engine`."""

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
_LONGER, _GREW = 1.1, 1.02


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


def meter(pid: int, path: str) -> None:
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(signum, signal.SIG_IGN)
    with contextlib.suppress(psutil.NoSuchProcess):
        _measure(psutil.Process(pid), path, local_machine())


def _measure(program: psutil.Process, path: str, machine: SnapshotSource) -> None:
    started = time.monotonic()
    # The start times are known to the second only, but their difference is exact.
    age_s = psutil.Process().create_time() - program.create_time()
    usage = written = Usage()
    written_at_s = 0.0

    def write(ran_s: float) -> None:
        nonlocal written, written_at_s
        with contextlib.suppress(OSError):  # repeated with the next measurement
            write_atomically(path, msgspec.json.encode(usage), mode=0o600, is_synced=False)
            written, written_at_s = usage, ran_s

    while _runs(program):
        used_before = time.process_time()
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            found = {process.pid: process for process in (program, *program.children(recursive=True))}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if pid not in found and os.getsid(pid) == program.pid:
                    found[pid] = psutil.Process(pid)
        processes = list(found.values())
        memory = memory_of({process.pid for process in processes}, machine.snapshot())
        ram_mb = []
        for process in processes:  # memory shared between processes counts for each of them
            with contextlib.suppress(psutil.Error):
                ram_mb.append(process.memory_info().rss / MB)
        ran_s = age_s + time.monotonic() - started
        usage = add_sample(usage, ran_s, memory, ram_mb=sum(ram_mb) if ram_mb else None)
        if _has_grown(written, usage) or ran_s > written_at_s * _LONGER:
            write(ran_s)
        every_s = _FIRST_EVERY_S if time.monotonic() < started + _FIRST_S else _EVERY_S
        time.sleep(max(every_s, (time.process_time() - used_before) * 50))
    write(age_s + time.monotonic() - started)


def _runs(program: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return program.is_running() and program.status() != psutil.STATUS_ZOMBIE
    return False


def report(folder: str) -> None:
    found = check_probes(local_probes(), 5.0)
    devices = {device.id: device for each in found for device in each.devices or ()}
    cards_mb = [device.memory_total_mb for device in devices.values() if device.memory_total_mb is not None]
    content = {"at": time.time(), "has_cwd": os.path.isdir(folder), "cards_mb": cards_mb}
    sys.stdout.write(f"report={msgspec.json.encode(content).decode()}\n")


def main() -> None:
    if sys.argv[1] == "meter":
        meter(int(sys.argv[2]), sys.argv[3])
    else:
        report(sys.argv[2])
