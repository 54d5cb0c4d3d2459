"""The phases of a measurement. All that they start has a mark in its environment, by which `end_marked` finds it."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from bench.gpu_mix.card import watched
from bench.gpu_mix.mix import ENVIRONMENT, PROGRAMS, TRAIN, Run
from bench.gpu_mix.results import AttemptTimes, Phase, RunResult, last_json, last_lines, queue_result

_MARK = "GPU_MIX_RUN"
_END_S = 5.0
_POLL_S = 0.02
_COMMAND_LIMIT_S = 120.0
_STOP_LIMIT_S = 40.0
_SUCCEEDED, _FAILED = "succeeded", "failed"
_SIMULATE = "GPUYARD_SIMULATE"


class Setting(Struct, frozen=True, kw_only=True):
    """Where a measurement runs, and which programs. `command` comes before the arguments of each run."""

    folder: Path
    runs: Sequence[Run]
    command: Sequence[str] = (sys.executable, str(TRAIN))

    def env(self) -> dict[str, str]:
        # Without the user's own settings. Simulated devices are for trying out the measurement itself.
        kept = {key: value for key, value in os.environ.items() if key == _SIMULATE or not key.startswith("GPUYARD_")}
        home = str(self.folder / "home")
        return {**kept, **ENVIRONMENT, "PYTHONUNBUFFERED": "1", "GPUYARD_HOME": home, _MARK: str(self.folder)}


class _Timer:
    def __init__(self, limit_s: float) -> None:
        self._began = time.monotonic()
        self._limit_s = limit_s

    def passed_s(self) -> float:
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Return how long the phase may still take, at least 0."""
        return max(self._limit_s - self.passed_s(), 0.0)


class _Started(Struct, frozen=True):
    """A program without a scheduler."""

    run: Run
    process: "subprocess.Popen[bytes]"
    output: Path
    started_at: float


def warm_up(setting: Setting, limit_s: float) -> list[str]:
    """Run each program in its tiny size, all at the same time, so that their libraries are in the page cache and their
    kernels compiled before anything is timed. Return what failed, with the end of its output."""
    firsts = [Run(each.name, 0) for each in PROGRAMS if each.name in {run.program for run in setting.runs}]
    started = [_start(setting, run, "warm-up", "--tiny") for run in firsts]
    results = _finish(started, _Timer(limit_s))
    return [
        f"{each.run.program}: {result.said}"
        for each, result in zip(started, results, strict=True)
        if result.state != _SUCCEEDED
    ]


def alone(setting: Setting, limit_s: float) -> Phase:
    """Run the programs one after the other, without a scheduler."""
    results: list[RunResult] = []
    timer = _Timer(limit_s)
    with watched() as card:
        for run in setting.runs:
            results += _finish([_start(setting, run, "alone")], timer)
            if timer.left_s() <= 0:
                break
        wall_s = timer.passed_s()
    is_complete = len(results) == len(setting.runs) and all(each.state == _SUCCEEDED for each in results)
    return Phase(name="alone", wall_s=wall_s, is_complete=is_complete, runs=results, samples=card.samples)


def together(setting: Setting, limit_s: float) -> Phase:
    """Start all programs at the same time, without a scheduler: how fast the card could be if all fits."""
    timer = _Timer(limit_s)
    with watched() as card:
        started = [_start(setting, run, "together") for run in setting.runs]
        results = _finish(started, timer)
        wall_s = timer.passed_s()
    is_complete = all(each.state == _SUCCEEDED for each in results)
    return Phase(name="together", wall_s=wall_s, is_complete=is_complete, runs=results, samples=card.samples)


