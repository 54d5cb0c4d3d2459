"""A queue whose jobs run on a real Slurm: everything is as it is with jobs that run here."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.clusters import stories
from tests.integration.clusters.conftest import configure
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.scale import size
from tests.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = needs_slurm
Counting = Callable[[], Counter[str]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """How often each of Slurm's commands was called by then."""
    folder = tmp_path / "counted"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct"):
        command = folder / name
        command.write_text(f'#!/bin/sh\necho {name} >>{folder}/calls\nexec /usr/bin/{name} "$@"\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    (folder / "calls").touch()
    return lambda: Counter((folder / "calls").read_text().split())


def test_an_array_is_one_call_and_each_has_its_own_end_and_log(calls: Counting, on_slurm: QueueUnderTest) -> None:
    stories.run_an_array(on_slurm, size(30, full=200))
    assert calls()["sbatch"] == 1


def test_a_thousand_jobs_are_handed_over_and_taken_back_in_a_handful_of_calls(
    calls: Counting, on_slurm: QueueUnderTest
) -> None:
    on_slurm.shell("sleep 600", array="0-999", exclusive=True)
    until(lambda: on_slurm.counts().get("running", 0) == 4, "four that run: there are as many GPUs")
    assert on_slurm.counts() == {"running": 4, "pending": 996}
    assert calls()["sbatch"] == 1
    on_slurm.post("/jobs/cancel", ids="all")
    on_slurm.wait()
    assert on_slurm.counts() == {"cancelled": 1000}
    assert calls()["sbatch"] == 1
    assert calls()["scancel"] <= 6


def test_a_workspace_is_swept_there(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    stories.sweep_a_workspace(on_slurm, tmp_path / "space", "slurm")


def test_jobs_wait_for_each_other(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    stories.run_one_after_the_other(on_slurm, tmp_path)


def test_what_runs_is_cancelled_in_good_order(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    stories.cancel_what_runs(on_slurm, tmp_path)


def test_what_waits_there_says_why_and_is_taken_back(on_slurm: QueueUnderTest) -> None:
    first = on_slurm.shell("sleep 600", array="0-3", exclusive=True)
    last = on_slurm.shell("sleep 600", gpus="2", exclusive=True)
    stories.ask_why(on_slurm, last, "Resources")
    on_slurm.post("/jobs/cancel", ids=str(last))
    on_slurm.wait(last)
    assert on_slurm.state(last) == "cancelled"
    assert on_slurm.state(first) == "running"


def test_one_that_runs_out_of_memory_is_given_more_shards(on_slurm: QueueUnderTest) -> None:
    job_id = stories.give_more_after_out_of_memory(on_slurm)
    assert on_slurm.job(job_id)["growth"]["memory_mb"] > 8192


def test_what_ran_there_teaches_how_much_it_takes(on_slurm: QueueUnderTest) -> None:
    stories.learn_from_what_ran_there(on_slurm, "slurm")


def test_one_that_takes_too_long_is_ended(on_slurm: QueueUnderTest) -> None:
    stories.end_what_takes_too_long(on_slurm)


def test_jobs_outlive_the_daemon(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    stories.outlive_the_daemon(on_slurm, tmp_path, size(12, full=50))


def test_what_was_on_a_node_that_died_runs_again_on_another(
    slurm: SlurmCluster, on_slurm: QueueUnderTest, tmp_path: Path
) -> None:
    job_id = on_slurm.shell(
        f"{stories.noting(tmp_path)} [ $GPUYARD_ATTEMPT -gt 1 ] || sleep 600; echo on $SLURMD_NODENAME", gpus=0
    )
    on_slurm.until_state(job_id, "running")
    until(lambda: stories.runs_of(tmp_path, job_id) == 1, "its beginning")
    node = str(on_slurm.job(job_id)["place"])
    slurm.kill_node(node)
    try:
        on_slurm.wait()
    finally:
        slurm.start_node(node)
    job = on_slurm.job(job_id)
    assert (job["state"], [each["outcome"] for each in job["attempts"]]) == ("succeeded", ["lost", "succeeded"])
    [other] = {"n0", "n1"} - {node}
    assert (job["place"], on_slurm.log_of(job_id, 2)) == (other, f"on {other}\n")


def test_while_its_controller_is_down_jobs_wait_and_then_go_on(
    slurm: SlurmCluster, on_slurm: QueueUnderTest, tmp_path: Path
) -> None:
    out = on_slurm.shell(f"{stories.noting(tmp_path)} while ! [ -e {tmp_path}/go ]; do sleep 0.2; done", gpus=0)
    on_slurm.until_state(out, "running")
    slurm.stop_controller()
    try:
        job_id = on_slurm.shell(f"{stories.noting(tmp_path)}", gpus=0)
        stories.ask_why(on_slurm, job_id, "slurm cannot be reached")
        assert on_slurm.state(out) == "running"
    finally:
        slurm.start_controller()
    (tmp_path / "go").touch()
    on_slurm.wait()
    assert on_slurm.counts() == {"succeeded": 2}
    assert [stories.runs_of(tmp_path, each) for each in (out, job_id)] == [1, 1]


def test_without_its_commands_jobs_wait_and_say_what_is_missing(
    on_slurm: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_slurm.stop()
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    on_slurm.start()
    job_id = on_slurm.shell("true", gpus=0, environment={"PATH": path})
    stories.ask_why(on_slurm, job_id, "squeue")
    assert on_slurm.state(job_id) == "queued"
    monkeypatch.setenv("PATH", path)
    on_slurm.restart()
    on_slurm.wait()
    assert on_slurm.state(job_id) == "succeeded"


def test_one_that_slurm_refuses_is_held_with_its_words_and_others_go_on(on_slurm: QueueUnderTest) -> None:
    refused = on_slurm.shell("true", gpus=0, engine_option=["--partition=nowhere"])
    stories.ask_why(on_slurm, refused, "invalid partition")
    other = on_slurm.shell("echo fine", gpus=0)
    on_slurm.wait(other)
    assert (on_slurm.state(other), on_slurm.state(refused)) == ("succeeded", "queued")


def test_jobs_that_a_bad_setting_kept_back_go_on_when_it_is_mended(on_slurm: QueueUnderTest) -> None:
    good = (on_slurm.home / "config.toml").read_text()
    configure(on_slurm.home, f'{good}partition = "nowhere"\n')
    on_slurm.restart()
    job_id = on_slurm.shell("true", gpus=0)
    stories.ask_why(on_slurm, job_id, "invalid partition")
    configure(on_slurm.home, good)
    on_slurm.restart()
    on_slurm.wait()
    assert on_slurm.state(job_id) == "succeeded"
