"""The daemon is killed at random moments, repeatedly, while hundreds of jobs are submitted, run, fail and are retried.

GPUYARD_CHAOS_QUEUE sets JOBS,KILLS,SEED (default: 60,8,20).
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from gpuyard.errors import EnvironmentFault
from tests.integration.queue_fixture import DEADLINE_S, Daemon, QueueUnderTest, submission

pytestmark = pytest.mark.usefixtures("unmeasured")

# Read at import, before the fixture that clears the environment.
JOBS, KILLS, SEED = map(int, os.environ.get("GPUYARD_CHAOS_QUEUE", "60,8,20").split(","))
LONGEST_LIFE_S = 0.5
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("alone", {"exclusive": True}),
    ("alone", {"gpus": 2, "exclusive": True}),
    ("10", {"vram": "10G"}),
    ("6", {"vram": "6G"}),
    ("none", {"gpus": 0}),
)
# Records its start and end, for itself and for each of its devices: `worker RUNS KIND PAUSE FAILS STATUS`.
WORKER = """
note() {
    echo "$1 $GPUYARD_ATTEMPT" >> "$runs/$GPUYARD_JOB_ID"
    for device in $(echo "$CUDA_VISIBLE_DEVICES" | tr , ' '); do echo "$1 $kind" >> "$runs/gpu$device"; done
}
runs=$1 kind=$2
note +
echo "job $GPUYARD_JOB_ID attempt $GPUYARD_ATTEMPT"
sleep "$3"
echo "over" >&2
note -
[ "$GPUYARD_ATTEMPT" -gt "$4" ] || exit "$5"
"""


# A daemon that kills itself when it first reaches a given call.
CRASHING = """
import os, signal
from gpuyard.daemon.main import run_daemon
from {module} import {name} as owner

