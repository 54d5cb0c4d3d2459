"""A batch completes and runs each seed once, even when its daemon or its command is killed midway."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from gpuyard.client.daemon_liveness import running_pid
from gpuyard.recipes.batch.finish import Summary, read_summary
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import DEADLINE_S, is_gone, until
from tests.integration.sim_view_fixture import Batch, make_batch, put_sim_view  # noqa: F401 - fixtures are found where they are named
from tests.scale import some

RUNS, AT_ONCE, KILLS, SEED = 8, 2, 3, 6
TAKES = ("--seconds", "0.3")
OPTIONS = {"concurrency": AT_ONCE, "run_vram": "100M"}
ROUNDED_S = 0.002  # times are rounded to the millisecond
# Runs the command and kills it right after its first call of one step.
CRASHING = """
import os, signal, sys
from gpuyard.recipes.batch import plan as batch
from gpuyard.ui.cli import main

step = sys.argv.pop(1)
whole = getattr(batch, step)
def crash(*arguments, **named):
    whole(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(batch, step, crash)
main()
"""


@pytest.fixture
def left_alone(batch: Batch) -> Iterator[Batch]:
    """A batch; the command starts its daemon."""
    yield batch
    if running_pid(batch.queue.home / "daemon.lock") is not None:
        assert run("daemon", "stop").returncode == 0


@contextlib.contextmanager
def in_foreground(*command_line: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([*GPUYARD, *command_line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill_daemon(home: Path) -> None:
    """Kill the daemon as soon as its pid is known."""
    lock = home / "daemon.lock"
    until(lambda: running_pid(lock) is not None, "a daemon")
    pid = running_pid(lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    until(lambda: is_gone(pid), "the daemon's end")


def check_each_once(batch: Batch, summary: Summary | None) -> None:
    assert summary is not None
    assert (summary.runs, summary.succeeded, summary.attempts) == (RUNS, RUNS, RUNS)
    begun, ended = ([(each.seed, each.pid) for each in batch.entries(what)] for what in ("begins", "ends"))
    assert sorted(seed for seed, _ in begun) == list(range(RUNS))
    assert sorted(begun) == sorted(ended)
    assert batch.most_at_once() <= AT_ONCE
    frames = [len(list((batch.root / f"run-{index:06d}").iterdir())) for index in range(RUNS)]
    assert frames == [3] * RUNS


@pytest.mark.parametrize("victims", ["daemon and command", *some(["daemon", "command"])])
def test_each_seed_runs_once_however_often_the_daemon_or_the_command_is_killed(left_alone: Batch, victims: str) -> None:
    """Kill before the first run begins, and then after random numbers of runs have begun."""
    it, dice = left_alone, random.Random(f"{SEED} {victims}")
    moments = [0, *sorted(dice.sample(range(1, RUNS), KILLS - 1))]
    # The last run waits, so that the victims are alive at each moment.
    command_line = it.command(RUNS, [*TAKES, *it.gated(RUNS - 1)], **OPTIONS)
    with contextlib.ExitStack() as processes:
        process = processes.enter_context(in_foreground(*command_line))
        for moment in moments:
            it.until_begun(moment)
            threading.Event().wait(dice.uniform(0, 0.3))
            if "daemon" in victims:
                kill_daemon(it.queue.home)
            if "command" in victims:
                process.kill()
                process.communicate()
                process = processes.enter_context(in_foreground(*command_line))
        it.let_go()
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    assert f"all {RUNS} runs succeeded" in output
    check_each_once(it, read_summary(it.root))


def crash_after(step: str, command_line: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", CRASHING, step, *command_line], timeout=90, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_batch_whose_command_was_killed_while_starting_it_can_be_continued(left_alone: Batch) -> None:
    it = left_alone
    crash_after("_write_parts", it.command(RUNS, TAKES, **OPTIONS))
    command_line = it.command(RUNS, TAKES, **OPTIONS, resume=True)
    for step in ("_post", "_write_parts", "_post", "_write_parts"):
        crash_after(step, command_line)
    done = run(*command_line)
    assert done.returncode == 0, done.stderr
    check_each_once(it, read_summary(it.root))


def test_the_next_command_summarises_runs_that_ended_before_a_summary_was_requested(left_alone: Batch) -> None:
    it = left_alone
    command_line = it.command(RUNS, ("--seconds", "0"), **OPTIONS)
    for _ in ("the batch is written down", "its runs are submitted, and that is written down"):
        crash_after("_write_parts", command_line)
    until(lambda: len(it.entries("ends")) == RUNS, "the end of all runs")
    assert run("wait").returncode == 0
    done = run(*command_line)
    assert done.returncode == 0, done.stderr
    check_each_once(it, read_summary(it.root))


def test_the_stagger_between_launches_holds_when_the_daemon_is_killed_between_two(batch: Batch) -> None:
    least_s = 1.0
    batch.queue.start()
    batch.begin(4, ["--seconds", "0"], concurrency=4, stagger=f"{least_s}s")
    batch.until_begun(2)
    batch.queue.restart()
    summary = batch.finished()
    assert summary.succeeded == 4
    assert summary.waits_s["stagger"] > 0
    runs = batch.queue.get(f"/batches/{batch.first}/runs")["runs"]
    started = sorted(datetime.fromisoformat(each["started_at"]).timestamp() for each in runs)
    assert all(later - earlier >= least_s - ROUNDED_S for earlier, later in pairwise(started)), started
