"""Packing and preemption on a real card: many PyTorch jobs without declared memory, one at a time and then packed; an
urgent job on a full card, where its victim is suspended by the driver, and where it parks its memory itself.

    python -m bench card [jobs|urgent|parked]

Needs an idle NVIDIA card, and PyTorch.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_JOB = Path(__file__).with_name("card_job.py")
# Gigabytes and steps of each class; a second has about thirty steps.
_CLASSES = ((1.0, 90), (4.0, 200), (12.0, 150), (40.0, 60))
_EACH = 10
_ALONE = '[packing]\nmax_jobs_per_device = 1\nfirst_run = "alone"\n'
_VICTIM_GB, _VICTIM_STEPS = 35.0, 600
_URGENT_GB, _URGENT_STEPS = 50.0, 60
_WAIT_JOB_FAILED = 5


class Home:
    """A gpuyard with its own home and daemon."""

    def __init__(self, folder: Path, config: str = "") -> None:
        folder.mkdir()
        (folder / "config.toml").write_text(config)
        self._env = {**os.environ, "GPUYARD_HOME": str(folder)}

    def __call__(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "gpuyard", *arguments]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1, _WAIT_JOB_FAILED):
            raise SystemExit(f"gpuyard {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def submit(self, gigabytes: float, steps: int, seed: int, *options: str, way: str = "") -> int:
        job = (sys.executable, "-P", str(_JOB), str(gigabytes), str(steps), str(seed), *way.split())
        return int(self("submit", *options, "--", *job))

    def jobs(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self("queue", "--all", "--limit", "1000", "--json"))["jobs"]
        return sorted(listed, key=lambda job: job["id"])

    def wait_for(self, job_id: int, is_met: Callable[[dict[str, Any]], bool], limit_s: float = 300.0) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            job: dict[str, Any] = json.loads(self("show", str(job_id), "--json"))
            if is_met(job):
                return job
            if job["ended_at"] is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"job {job_id} is {job['state']}: {job['reason']}\n{self('logs', str(job_id))}")

    def result(self, job_id: int) -> str:
        lines = self("logs", str(job_id)).splitlines()
        return next((line for line in lines if line.startswith("result")), "no result")


def bench_card(parts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not parts or "jobs" in parts:
            _many_jobs(Path(folder))
        if not parts or "urgent" in parts:
            _urgent_job(Path(folder) / "urgent", "")
        if not parts or "parked" in parts:
            _urgent_job(Path(folder) / "parked", "parkable")


def _many_jobs(folder: Path) -> None:
    alone = Home(folder / "alone", _ALONE)
    one_at_a_time = _pass("one at a time", alone)
    alone("daemon", "stop")
    shared = Home(folder / "shared")
    for name in ("shared, first pass", "shared, second pass"):
        rate = _pass(name, shared)
        print(f"{'':22}{rate / one_at_a_time:.2f} times the jobs per hour of one at a time", flush=True)
    print(shared("estimates"))
    shared("daemon", "stop")


def _pass(name: str, home: Home) -> float:
    """Submit and await all jobs. Return how many were done per hour."""
    shuffled = [(gigabytes, steps) for _ in range(_EACH) for gigabytes, steps in _CLASSES]
    ids = [home.submit(gigabytes, steps, seed) for seed, (gigabytes, steps) in enumerate(shuffled)]
    home("wait", f"{ids[0]}-{ids[-1]}")
    done = [job for job in home.jobs() if job["id"] in ids]
    took_s = _seconds(max(job["ended_at"] for job in done)) - _seconds(min(job["started_at"] for job in done))
    lost = sum(job["state"] != "succeeded" for job in done)
    retries = sum(job["attempt"] - 1 for job in done)
    rate = len(done) / took_s * 3600
    print(f"{name:<22}{took_s:7.1f} s  {rate:6.0f} jobs per hour  {lost} lost  {retries} retries", flush=True)
    return rate


def _urgent_job(folder: Path, way: str) -> None:
    """Fill the card with three jobs, the last of which is started in this `way`, and submit an urgent one."""
    home = Home(folder)
    undisturbed = _fill_card(home, way)
    home("wait", *map(str, undisturbed))
    victims = _fill_card(home, way)
    for job_id in victims:
        home.wait_for(job_id, lambda job: "ready" in home("logs", str(job["id"])))
    submitted_at = time.time()
    urgent = home.submit(_URGENT_GB, _URGENT_STEPS, 99, "--preempt", "--vram", f"{_URGENT_GB + 1:g}G")
    print(home("why", str(urgent)))
    job = home.wait_for(urgent, lambda job: job["started_at"] is not None)
    print(f"urgent job running {_seconds(job['started_at']) - submitted_at:.1f} s after its submission", flush=True)
    home("wait", *map(str, (urgent, *victims)))
    for before, after in zip(undisturbed, victims, strict=True):
        same = home.result(before) == home.result(after) != "no result"
        print(f"job {after}: {'identical to undisturbed' if same else 'DIFFERENT'} ({home.result(after)})")
        print(home("history", str(after)))
    print(home("logs", str(victims[-1])))
    print(home("history", str(urgent)))
    home("daemon", "stop")


def _fill_card(home: Home, way: str) -> list[int]:
    size = f"{_VICTIM_GB + 1:g}G"
    ways = ("", "", way)
    return [home.submit(_VICTIM_GB, _VICTIM_STEPS, seed, "--vram", size, way=each) for seed, each in enumerate(ways)]


def _seconds(moment: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(moment).timestamp()