def _start(setting: Setting, run: Run, phase: str, *options: str) -> _Started:
    output = setting.folder / f"{phase}-{run.name}.log"
    with output.open("wb") as log:
        command = [*setting.command, *run.arguments(), *options]
        process = subprocess.Popen(
            command, env=setting.env(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    return _Started(run, process, output, time.time())


def _finish(started: Sequence[_Started], timer: _Timer) -> list[RunResult]:
    """Wait for programs; end them when the time of their phase is over."""
    ended_at: dict[Run, float] = {}
    while len(ended_at) < len(started):
        ended_at.update({each.run: time.time() for each in started if _has_just_ended(each, ended_at)})
        if timer.left_s() <= 0:
            for each in started:
                each.process.kill()
        time.sleep(_POLL_S)
    return [_result(each, ended_at[each.run]) for each in started]


def _has_just_ended(started: _Started, ended_at: Mapping[Run, float]) -> bool:
    return started.run not in ended_at and started.process.poll() is not None


def _result(started: _Started, ended_at: float) -> RunResult:
    status, text = started.process.wait(), started.output.read_text(errors="replace")
    is_out = "out of memory" in text.lower() or "out_of_memory" in text.lower()
    outcome = _SUCCEEDED if status == 0 else "out-of-memory" if is_out else _FAILED
    times = AttemptTimes(started_at=started.started_at, ended_at=ended_at, outcome=outcome, status=status)
    return RunResult(
        name=started.run.name,
        state=_SUCCEEDED if status == 0 else _FAILED,
        printed=last_json(text),
        attempts=[times],
        said="" if status == 0 else last_lines(text),
    )


class Queue:
    """gpuyard with a home and a daemon of its own."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._env = setting.env()

    def __call__(self, *arguments: str, limit_s: float = _COMMAND_LIMIT_S, allowed: Sequence[int] = (0,)) -> str:
        command = [sys.executable, "-m", "gpuyard", *arguments]
        done = subprocess.run(
            command,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode not in allowed:
            raise SystemExit(f"gpuyard {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def run_all(self, name: str, limit_s: float) -> Phase:
        """Submit all programs with nothing declared, and wait until all have ended."""
        timer = _Timer(limit_s)
        with watched() as card:
            ids = [self._submit(run) for run in self._setting.runs]
            is_complete = self._wait(ids, timer)
            wall_s = timer.passed_s()
        if not is_complete:
            self._cancel()
        results = self._results(ids)
        return Phase(name=name, wall_s=wall_s, is_complete=is_complete, runs=results, samples=card.samples)

    def _submit(self, run: Run) -> int:
        return int(self("submit", "--", *self._setting.command, *run.arguments()))

    def _wait(self, ids: Sequence[int], timer: _Timer) -> bool:
        """Return whether all jobs ended in time, in whatever way."""
        left_s = timer.left_s()
        # 5: a job failed; 6: one was cancelled; 124: the time is over.
        waiting = ("wait", "--timeout", f"{left_s:.0f}s", "--json", f"{ids[0]}-{ids[-1]}")
        waited = self(*waiting, limit_s=left_s + _COMMAND_LIMIT_S, allowed=(0, 5, 6, 124))
        return bool(json.loads(waited)["left"] == 0)

    def _cancel(self) -> None:
        self("cancel", "all", allowed=(0, 1))
        self("wait", "--timeout", f"{_STOP_LIMIT_S:.0f}s", allowed=(0, 5, 6, 124))

    def _results(self, ids: Sequence[int]) -> list[RunResult]:
        chosen = [str(each) for each in ids]
        shown = _by_id(self("show", "--json", *chosen))
        histories = _by_id(self("history", "--json", *chosen))
        return [
            queue_result(run, shown[job_id], histories[job_id]["events"], _read(shown[job_id]["log"]))
            for run, job_id in zip(self._setting.runs, ids, strict=True)
        ]

    def stop(self) -> None:
        """Stop the daemon, after cancelling whatever still runs. What remains is left to `end_marked`."""
        with contextlib.suppress(SystemExit, subprocess.TimeoutExpired):
            self._cancel()
        with contextlib.suppress(SystemExit, subprocess.TimeoutExpired):
            self("daemon", "stop", limit_s=_STOP_LIMIT_S)


@contextlib.contextmanager
def queue(setting: Setting) -> Iterator[Queue]:
    """A daemon that runs before any clock starts, and that knows nothing."""
    (setting.folder / "home").mkdir(exist_ok=True)
    opened = Queue(setting)
    try:
        opened("daemon", "start")
        yield opened
    finally:
        opened.stop()


def _by_id(text: str) -> dict[int, Mapping[str, Any]]:
    listed = json.loads(text)
    return {each["id"]: each for each in (listed if isinstance(listed, list) else [listed])}


def _read(log: str | None) -> str:
    return Path(log).read_text(errors="replace") if log is not None and Path(log).exists() else ""


def end_marked(folder: Path) -> int:
    """End all processes that were started for the measurement in `folder`. Return how many there were."""
    found = [process for process in psutil.process_iter() if _is_marked(process, folder)]
    _signal(found, psutil.Process.terminate)
    _, alive = psutil.wait_procs(found, _END_S)
    _signal(alive, psutil.Process.kill)
    psutil.wait_procs(alive, _END_S)
    return len(found)


def _is_marked(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(_MARK) == str(folder)
    except psutil.Error:
        return False  # another user's, or already gone


def _signal(processes: Sequence[psutil.Process], send: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            send(process)
