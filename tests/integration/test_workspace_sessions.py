"""A sweep in the sessions of its tasks, in the scheduler's session, and in its status."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.workspace_fixture import Workspace, Workspaces, make_tmux, make_workspace, make_workspaces, until  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]

CTRL_C = "\x03"


def test_ctrl_c_in_an_attached_session_interrupts_only_that_task(workspace: Workspace, workspaces: Workspaces) -> None:
    workspace.add_gated("exp1", "exp2")
    workspace.do("start", "exp1,exp2", "0")
    with workspaces.attached("T_exp1_gpu0") as person:
        person.read_until("at the gate")
        person.type(CTRL_C)
        person.read_until("KeyboardInterrupt")
    workspace.until_state("exp1", "failed")
    row = workspace.rows()["exp1"]
    assert (row["state"], row["note"]) == ("failed", "KeyboardInterrupt (SIGINT)")
    assert "KeyboardInterrupt" in workspace.log("exp1")
    # Its session keeps the last screen.
    workspace.tmux.wait_to_see("T_exp1_gpu0", "[exp1 failed, status 130, after ")
    workspace.let_go("exp2")
    workspace.until_over()
    assert workspace.markers() == {"exp2"}


def test_a_task_gets_the_signal_before_its_time_limit_and_its_runner_does_not_count(
    workspace: Workspace, workspaces: Workspaces
) -> None:
    workspace.configure(timeout="1h", signal="USR1@3599s", max_retries=0, script_path="train.sh", python_env="/bin/sh")
    (workspace.folder / "train.sh").write_text("trap 'echo saved; exit 75' USR1; while :; do sleep 0.05; done\n")
    workspace.add("exp1")
    workspace.do("start", "exp1", "0")
    workspace.until_state("exp1", "failed")
    assert "saved" in workspace.log("exp1")
    (job,) = workspaces.queue.get("/jobs", all="1")["jobs"]
    (attempt,) = workspaces.queue.job(job["id"])["attempts"]
    assert (attempt["outcome"], attempt["status"]) == ("timed-out", 75)
    (warned,) = [
        event["text"]
        for event in workspaces.queue.get(f"/jobs/{job['id']}/history")["events"]
        if event["kind"] == "warned"
    ]
    assert "signal USR1 to 1 process," in warned


def test_an_unrelated_session_with_the_same_name_is_not_touched(workspace: Workspace) -> None:
    for name in ("T_exp1_gpu0", "T_scheduler"):
        workspace.tmux("new-session", "-d", "-s", name, "sleep 1000")
    workspace.add("exp1")
    output = workspace.do("start", "exp1", "0")
    assert "tmux attach -t T_scheduler-2\n" in output
    assert workspace.until_over()["exp1"]["session"] == "T_exp1_gpu0-2"
    assert workspace.do("kill-all") == "0 tasks ended, 2 sessions closed.\n"
    assert workspace.tmux.sessions() == ["T_exp1_gpu0", "T_scheduler"]


@pytest.mark.full
def test_the_schedulers_session_shows_the_status_of_the_sweep(workspace: Workspace) -> None:
    workspace.add_gated("exp1", "exp2")
    assert "To watch them:  tmux attach -t T_scheduler\n" in workspace.do("start", "exp1")
    workspace.tmux.wait_to_see("T_scheduler", "● running")
    assert "exp2" in workspace.tmux.screen("T_scheduler")
    workspace.let_go("exp1")
    workspace.tmux.wait_to_see("T_scheduler", "✓ completed")
    workspace.tmux.wait_to_see("T_scheduler", "1 of 2 done")
    # The session closes after the last status, and a later start opens it again.
    workspace.tmux.wait_for_dead_pane("T_scheduler")
    workspace.do("start")
    workspace.tmux.wait_to_see("T_scheduler", "● running")
    workspace.let_go("exp2")
    workspace.tmux.wait_to_see("T_scheduler", "2 of 2 done")


@pytest.fixture
def lines(workspace: Workspace) -> Iterator[Iterator[str]]:
    """Lines of `status --watch` in a pipe, as they arrive."""
    workspace.add_gated("exp1", "exp2", "exp3")
    workspace.configure(max_jobs_per_gpu=2, gpu_count=1)
    workspace.do("start")
    workspace.until_running("exp1", "exp2")
    command = [str(workspace.folder / "scheduler.sh"), "status", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        yield iter(watch.stdout)
        assert watch.wait(90) == 0


def test_status_follows_a_sweep_from_start_to_end(workspace: Workspace, lines: Iterator[str]) -> None:
    assert next(lines).startswith("0 of 3 done · 2 running · 1 waiting · time left unknown")
    status = workspace.status()
    assert status["counts"] == {
        "total": 3, "completed": 0, "running": 2, "waiting": 1, "failed": 0, "not_started": 0,
    }  # fmt: skip
    assert (status["over"], status["left_s"]) == (False, None)
    rows = {row["config"]: row for row in status["tasks"]}
    assert {config: (row["state"], row["gpu"], row["attempt"]) for config, row in rows.items()} == {
        "exp1": ("running", "0", 1), "exp2": ("running", "0", 1), "exp3": ("waiting", None, 0),
    }  # fmt: skip
    assert rows["exp1"]["session"] == "T_exp1_gpu0"
    assert rows["exp3"]["note"] == "limit reached: at most 2 tasks of its workspace on one GPU at a time"
    until(lambda: workspace.rows()["exp1"]["last_line"] == "at the gate", "the last line of its log")

    workspace.let_go("exp1")
    assert "exp1 completed" in next(line for line in lines if line.startswith("1 of 3 done"))
    workspace.until_running("exp3")
    assert workspace.status()["left_s"] is not None  # a similar task has finished
    workspace.let_go("exp2", "exp3")
    workspace.until_over()
    *_, last = lines
    assert last.startswith("3 of 3 done: ")
    after = workspace.status()
    assert (after["over"], after["left_s"], after["why"]) == (True, 0.0, None)
    assert {row["state"] for row in after["tasks"]} == {"completed"}
    assert "3 of 3 done" in workspace.do("status")
