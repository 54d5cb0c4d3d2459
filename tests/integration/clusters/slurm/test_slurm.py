"""A queue with jobs on a real Slurm behaves as with local jobs."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from tests.executables import write_executable
from tests.fakes.queue_command import run
from tests.integration.clusters import scenarios
from tests.integration.clusters.conftest import configure
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.scale import size
from tests.slurm_cluster import SlurmCluster, needs_root, needs_slurm

pytestmark = needs_slurm
Counting = Callable[[], Counter[str]]


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Return a function that counts the calls of each of Slurm's commands so far, without those that only ask."""
    folder = tmp_path / "counted"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct"):
        command = folder / name
        count = f'case "$*" in *--test-only*) ;; *) echo {name} >>{folder}/calls;; esac'
        write_executable(command, f'#!/bin/sh\n{count}\nexec /usr/bin/{name} "$@"\n')
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    (folder / "calls").touch()
    return lambda: Counter((folder / "calls").read_text().split())


def test_an_array_is_one_sbatch_call_and_every_job_has_its_outcome_and_log(
    calls: Counting, on_slurm: QueueUnderTest
) -> None:
    scenarios.run_an_array(on_slurm, size(30, full=200))
    assert calls()["sbatch"] == 1


def test_an_array_is_one_sbatch_call_also_if_its_jobs_have_learned_different_amounts(
    calls: Counting, on_slurm: QueueUnderTest
) -> None:
    script = f"exec {sys.executable} -c 'import time; x = bytearray({{index}} << 23); time.sleep({{index}} / 20)'"
    for _ in range(2):
        first = on_slurm.shell(script, array="0-19", gpus=0)
        on_slurm.wait()
    assert calls()["sbatch"] == 2
    lines = {on_slurm.job(first + index)["attempts"][0]["request"]["text"] for index in range(20)}
    assert len(lines) == 1
    assert "--mem=" in lines.pop()