whole = owner.{method}
def crash(self, *arguments, **named):
    if {when}:
        {before}
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, *arguments, **named)
owner.{method} = crash
run_daemon()
"""
ENGINE, STORE = "gpuyard.engines.local.engine.LocalEngine", "gpuyard.store.job_store.JobStore"
ANY_TIME, WITH_WORK, GO_ON = "True", "self._prepared", "whole(self, *arguments, **named)"
WITH_ENDS = "arguments[0]"
MOMENTS = {
    "before the first supervisor is made": (ENGINE, "prepare", ANY_TIME, "pass"),
    "between two supervisors": (ENGINE, "prepare", WITH_WORK, "pass"),
    "before an attempt is recorded": (STORE, "start_attempt", ANY_TIME, "pass"),
    "when attempts are recorded and not started": (ENGINE, "start_prepared", WITH_WORK, "pass"),
    "when attempts are started": (ENGINE, "start_prepared", WITH_WORK, GO_ON),
    "before an end is recorded": (STORE, "end_attempt", WITH_ENDS, "pass"),
    "when an end is not yet committed": (STORE, "end_attempt", WITH_ENDS, GO_ON),
}


class Work(Struct, frozen=True, kw_only=True):
    """A submission, and the expected outcome of its jobs."""

    command: tuple[str, ...]
    options: dict[str, Any]
    jobs: int
    attempts: int
    status: int

    @property
    def end(self) -> tuple[str, int, int]:
        return "succeeded" if self.status == 0 else "failed", self.status, self.attempts


def random_work(dice: random.Random, runs: Path, jobs: int) -> Iterator[Work]:
    while jobs > 0:
        kind, options = dice.choice(KINDS)
        count = min(jobs, dice.choice([1, 1, 1, 5]))
        fails, retries, status = dice.choice([0, 0, 0, 1]), dice.choice([0, 1]), dice.randint(1, 120)
        pause = f"{dice.uniform(0, 0.3):.3f}"
        array = {"array": f"1-{count}%{dice.randint(1, 3)}"} if count > 1 else {}
        yield Work(
            command=("/bin/sh", "-c", WORKER, "worker", str(runs), kind, pause, str(fails), str(status)),
            options={**options, **array, "retries": retries, "priority": dice.randint(0, 2)},
            jobs=count,
            attempts=min(fails, retries) + 1,
            status=0 if fails <= retries else status,
        )
        jobs -= count


def submit_until_acknowledged(queue: QueueUnderTest, work: Work) -> Any:
    """Repeat the submission with the same token until the daemon acknowledges it, as the command line does."""
    body = submission(*work.command, **work.options)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(EnvironmentFault):
            return queue.client.request("POST", "/submissions", body=body, timeout_s=DEADLINE_S, is_repeatable=True)
    pytest.fail("no daemon acknowledged the submission")


class Killer(threading.Thread):
    """Kills one daemon after the other at random moments, also during startup, and leaves the last one running."""

    def __init__(self, queue: QueueUnderTest, dice: random.Random, runs: Path) -> None:
        super().__init__()
        self.problem: str | None = None
        self.kills_under_load = 0
        self._runs = runs
        self._queue = queue
        self._dice = dice

    def run(self) -> None:
        for _ in range(KILLS):
            daemon = self._queue.daemon
            assert daemon is not None
            if self._dice.random() < 0.7 and not daemon.serves():
                self.problem = daemon.log
                return
            threading.Event().wait(self._dice.uniform(0, LONGEST_LIFE_S))
            daemon.kill()
            self.kills_under_load += len(os.listdir(self._runs)) < JOBS
            self._queue.daemon = Daemon()


@pytest.mark.timeout(600)
def test_every_job_has_its_expected_attempts_and_outcome_though_the_daemon_is_killed(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    runs = tmp_path / "runs"
    runs.mkdir()
    killer = Killer(queue, random.Random(SEED + 1), runs)
    killer.start()
    answers = [(work, submit_until_acknowledged(queue, work)) for work in random_work(dice, runs, JOBS)]
    killer.join()
    assert killer.problem is None
    assert killer.kills_under_load >= KILLS // 2
    assert queue.daemon is not None
    assert queue.daemon.serves(), queue.daemon.log
    queue.client.close()
    for _ in range(1 + JOBS // 50):
        if queue.get("/wait", timeout="30")["done"]:
            break

    ends = {answer["first"] + n: work for work, answer in answers for n in range(work.jobs)}
    assert sorted(ends) == list(range(1, JOBS + 1))
    rows = queue.get("/jobs", ids="all", limit="10000")["jobs"]
    assert {row["id"]: (row["state"], row["status"], row["attempt"]) for row in rows} == {
        job_id: work.end for job_id, work in ends.items()
    }
    for job_id, work in ends.items():
        attempts = range(1, work.attempts + 1)
        assert (runs / str(job_id)).read_text() == "".join(f"+ {number}\n- {number}\n" for number in attempts)
        for number in attempts:
            assert queue.log_of(job_id, number) == f"job {job_id} attempt {number}\nover\n"
    for device in ("gpu0", "gpu1"):
        assert_memory_was_never_exceeded(runs / device)


def assert_memory_was_never_exceeded(uses: Path) -> None:
    """Assert that every job ran alone or beside jobs that need at most 24 GB together."""
    beside: list[str] = []
    for line in uses.read_text().splitlines():
        sign, kind = line.split()
        if sign == "-":
            beside.remove(kind)
            continue
        beside.append(kind)
        assert beside == ["alone"] or ("alone" not in beside and sum(map(int, beside)) <= 24), beside
    assert beside == []


@pytest.mark.parametrize("moment", MOMENTS)
def test_jobs_run_once_when_the_daemon_is_killed(queue: QueueUnderTest, tmp_path: Path, moment: str) -> None:
    queue.post("/pause")
    run = f"echo $GPUYARD_JOB_ID $GPUYARD_ATTEMPT >> {tmp_path}/ran"
    ids = [queue.shell(run, **options) for options in ({"gpus": 0}, {}, {"vram": "10G"})]
    queue.stop()
    owner, method, when, before = MOMENTS[moment]
    module, _, name = owner.rpartition(".")
    code = CRASHING.format(module=module, name=name, method=method, when=when, before=before)
    queue.start([sys.executable, "-c", code])
    with contextlib.suppress(EnvironmentFault):
        queue.post("/unpause")
    assert queue.await_end().status == -signal.SIGKILL
    queue.start()
    queue.wait()
    assert sorted((tmp_path / "ran").read_text().splitlines()) == [f"{job_id} 1" for job_id in ids]
    attempts = [attempt for job_id in ids for attempt in queue.job(job_id)["attempts"]]
    assert [(attempt["number"], attempt["outcome"]) for attempt in attempts] == [(1, "succeeded")] * 3
