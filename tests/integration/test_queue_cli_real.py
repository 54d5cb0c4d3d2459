"""The queue's commands with the daemon that they start, and real jobs."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.client.daemon_liveness import running_pid
from tests.fakes.queue_command import GPUYARD, run_here
from tests.integration.queue_fixture import end_leftovers, until


@pytest.fixture(autouse=True)
def queue(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    yield
    end_leftovers(own_home)


def submit(*arguments: str) -> str:
    result = run_here("submit", *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.strip()


def state_of(job_id: str) -> str:
    return str(json.loads(run_here("show", job_id, "--json").stdout)["state"])


def test_a_job_runs_in_the_directory_of_its_submission_and_logs_prints_its_output(tmp_path: Path) -> None:
    assert submit("--env", "LR=3e-4", "--cwd", str(tmp_path), "--", "sh", "-c", "pwd; echo $LR") == "1"
    assert run_here("wait", "1").returncode == 0
    assert run_here("logs", "1").stdout == f"{tmp_path}\n3e-4\n"
    assert "succeeded" in run_here("queue").stdout
    assert "exit status 0" in run_here("show", "1").stdout
    assert "submitted" in run_here("history", "1").stdout.splitlines()[2]


def test_wait_reports_a_failure_and_logs_follows_all_attempts(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    stay = f"[ $GPUYARD_ATTEMPT != 1 ] || read word < {gate}"
    job_id = submit("--retries", "1", "--", "sh", "-c", f"echo try $GPUYARD_ATTEMPT; {stay}; exit 3")
    command = [*GPUYARD, "logs", "-f", job_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "try 1\n"
        gate.write_text("go\n")
        output, errors = follower.communicate(timeout=90)
    assert (follower.returncode, output) == (0, "try 2\n")
    assert "--- attempt 2 ---" in errors
    waited = run_here("wait", job_id)
    assert waited.returncode == 5
    assert f"gpuyard: {job_id} failed: exit status 3 after “try 2”\n" in waited.stderr


def test_waiting_jobs_can_be_explained_reordered_held_and_cancelled() -> None:
    assert submit("--array", "0-3", "--name", "big", "--", "sleep", "3600") == "1-4"
    assert run_here("why", "4").stdout.startswith("job 4 waits for 1 GPU: ")
    assert [job["id"] for job in json.loads(run_here("show", "2", "3-4", "--json").stdout)] == [2, 3, 4]
    assert run_here("why", "name=big").stdout.count("job ") >= 4
    assert "several jobs: 1, 2, 3, 4\n" in run_here("logs", "-f", "name=big").stderr
    assert run_here("priority", "4", "5").stdout == "priority 5 for 4\n"
    assert run_here("hold", "3").stdout == "held 3\n"
    assert state_of("3") == "held"
    assert run_here("release", "3").stdout == "released 3\n"
    assert run_here("cancel", "name=big").stdout == "cancelled 1-4\n"
    assert run_here("wait", "1-4").returncode == 6
    assert run_here("cancel", "1").returncode == 1
    assert run_here("hold", "all").stderr == "gpuyard: 4 had finished already\n"
    assert run_here("priority", "1", "5").stderr == "gpuyard: 1 keeps its priority: it was already cancelled\n"
    assert run_here("why", "1").stdout.count("cancelled") <= 2


def test_a_running_job_and_a_client_waiting_for_it_survive_the_daemon(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job_id = submit("--", "sh", "-c", f"read word < {gate}")
    until(lambda: state_of(job_id) == "running", "the job")
    waiter = subprocess.Popen([*GPUYARD, "wait", job_id], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: psutil.Process(waiter.pid).net_connections("unix"), "the waiter's first request")
        assert run_here("daemon", "stop").stdout == "daemon stopped; 1 job still running\n"
        assert run_here("daemon", "status").returncode == 1
        assert "daemon started" in run_here("daemon", "start").stdout
        assert state_of(job_id) == "running"
        gate.write_text("go\n")
        _, errors = waiter.communicate(timeout=90)
    finally:
        waiter.kill()
        waiter.communicate()
    assert (waiter.returncode, errors) == (0, "")


@pytest.mark.parametrize("verb", [["wait"], ["logs", "-f"]])
def test_a_client_waiting_for_a_job_restarts_a_killed_daemon(verb: list[str], own_home: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job_id = submit("--", "sh", "-c", f"echo begun; read word < {gate}; echo over")
    follower = subprocess.Popen([*GPUYARD, *verb, job_id], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with gate.open("w") as opened_gate:  # the job runs: opening a FIFO blocks until it reads
            until(lambda: psutil.Process(follower.pid).net_connections("unix"), "the follower's first request")
            killed = running_pid(own_home / "daemon.lock")
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            until(lambda: running_pid(own_home / "daemon.lock") not in (None, killed), "the next daemon")
            opened_gate.write("go\n")
        output, errors = follower.communicate(timeout=90)
    finally:
        follower.kill()
        follower.communicate()
    assert (follower.returncode, errors.replace("gpuyard: job 1 is queued; waiting for it to start\n", "")) == (0, "")
    assert output == ("begun\nover\n" if verb[0] == "logs" else "")


def test_a_refusal_of_the_daemon_names_the_correct_form() -> None:
    for arguments, status, message in (
        (["submit", "--vram", "8Q", "--", "true"], 2, "8G"),
        (["submit", "--vram", "999G", "--", "true"], 4, "gpuyard devices"),
        (["submit", "--array", "9-0", "--", "true"], 2, "0-99"),
        (["queue", "99"], 3, "gpuyard queue"),
        (["cancel", "everything"], 2, "17-20"),
        (["show", "big"], 2, "name=big"),
        (["why", "name=big"], 3, "name=big"),
        (["logs", "name=big"], 3, "name=big"),
        (["queue", "--state", "lost"], 2, "failed"),
    ):
        result = run_here(*arguments)
        assert (result.returncode, result.stdout) == (status, ""), arguments
        assert message in result.stderr


def test_a_paused_queue_starts_nothing_until_it_is_unpaused() -> None:
    run_here("pause")
    submitted = run_here("submit", "true")
    job_id = submitted.stdout.strip()
    assert "gpuyard unpause" in submitted.stderr
    assert "Paused" in run_here("queue").stdout
    assert state_of(job_id) == "queued"
    run_here("unpause")
    assert run_here("wait", job_id).returncode == 0
    assert run_here("drain", "--wait").stdout.startswith("drained")
    assert run_here("clean", "--older-than", "0s").stdout.startswith("deleted 1 job ")