def test_an_array_with_a_limit_waits_in_slurms_queue_as_a_whole(
    calls: Counting, on_slurm: QueueUnderTest, tmp_path: Path
) -> None:
    count = size(20, full=200)
    first = on_slurm.shell(
        f"while ! [ -e {tmp_path}/go ]; do sleep 0.1; done; ls {tmp_path}/up | wc -l; "
        f"mkdir -p {tmp_path}/up; touch {tmp_path}/up/{{index}}; sleep 0.3; rm {tmp_path}/up/{{index}}",
        array=f"0-{count - 1}%3", gpus=0,
    )  # fmt: skip
    until(lambda: on_slurm.counts() == {"running": 3, "pending": count - 3}, "all of the array in Slurm's queue")
    assert "JobArrayTaskLimit" in on_slurm.why(first + count - 1)
    (tmp_path / "go").touch()
    on_slurm.wait()
    assert on_slurm.counts() == {"succeeded": count}
    assert max(int(on_slurm.log_of(first + index).split()[-1]) for index in range(count)) <= 2
    assert calls()["sbatch"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "8"}, "no node of slurm has 8 GPUs; the largest has 2"),
        ({"gpus": "0", "ram": "20G"}, "no node of slurm has 20 GB of RAM; the largest has 9.8 GB"),
        ({"gpus": "1", "gpu_name": "a100"}, "no node of slurm has 1 GPU; the largest has 0"),
        ({"gpus": "0", "engine_option": ["--partition=nowhere"]}, "invalid partition specified: nowhere"),
        ({"gpus": "0", "engine_option": ["--constraint=none"]}, "Invalid feature specification"),
    ],
)
def test_a_job_that_no_node_can_take_is_refused(
    on_slurm: QueueUnderTest, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refused:
        on_slurm.shell("true", **options)
    assert refused.value.code == "impossible"
    assert on_slurm.counts() == {}


def test_a_refused_submission_exits_with_4(on_slurm: QueueUnderTest) -> None:
    refused = run("submit", "--gpus", "8", "--", "true")
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "no node of slurm has 8 GPUs; the largest has 2" in refused.stderr


def test_an_edit_that_no_node_can_take_is_refused_and_changes_nothing(on_slurm: QueueUnderTest) -> None:
    job_id = on_slurm.shell("echo on $SLURMD_NODENAME", gpus="1", hold=True, engine="local")
    for options in (["--gpus", "8"], ["--engine-option", "--partition=nowhere"]):
        refused = run("edit", str(job_id), "--engine", "slurm", *options)
        assert (refused.returncode, refused.stdout) == (4, "")
    assert (on_slurm.job(job_id)["engine"], on_slurm.job(job_id)["gpus"]) == ("local", 1)
    assert run("edit", str(job_id), "--engine", "slurm").returncode == 0
    on_slurm.post("/jobs/release", ids=str(job_id))
    on_slurm.wait()
    assert on_slurm.log_of(job_id).startswith("on n")


def test_a_job_whose_nodes_are_all_drained_waits(slurm: SlurmCluster, on_slurm: QueueUnderTest) -> None:
    slurm.set_nodes("drain")
    try:
        job_id = on_slurm.shell("true", gpus="2")
        on_slurm.until_state(job_id, "pending")
    finally:
        slurm.set_nodes("resume")
    on_slurm.wait()
    assert on_slurm.state(job_id) == "succeeded"


def test_another_command_is_never_limited_by_what_one_has_taught(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    script = tmp_path / "sl.py"
    script.write_text("import sys, time; x = bytearray(int(sys.argv[1]) << 20); time.sleep(0.5)\n")
    requests = []
    for megabytes in ("10", "10", "300"):
        job_id = on_slurm.submit(sys.executable, str(script), megabytes, gpus=0)
        on_slurm.wait()
        assert on_slurm.state(job_id) == "succeeded"
        requests.append(on_slurm.job(job_id)["attempts"][0]["request"]["text"])
    first, again, other = requests
    assert "--time=" not in first + other
    assert "--mem=" not in first + other
    assert "--time=30 " in again, "far longer than it took"
    assert "--mem=1536M " in again, "far more than it used"


def test_show_prints_the_sbatch_line_and_where_each_figure_comes_from(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    for _ in range(2):
        job_id = on_slurm.shell("sleep 0.2", cpus="2", ram="1G", gpus=0)
        on_slurm.wait()
    shown = run("show", str(job_id)).stdout
    assert "sbatch --parsable --no-requeue --export=ALL --nodes=1 --job-name=gpuyard" in shown
    assert "--mem: declared" in shown
    assert "--time: learned" in shown


def test_a_thousand_jobs_are_submitted_and_cancelled_in_a_few_calls(calls: Counting, on_slurm: QueueUnderTest) -> None:
    on_slurm.shell("sleep 600", array="0-999", exclusive=True)
    until(lambda: on_slurm.counts().get("running", 0) == 4, "four running jobs, one per GPU")
    assert on_slurm.counts() == {"running": 4, "pending": 996}
    assert calls()["sbatch"] == 1
    on_slurm.post("/jobs/cancel", ids="all")
    on_slurm.wait()
    assert on_slurm.counts() == {"cancelled": 1000}
    assert calls()["sbatch"] == 1
    assert calls()["scancel"] <= 6


@pytest.fixture
def gate(on_slurm: QueueUnderTest, tmp_path: Path) -> Path:
    """Jobs have all four GPUs until this file exists."""
    path = tmp_path / "free"
    on_slurm.shell(f"while ! [ -e {path} ]; do sleep 0.1; done", array="0-3", exclusive=True)
    until(lambda: on_slurm.counts() == {"running": 4}, "four running jobs")
    return path


def in_slurms_queue() -> int:
    return len(subprocess.run(["squeue", "--noheader", "--array"], capture_output=True, check=True).stdout.splitlines())


def test_jobs_that_wait_at_slurm_are_held_edited_and_moved(
    on_slurm: QueueUnderTest, tmp_path: Path, gate: Path
) -> None:
    _, edited, _ = scenarios.change_jobs_that_wait_there(on_slurm, tmp_path, gate, exclusive=True)
    assert "--job-name=later" in on_slurm.job(edited)["attempts"][0]["request"]["text"]


def test_a_paused_queue_leaves_nothing_in_slurms_queue(on_slurm: QueueUnderTest, tmp_path: Path, gate: Path) -> None:
    scenarios.pause_while_jobs_wait_there(on_slurm, tmp_path, gate, exclusive=True)


def test_what_was_taken_back_is_gone_from_slurms_queue(on_slurm: QueueUnderTest, gate: Path) -> None:
    first = on_slurm.shell("true", array="0-999", exclusive=True)
    until(lambda: on_slurm.counts().get("pending") == 1000, "the array in Slurm's queue")
    on_slurm.post("/jobs/hold", ids=f"{first}-{first + 499}")
    assert on_slurm.counts() == {"running": 4, "pending": 500, "held": 500}
    until(lambda: in_slurms_queue() == 504, "that half of the array is gone from Slurm's queue")
    on_slurm.post("/pause")
    assert on_slurm.counts() == {"running": 4, "queued": 500, "held": 500}
    until(lambda: in_slurms_queue() == 4, "that all of it is gone")
    on_slurm.post("/jobs/cancel", ids="all")


def test_a_priority_that_slurm_cannot_tell_apart_is_said_at_submit(on_slurm: QueueUnderTest) -> None:
    assert "Slurm gets it as 0 (`nice_base` under [slurm])" in run("submit", "--priority", "5", "--", "true").stderr
    for value in ("0", "-3"):
        assert "nice_base" not in run("submit", "--priority", value, "--", "true").stderr
    on_slurm.wait()


def test_jobs_are_taken_back_from_slurm_as_they_begin(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.take_jobs_back_as_they_begin(on_slurm, tmp_path, size(12, full=60))


def test_only_a_buffer_of_jobs_waits_at_slurm(on_slurm: QueueUnderTest, tmp_path: Path, gate: Path) -> None:
    jobs = [on_slurm.shell(scenarios.record_run(tmp_path), exclusive=True) for _ in range(30)]
    until(lambda: on_slurm.counts() == {"running": 4, "pending": 16, "queued": 14}, "a buffer")
    assert "enough jobs wait at slurm" in on_slurm.why(jobs[-1])
    urgent = on_slurm.shell(scenarios.record_run(tmp_path), exclusive=True, priority="1")
    on_slurm.until_state(urgent, "pending")
    until(lambda: in_slurms_queue() == 4 + 16 + 1, "the urgent job in Slurm's queue")
    gate.touch()
    on_slurm.wait()
    assert [scenarios.runs_of(tmp_path, each) for each in (*jobs, urgent)] == [1] * 31


def test_a_workspace_is_swept_on_slurm(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.sweep_a_workspace(on_slurm, tmp_path / "space", "slurm")


def test_dependent_jobs_run_in_order(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.run_dependent_jobs(on_slurm, tmp_path)


def test_a_running_job_gets_sigterm_when_cancelled(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.cancel_a_running_job(on_slurm, tmp_path)


def test_a_job_pending_in_slurm_has_slurms_reason_and_can_be_cancelled(on_slurm: QueueUnderTest) -> None:
    first = on_slurm.shell("sleep 600", array="0-3", exclusive=True)
    last = on_slurm.shell("sleep 600", gpus="2", exclusive=True)
    scenarios.wait_for_reason(on_slurm, last, "Resources")
    on_slurm.post("/jobs/cancel", ids=str(last))
    on_slurm.wait(last)
    assert on_slurm.state(last) == "cancelled"
    assert on_slurm.state(first) == "running"


def test_a_job_out_of_memory_is_retried_with_more_shards(on_slurm: QueueUnderTest) -> None:
    job_id = scenarios.give_more_after_out_of_memory(on_slurm)
    assert on_slurm.job(job_id)["growth"]["memory_mb"] > 8192


def test_attempts_on_slurm_improve_the_estimates(on_slurm: QueueUnderTest) -> None:
    scenarios.learn_estimates_from_the_cluster(on_slurm, "slurm")


def test_a_job_over_its_time_limit_is_ended(on_slurm: QueueUnderTest) -> None:
    scenarios.end_a_job_over_its_time_limit(on_slurm)


def test_a_program_is_warned_before_the_time_limit(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.save_before_the_time_limit(on_slurm, tmp_path / "space", "slurm", "1h", "USR1@3598s")


def test_jobs_survive_a_kill_of_the_daemon(on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    scenarios.survive_a_kill_of_the_daemon(on_slurm, tmp_path, size(12, full=50))


def test_a_job_on_a_dead_node_runs_again_on_another(
    slurm: SlurmCluster, on_slurm: QueueUnderTest, tmp_path: Path
) -> None:
    job_id = on_slurm.shell(
        f"{scenarios.record_run(tmp_path)} [ $GPUYARD_ATTEMPT -gt 1 ] || sleep 600; echo on $SLURMD_NODENAME", gpus=0
    )
    on_slurm.until_state(job_id, "running")
    until(lambda: scenarios.runs_of(tmp_path, job_id) == 1, "its start")
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


@needs_root
def test_jobs_on_a_node_that_does_not_see_the_folder_run_on_another(
    slurm: SlurmCluster, on_slurm: QueueUnderTest, tmp_path: Path
) -> None:
    with slurm.hiding(on_slurm.home, "n1"):
        first = on_slurm.shell(f"{scenarios.record_run(tmp_path)} echo on $SLURMD_NODENAME", array="0-39", gpus=0)
        reasons = set[str | None]()

        def are_done() -> bool:
            reasons.update(on_slurm.job(first + index)["reason"] for index in range(0, 40, 5))
            return on_slurm.counts() == {"succeeded": 40}

        until(are_done, "the end of all jobs")
        [notice] = [each for each in on_slurm.get("/status")["notices"] if "n1" in each]
    assert "its supervisor could not start on n1: it may not see" in notice
    assert "`gpuyard doctor --engine slurm`" in notice
    assert [on_slurm.log_of(first + index) for index in range(40)] == ["on n0\n"] * 40
    assert [scenarios.runs_of(tmp_path, first + index) for index in range(40)] == [1] * 40
    assert any("queued again without n1" in (each or "") for each in reasons), reasons


@needs_root
def test_doctor_says_what_is_wrong_on_each_node(
    slurm: SlurmCluster, on_slurm: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    checked = run("doctor", "--engine", "slurm")
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
    assert checked.stdout == "n0 works, 2 GPUs of 24 GB\nn1 works, 2 GPUs of 24 GB\nNo problems found.\n"
    configure(on_slurm.home, '[slurm]\ngpu_memory = "40G"\n')
    with slurm.hiding(on_slurm.home, "n1"):
        checked = run("doctor", "--engine", "slurm")
        answer = json.loads(run("doctor", "--engine", "slurm", "--json").stdout)
    too_small = "has a GPU of 24 GB, but `gpu_memory` in [slurm] is 40 GB: lower that"
    hidden = "mount the same file system there, or name a folder that all nodes see as `folder` in [slurm]"
    assert checked.returncode == 1
    assert {each["node"]: each["problems"] for each in answer["nodes"]} == {
        "n0": [too_small], "n1": [f"does not see {on_slurm.home} ({hidden})", too_small],
    }  # fmt: skip
    assert f"n1\n  ! does not see {on_slurm.home}" in checked.stdout


def test_a_job_that_can_start_on_no_node_waits_and_blames_no_node_for_others(
    on_slurm: QueueUnderTest,
) -> None:
    broken = on_slurm.shell("true", gpus=0, engine_option=["--output=/nowhere/%j"])
    scenarios.wait_for_reason(on_slurm, broken, "left out, as jobs could not start there: n")
    others = [on_slurm.shell("true", gpus=2, exclusive=True) for _ in range(2)]
    for each in others:
        on_slurm.until_state(each, "succeeded")
    on_slurm.post("/jobs/cancel", ids=str(broken))
    on_slurm.wait()


def test_jobs_wait_while_the_controller_is_down(slurm: SlurmCluster, on_slurm: QueueUnderTest, tmp_path: Path) -> None:
    out = on_slurm.shell(f"{scenarios.record_run(tmp_path)} while ! [ -e {tmp_path}/go ]; do sleep 0.2; done", gpus=0)
    on_slurm.until_state(out, "running")
    slurm.stop_controller()
    try:
        job_id = on_slurm.shell(f"{scenarios.record_run(tmp_path)}", gpus=0)
        scenarios.wait_for_reason(on_slurm, job_id, "slurm cannot be reached")
        assert on_slurm.state(out) == "running"
    finally:
        slurm.start_controller()
    (tmp_path / "go").touch()
    on_slurm.wait()
    assert on_slurm.counts() == {"succeeded": 2}
    assert [scenarios.runs_of(tmp_path, each) for each in (out, job_id)] == [1, 1]


def test_a_job_rejected_by_slurm_waits_with_slurms_message_and_others_run(
    slurm: SlurmCluster, on_slurm: QueueUnderTest
) -> None:
    slurm.add_partition("soon")
    refused = on_slurm.shell("true", gpus=0, hold=True, engine_option=["--partition=soon"])
    slurm.remove_partition("soon")
    on_slurm.post("/jobs/release", ids=str(refused))
    scenarios.wait_for_reason(on_slurm, refused, "slurm refused it: invalid partition specified: soon")
    other = on_slurm.shell("echo fine", gpus=0)
    on_slurm.wait(other)
    assert (on_slurm.state(other), on_slurm.state(refused)) == ("succeeded", "queued")


def test_jobs_rejected_for_a_wrong_setting_run_after_its_correction(on_slurm: QueueUnderTest) -> None:
    good = (on_slurm.home / "config.toml").read_text()
    job_id = on_slurm.shell("true", gpus=0, hold=True)
    configure(on_slurm.home, f'{good}partition = "nowhere"\n')
    on_slurm.restart()
    with pytest.raises(UserError, match="invalid partition"):
        on_slurm.shell("true", gpus=0)
    on_slurm.post("/jobs/release", ids=str(job_id))
    scenarios.wait_for_reason(on_slurm, job_id, "invalid partition")
    configure(on_slurm.home, good)
    on_slurm.restart()
    on_slurm.wait()
    assert on_slurm.state(job_id) == "succeeded"
