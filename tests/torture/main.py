"""`scripts/torture`: the run from the first fault to the report.

    the outer process ── the run ── clients, which start the daemon

The outer process is the reaper of all orphans (`own_processes.py`).
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from gpuyard.model.lifecycle import FINISHED
from gpuyard.system.file_locks import is_held
from tests.torture import checks
from tests.torture.evidence import read_runs
from tests.torture.faults import Fault, send
from tests.torture.inject import build_injector
from tests.torture.load import HANGS_S, Load
from tests.torture.own_processes import can_unshare, is_in_namespace, reap_for, run_in_namespace
from tests.torture.records import read_records
from tests.torture.report import Report
from tests.torture.schedule import TABLE, PlannedFault, left_out, planned_faults
from tests.torture.target import CAPACITY_MB, Target

_GIVE_UP_S = 180.0
_DRAIN_S = 240.0
_LEFT_S = 30.0
_MOST_DESCRIPTORS = 80
_MOST_DEAD_RECORDS = 100
_LONGEST_LOG = 2 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/torture", description="Torture a queue on simulated GPUs.")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are done [5]")
    parser.add_argument("--seed", type=int, default=None, help="same seed, same faults [random]")
    parser.add_argument("--faults", default="", metavar="NAMES", help="only these, by comma; `list` prints all")
    parser.add_argument("--without", default="", metavar="NAMES", help="all but these")
    parser.add_argument("--recovery", type=float, default=checks.RECOVERY_S, metavar="SECONDS",
                        help="how soon the queue has to move again after a fault [60]")  # fmt: skip
    parser.add_argument("--work", type=Path, default=None, help="folder to work in [a new one in /tmp]")
    parser.add_argument("--keep", action="store_true", help="keep the folder without a violation, too")
    options = parser.parse_args()
    if options.faults == "list":
        _say("\n".join(TABLE))
        return 0
    unknown = [name for name in _names(f"{options.faults},{options.without}") if name not in TABLE]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}; `--faults list` prints all")
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(3), "big")
    if can_unshare():
        return run_in_namespace("tests.torture.main", [*sys.argv[1:], "--seed", str(options.seed)])
    return reap_for(lambda outer: run(options, outer))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def run(options: argparse.Namespace, outer: int) -> int:
    work = options.work or Path(tempfile.mkdtemp(prefix="gpuyard-torture-"))
    work.mkdir(parents=True, exist_ok=True)
    target = Target(work, outer, is_mounted=is_in_namespace(), injector=build_injector(work))
    target.prepare(options.minutes)
    _say(f"torture: seed {options.seed}, {options.minutes:g} minutes, in {work}")
    load = Load(target, options.seed)
    load.start()
    torture = _Torture(target)
    without = _names(options.without)
    chosen = tuple(name for name in _names(options.faults) or TABLE if name not in without)
    torture.do_faults(options.seed, options.minutes * 60.0, chosen)
    torture.finish(load)
    report = torture.report(options, load)
    _say(report.text())
    target.close()
    if report.violations or options.keep:
        (work / "report").write_text(report.text() + "\n")
    else:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if report.violations else 0


class _Torture:
    def __init__(self, target: Target) -> None:
        self._target = target
        self._happened = target.happened
        self._began = time.monotonic()
        self._done: Counter[str] = Counter()
        self._left_out: dict[str, str] = {}
        self._is_stuck = False

    def do_faults(self, seed: int, seconds: float, chosen: tuple[str, ...]) -> None:
        self._await_start("the begin", time.monotonic())
        for planned in planned_faults(seed, chosen):
            if time.monotonic() > self._began + seconds or self._is_stuck:
                return
            why = left_out(planned.name, self._target)
            if why is None:
                self._do(planned)
            else:
                self._left_out[planned.name] = why
                time.sleep(0.01)

    def _do(self, planned: PlannedFault) -> None:
        fault: Fault = TABLE[planned.name][1](self._target, planned.pick)
        at = time.monotonic() - self._began
        what = fault.begin()
        time.sleep(planned.lasts_s / 2)
        if planned.meanwhile is not None:
            what += f"; {planned.meanwhile}: {TABLE[planned.meanwhile][1](self._target, planned.pick).begin()}"
            self._done[planned.meanwhile] += 1
        time.sleep(planned.lasts_s / 2)
        fault.end()
        ended = time.monotonic()
        self._done[planned.name] += 1
        took_s = self._await_start(planned.name, ended)
        _say(f"{at:7.1f} s  {planned.name}: {what}; {planned.lasts_s:.1f} s, then moving in {took_s:.1f} s")
        self._check_daemons(planned.name)
        time.sleep(planned.pause_s)

    def _await_start(self, fault: str, moment: float) -> float:
        """Wait until the queue starts a job, and return how long that took since the fault's end."""
        while True:
            started = self._target.evidence.start_after(moment)
            took_s = (started or time.monotonic()) - moment
            if started is not None or took_s > _GIVE_UP_S:
                self._happened.recoveries.append((fault, took_s))
                self._is_stuck = started is None
                return took_s
            time.sleep(0.1)

    def _check_daemons(self, fault: str) -> None:
        """One daemon at most. Another that just starts or ends is there for a moment only."""
        deadline = time.monotonic() + _LEFT_S
        while len(found := self._target.find("daemon")) > 1:
            if time.monotonic() > deadline:
                self._happened.observed.append(f"{len(found)} daemons run after the fault '{fault}': {found}")
                return
            time.sleep(0.5)

    # At the end

    def finish(self, load: Load) -> None:
        """Let the queue come to rest, stop the daemon, and see what is left."""
        see = self._happened.observed.append
        if self._is_stuck:  # only a new daemon can bring the queue to rest
            for pid in self._target.find("daemon"):
                send(pid, signal.SIGKILL)
        if (hung := load.stop(HANGS_S + 20.0)) > 0:
            see(f"{hung} clients have not ended")
        self._target.gpuyard("release", "all")
        deadline = time.monotonic() + _DRAIN_S
        while not self._is_at_rest() and time.monotonic() < deadline:
            time.sleep(0.5)
        for pid in self._target.find("daemon"):
            with contextlib.suppress(psutil.Error):
                if (count := psutil.Process(pid).num_fds()) > _MOST_DESCRIPTORS:
                    see(f"the daemon has {count} descriptors open at rest")
        self._target.gpuyard("daemon", "stop")
        deadline = time.monotonic() + _LEFT_S
        while (left := list(self._target.processes())) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in left:
            with contextlib.suppress(psutil.Error):
                see(f"the process {process.pid} is left: {' '.join(process.cmdline())[:200]}")
        self._check_files()

    def _is_at_rest(self) -> bool:
        counts = self._target.status()
        if counts is None:
            self._target.gpuyard("daemon", "start")
            return False
        return not any(n for state, n in counts.items() if state not in FINISHED)

    def _check_files(self) -> None:
        home, ledger = self._target.home, self._target.ledger
        records = [path for pattern in ("*.lease", "*.ticket") for path in ledger.glob(pattern)]
        left = [*filter(_is_held, records), *home.rglob("*.sock"), *home.rglob("*.tmp")]
        self._happened.observed += [f"the file {path.relative_to(self._target.work)} is left" for path in left]
        for log in (home / "daemon.log", home / "keepers" / "log"):
            if log.exists() and log.stat().st_size > _LONGEST_LOG:
                self._happened.observed.append(f"{log.name} has {log.stat().st_size >> 20} MB")
        if len(records) > _MOST_DEAD_RECORDS:  # the next grant removes or reuses them
            self._happened.observed.append(f"{len(records)} dead records are in the ledger")

    def report(self, options: argparse.Namespace, load: Load) -> Report:
        target = self._target
        runs, records = read_runs(target.evidence.lines()), read_records(target.home / "queue.db")
        logs = {run.run: _read_log(target.logs, run.run) for run in runs if run.attempt is not None}
        if target.is_mounted:  # keep the files: the mounts end with this run
            for folder in (target.home, target.ledger):
                with contextlib.suppress(shutil.Error, OSError):
                    shutil.copytree(folder, target.work / "kept" / folder.name, dirs_exist_ok=True)
            self._happened.observed += [f"{folder} is still in use" for folder in target.unmount()]
        violations = checks.check_all(
            runs,
            records,
            load.submissions,
            self._happened,
            logs=logs,
            capacity_mb=CAPACITY_MB,
            recovery_s=options.recovery,
        )
        return Report(
            seed=options.seed,
            minutes=options.minutes,
            faults=self._done,
            left_out=self._left_out,
            load=load.counts,
            submissions=load.submissions,
            records=records,
            runs=runs,
            recoveries=self._happened.recoveries,
            violations=violations,
            work=str(target.work),
        )


def _is_held(path: Path) -> bool:
    with path.open("rb") as file:
        return is_held(file.fileno())


def _read_log(logs: Path, run: str) -> bytes | None:
    """Return the log with what was cut off into the file beside it; None if there is none."""
    parts = [path for path in (logs / f"{run}.log.1", logs / f"{run}.log") if path.exists()]
    return b"".join(path.read_bytes() for path in parts) if parts else None


if __name__ == "__main__":
    sys.exit(main())
