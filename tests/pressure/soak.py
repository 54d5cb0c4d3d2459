"""`scripts/soak`: a queue under pressure from outside on RAM, CPU, disks and GPUs at the same time.

    the outer process ── the run, in control groups of its own ── clients, which start the daemon

Pressure comes and goes at random by a seed (`outside.py`) while jobs, scripts and `gpuyard run` start (`soak_load.py`).
Programs write down their starts, and a thread reads the machine with its own code (`watch.py`). At the end both are
compared with the limits (`threshold_checks.py`), and every job has to be accounted for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpuyard.model.lifecycle import FINISHED
from gpuyard.model.units import parse_size
from tests.pressure import threshold_checks as thresholds
from tests.pressure.limited_group import LimitedGroup, in_limited_group
from tests.pressure.outside import OutsidePressure
from tests.pressure.soak_evidence import read_soak
from tests.pressure.soak_load import SoakLoad
from tests.pressure.watch import MachineWatch
from tests.torture import checks
from tests.torture.evidence import read_runs
from tests.torture.own_processes import can_unshare, is_in_namespace, run_in_namespace
from tests.torture.records import Records, read_records
from tests.torture.target import CAPACITY_MB, Target

# So little CPU time that pressure reaches its limit beside other work on the machine; one job with --cpus at a time.
_CPUS, _MAX_CPU_PERCENT, _MAX_CPU_LOAD = 0.6, 75.0, 170.0
_FLOOR_PART, _LARGEST_FLOOR_MB = 0.25, 2048.0
_MIN_FREE_DISK_MB, _OUTPUT_DISK_MB, _FULL_DISK_MB = 8.0, 12.0, 4.0
_CONFIG = (
    f"[queue]\ncpu_jobs = 6\nmax_cpu_percent = {_MAX_CPU_PERCENT:g}\nmin_free_memory_mb = 0\n"
    f'[host]\nmin_free_disk = "{_MIN_FREE_DISK_MB:g}M"\nmax_cpu_load = {_MAX_CPU_LOAD:g}\n'
)
_UNIT_PART = 0.2
_DRAIN_S = 600.0
_SAY_EVERY_S = 300.0
# How an attempt may end here. A job whose GPU memory was taken by a process without a lease runs out of it.
_ENDS = ("succeeded", "host-guard", "memory-guard", "out-of-memory")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description="Soak a queue under pressure from outside.")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long pressure is put on [10]")
    parser.add_argument("--seed", type=int, default=None, help="same seed, same pressure [random]")
    parser.add_argument("--ram", default="4G", help="RAM of the control group [4G]")
    parser.add_argument("--work", type=Path, default=None, help="folder to work in [a new one in /tmp]")
    parser.add_argument("--keep", action="store_true", help="keep the folder without a violation, too")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "big")
    if can_unshare():
        return run_in_namespace("tests.pressure.soak", [*sys.argv[1:], "--seed", str(options.seed)])
    if not is_in_namespace():
        sys.stderr.write("scripts/soak: small file systems need root and `unshare`\n")
        return 2
    return in_limited_group("soak", parse_size(options.ram), _CPUS, lambda outer, group: run(options, outer, group))


def run(options: argparse.Namespace, outer: int, group: LimitedGroup) -> int:
    work = options.work or Path(tempfile.mkdtemp(prefix="gpuyard-soak-"))
    work.mkdir(parents=True, exist_ok=True)
    group.enter()
    target = Target(work, outer, is_mounted=True, injector=None)
    target.prepare(options.minutes, _CONFIG)
    output = work / "output"
    output.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=0700", "soak", str(output)], check=True)
    _say(f"soak: seed {options.seed}, {options.minutes:g} minutes, {options.ram} of RAM, in {work}")
    soak = _Soak(target, group, options.seed, {"home": target.home, "logs": target.logs, "output": output})
    soak.go(options.minutes * 60.0)
    violations = soak.finish()
    _say("\n".join(soak.report(violations)))
    (work / "report").write_text("\n".join(soak.report(violations)) + "\n")
    subprocess.run(["umount", str(output)], check=False)
    target.unmount()
    target.close()
    if not violations and not options.keep:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if violations else 0


class _Soak:
    def __init__(self, target: Target, group: LimitedGroup, seed: int, disks: Mapping[str, Path]) -> None:
        self._target, self._group, self._seed = target, group, seed
        self._disks = disks
        self._floor_mb = min(_LARGEST_FLOOR_MB, _FLOOR_PART * group.total_mb)
        self._watch = MachineWatch(group, disks)
        self._load = SoakLoad(target, seed, _UNIT_PART * group.total_mb, _OUTPUT_DISK_MB)
        full = {name: (path, _FULL_DISK_MB) for name, path in disks.items()}
        self._pressure = OutsidePressure(target, seed, group.total_mb, full)
        self._records: Records | None = None
        self._programs: list[thresholds.ProgramRun] = []
        self._foreign: list[thresholds.ForeignUse] = []
        self._began = time.monotonic()

    def go(self, seconds: float) -> None:
        """Put on pressure and load for this time."""
        self._target.gpuyard("daemon", "start")
        self._load.start()
        self._pressure.start()
        said_at = self._began
        while time.monotonic() < self._began + seconds:
            time.sleep(1.0)
            if time.monotonic() > said_at + _SAY_EVERY_S:
                said_at = time.monotonic()
                done = f"{(said_at - self._began) / 60:.0f} min: {self._target.status()}"
                _say(f"{done}, pressure {dict(self._pressure.counts)}, {self._group.kernel_kills()} kernel kills")

    def finish(self) -> list[str]:
        """Take off all pressure, let the queue finish, and return all violations."""
        observed = self._target.happened.observed
        self._pressure.stop()
        if hung := self._load.stop():
            observed.append(f"{hung} clients have not ended")
        deadline = time.monotonic() + _DRAIN_S
        while not self._is_idle() and time.monotonic() < deadline:
            time.sleep(0.5)
        self._target.gpuyard("daemon", "stop")
        self._watch.stop()
        self._keep_files()
        self._records = read_records(self._target.home / "queue.db")
        return [*self._records.problems, *observed, *self._check_thresholds(), *self._check_accounts(self._records)]

    def _is_idle(self) -> bool:
        counts = self._target.status()
        return counts is not None and not any(n for state, n in counts.items() if state not in FINISHED)

    def _keep_files(self) -> None:
        """Keep what the mounts hold, and the readings: the mounts end with this run."""
        for folder in (self._target.home, self._target.ledger):
            shutil.copytree(folder, self._target.work / "kept" / folder.name, dirs_exist_ok=True)
        lines = (msgspec.json.encode(each) for each in self._watch.readings)
        (self._target.work / "readings.jsonl").write_bytes(b"\n".join(lines))

    def _check_thresholds(self) -> Iterator[str]:
        limits = dict.fromkeys(("home", "logs"), _MIN_FREE_DISK_MB)
        found = read_soak(self._target.evidence.lines(), limits, ("output", _OUTPUT_DISK_MB))
        self._programs, self._foreign = found
        readings, total = self._watch.readings, self._group.total_mb
        yield from thresholds.check_ram_floor(self._programs, readings, self._floor_mb)
        yield from thresholds.check_ram_promises(self._programs, readings, self._floor_mb, total)
        yield from thresholds.check_disks(self._programs, readings)
        yield from thresholds.check_cpu_load(self._programs, readings, _CPUS)
        yield from thresholds.check_cpus(self._programs, _CPUS * _MAX_CPU_LOAD / 100.0)
        yield from thresholds.check_device_memory(self._programs, self._foreign, CAPACITY_MB)
        if kills := self._group.kernel_kills():
            yield f"the kernel killed {kills} processes"

    def _check_accounts(self, records: Records) -> Iterator[str]:
        runs = [each for each in read_runs(self._target.evidence.lines()) if each.attempt is not None]
        yield from checks.check_submissions(records, self._load.submissions)
        yield from checks.check_states(records)
        yield from checks.check_attempts(runs, records, self._target.happened)
        yield from checks.check_overlap(runs)
        for attempt in records.attempts.values():
            if attempt.kind not in _ENDS:
                yield f"attempt {attempt.name} is {attempt.kind} {attempt.status}: {attempt.reason}"
        well = {run.attempt[0] for run in runs if run.attempt is not None and run.status == 0}
        for job in records.jobs.values():
            if job.state == "succeeded" and job.id not in well:
                yield f"job {job.id} ({job.name}) is recorded as succeeded, and no run of it ended well"
            if job.state != "succeeded" and not self._ran_out(job.id, records):
                yield f"job {job.id} ({job.name}) is {job.state}: {job.reason}"
        log = self._target.home / "daemon.log"
        if log.exists() and (count := log.read_text(errors="replace").count("Traceback")):
            yield f"the daemon's log has {count} tracebacks"

    def _ran_out(self, job_id: int, records: Records) -> bool:
        """Return whether its last attempt ran out of GPU memory: a process without a lease took it."""
        return records.attempts[max(key for key in records.attempts if key[0] == job_id)].kind == "out-of-memory"

    def report(self, violations: list[str]) -> list[str]:
        records = self._records
        assert records is not None
        states = Counter(job.state for job in records.jobs.values())
        kinds = Counter(attempt.kind for attempt in records.attempts.values())
        beside = sum(not each.is_job for each in self._programs)
        return [
            f"seed {self._seed}, {(time.monotonic() - self._began) / 60:.0f} minutes in all",
            f"pressure put on: {_counts(self._pressure.counts)}",
            f"load: {_counts(self._load.counts)}",
            f"jobs: {len(records.jobs)} ({_counts(states)})",
            f"attempts: {len(records.attempts)} ({_counts(kinds)})",
            f"starts checked: {len(self._programs)}, {beside} of them beside the queue",
            *self._pressed(),
            f"kernel kills: {self._group.kernel_kills()}",
            f"violations: {len(violations)}",
            *(f"  {violation}" for violation in violations),
        ]

    def _pressed(self) -> Iterator[str]:
        """Yield how long each limit was closed, so that a soak without pressure is noticed."""
        readings = self._watch.readings
        whole = max(1, len(readings))
        below = 100.0 * sum(each.available_mb < self._floor_mb for each in readings) / whole
        lowest = f"lowest {self._watch.lowest_mb(0.0):.0f} MB, below the floor in {below:.1f}% of {whole} readings"
        yield f"RAM: floor {self._floor_mb:.0f} MB, {lowest}"
        for disk in ("home", "logs", "output"):
            least = _OUTPUT_DISK_MB if disk == "output" else _MIN_FREE_DISK_MB
            full = sum(each.free_disk_mb[disk] < least for each in readings)
            yield f"disk {disk}: below its limit in {100.0 * full / whole:.1f}% of readings"
        loads = thresholds.cpu_loads(readings, _CPUS)
        busy = sum(load > _MAX_CPU_PERCENT for load in loads)
        yield f"CPU: above {_MAX_CPU_PERCENT:g}% in {100.0 * busy / max(1, len(loads)):.1f}% of {len(loads)} seconds"
        held_s = sum(use.end - use.start for use in self._foreign)
        yield f"GPU: {len(self._foreign)} processes without a lease for {held_s:.0f} s"


def _counts(counted: Mapping[Any, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items(), key=lambda each: -each[1]))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
