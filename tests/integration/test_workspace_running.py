"""A sweep: repeated starts, stop, kill and continue, retries, and completion."""

import subprocess

import pytest

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, is_gone
from tests.integration.workspace_fixture import Workspace, make_tmux, make_workspace, make_workspaces, until  # noqa: F401 - fixtures are found where they are named

pytestmark = pytest.mark.needs("tmux")
unmeasured = pytest.mark.usefixtures("unmeasured")


def states(ws: Workspace) -> dict[str, str]:
    return {config: row["state"] for config, row in ws.rows().items()}


# Repeated starts


@unmeasured
def test_two_simultaneous_starts_start_no_task_twice(workspace: Workspace) -> None:
    workspace.add_gated("exp1", "exp2", "exp3")
    both = [
        subprocess.Popen([workspace.folder / "scheduler.sh", "start"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [each.communicate(timeout=90)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    lines = [line for text in outputs for line in text.splitlines() if line.startswith("exp")]
    assert sum(" skipped: " in line for line in lines) == 3
    assert len(lines) == 6
    workspace.until_running("exp1", "exp2", "exp3")
    again = workspace.do("start")
    for number in (1, 2, 3):
        assert f"exp{number}  skipped: already running as job {number}\n" in again
    assert "Nothing to do: 3 configs, all completed, running or waiting.\n" in again
    workspace.let_go("exp1", "exp2", "exp3")
    workspace.until_over()
    assert sorted(each["config"] for each in workspace.starts()) == ["exp1", "exp2", "exp3"]


def test_a_config_runs_only_once_at_a_time(workspace: Workspace) -> None:
    workspace.add_gated("exp")
    workspace.do("start")
    workspace.until_running("exp")
    workspace.do("kill-all")
    workspace.do("start")
    workspace.until_running("exp")
    refused = run("retry", "1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "job 2 already runs this config" in refused.stderr
    workspace.do("kill-all")
    assert run("retry", "1").returncode == 0
    workspace.until_started("exp", times=3)
    assert "exp  skipped: already running as job 1\n" in workspace.do("start")
    assert "1 task ended" in workspace.do("kill-all")


@pytest.mark.full
def test_tasks_can_be_ended_though_the_configuration_is_invalid(workspace: Workspace) -> None:
    workspace.add_gated("exp1", "exp2")
    workspace.do("start")
    workspace.until_running("exp1", "exp2")
    (workspace.folder / "scheduler_config.yml").write_text("max_job_per_gpu: 2\n")
    for verb, says in (("stop", "Stopped: 2 tasks finish"), ("kill-all", "2 tasks ended, 3 sessions closed")):
        done = workspace.scheduler(verb)
        assert done.returncode == 0
        assert says in done.stdout
        assert "there is no key `max_job_per_gpu`" in done.stderr
    assert workspace.scheduler("start").returncode == 2


# Stop, kill and continue


@unmeasured
def test_after_stop_running_tasks_finish_and_nothing_starts_until_start(workspace: Workspace) -> None:
    workspace.configure(max_jobs_per_gpu=1, auto_restart_failed=True)
    workspace.add_gated("exp1", "exp2", fails=1)
    workspace.add("exp3", "exp4")
    workspace.do("start")
    workspace.until_running("exp1", "exp2")
    assert workspace.do("stop").startswith("Stopped: 2 tasks finish; 2 waiting tasks will not start.\n")
    workspace.let_go("exp1")
    workspace.until_state("exp1", "failed")  # a retry would be a new start
    assert workspace.rows()["exp1"]["note"].endswith("its workspace was stopped, so there is no retry")
    assert states(workspace) == {"exp1": "failed", "exp2": "running", "exp3": "stopped", "exp4": "stopped"}
    assert "Stopped: running tasks finish, and no new ones start" in workspace.do("status")
    assert "exp1  job 5\nexp3  job 6\nexp4  job 7\n" in workspace.do("start")
    workspace.let_go("exp2")
    workspace.let_go("exp1", "exp2")
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}
    assert {config: len(workspace.starts(config)) for config in workspace.tasks()} == {
        "exp1": 2, "exp2": 2, "exp3": 1, "exp4": 1,
    }  # fmt: skip


@unmeasured
def test_kill_all_ends_running_and_waiting_tasks_and_start_runs_them_again(workspace: Workspace) -> None:
    workspace.configure(max_jobs_per_gpu=1, gpu_count=1, auto_restart_failed=True)
    workspace.add_gated("exp1")
    workspace.add("exp2")
    workspace.do("start")
    workspace.until_running("exp1")
    processes = [workspace.program("exp1"), workspace.runner("exp1")]
    assert workspace.do("kill-all") == "2 tasks ended, 2 sessions closed.\n"
    until(lambda: all(map(is_gone, processes)), "the end of its processes")
    assert states(workspace) == {"exp1": "stopped", "exp2": "stopped"}
    assert (workspace.session_names(), workspace.markers()) == (set(), set())
    assert workspace.do("kill-all") == "0 tasks ended, 0 sessions closed.\n"
    workspace.do("start")
    workspace.until_started("exp1", times=2)
    workspace.let_go("exp1")
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}


# Retries


@unmeasured
def test_a_failed_task_is_retried_as_often_as_configured(workspace: Workspace) -> None:
    workspace.configure(auto_restart_failed=True, max_retries=2)
    workspace.add("late", fails=2)
    workspace.add("good")
    workspace.do("start")
    rows = workspace.until_over()
    assert {config: (row["state"], row["attempt"]) for config, row in rows.items()} == {
        "late": ("completed", 3), "good": ("completed", 1),
    }  # fmt: skip
    assert (len(workspace.starts("late")), len(workspace.ends("late"))) == (3, 1)
    assert workspace.scheduler_log().count("late failed with status 1\n") == 2
    for attempt in ("2 of 3", "3 of 3"):
        assert f"late retried, attempt {attempt}: exit status 1 after “" in workspace.scheduler_log()
    assert workspace.log("late").count("it did not converge") == 2


@pytest.mark.full
def test_a_task_out_of_memory_is_retried_with_more_and_uses_no_retries(
    workspace: Workspace, own_queue: QueueUnderTest
) -> None:
    workspace.configure(gpu_count=1)
    workspace.add_gated("first", memory_mb=8 * 1024)
    workspace.add("greedy", memory_mb=18 * 1024)
    workspace.do("start", "first")
    until(lambda: "at the gate" in workspace.log("first"), "its memory")
    workspace.do("start", "greedy")
    until(lambda: len(own_queue.job(2)["attempts"]) == 1 and own_queue.state(2) in ("delayed", "queued"), "its failure")
    failed = own_queue.job(2)
    assert failed["attempts"][0]["outcome"] == "out-of-memory"
    assert (failed["retries"], failed["failures"]) == (0, 0)
    assert failed["growth"]["memory_mb"] > 12 * 1024
    workspace.let_go("first")
    row = workspace.until_over()["greedy"]
    assert (row["state"], own_queue.job(2)["failures"]) == ("completed", 0)
    assert row["attempt"] == len(workspace.starts("greedy")) > 1
