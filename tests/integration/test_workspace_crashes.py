"""Kills of the daemon, tmux, runners and programs of a workspace: surviving tasks run on, killed ones are retried if
configured, and nothing runs or counts twice."""

import os
import signal
from collections.abc import Callable

import pytest

from tests.integration.queue_fixture import QueueUnderTest, is_gone
from tests.integration.workspace_fixture import (  # noqa: F401 - fixtures are found where they are named
    Workspace,
    Workspaces,
    kill9,
    make_tmux,
    make_workspace,
    make_workspaces,
    until,
)
from tests.scale import some

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]

CONFIGS = ("exp1", "exp2", "exp3")


def sessions_of(ws: Workspace, *configs: str) -> set[str]:
    rows = ws.rows()
    return {rows[config]["session"] for config in configs}


def until_sessions_exist(ws: Workspace, names: set[str]) -> None:
    until(lambda: names <= ws.session_names(), f"the sessions {names}")
    for name in names:
        ws.tmux.wait_to_see(name, "at the gate")


def test_tasks_survive_kills_of_the_daemon_and_the_tmux_server(workspaces: Workspaces) -> None:
    ws, queue = workspaces.make(), workspaces.queue
    ws.add_gated(*CONFIGS, "exp4", "exp5")
    ws.do("start", "exp1,exp2,exp3", "0,0,1")
    ws.until_running(*CONFIGS)
    names, pids = sessions_of(ws, *CONFIGS), [ws.program(config) for config in CONFIGS]
    assert names == {"T_exp1_gpu0", "T_exp2_gpu0", "T_exp3_gpu1"}
    until_sessions_exist(ws, names)
    ws.tmux.wait_to_see("T_scheduler", "● running")  # `status` starts a daemon if none runs

    queue.kill9()
    kill9(ws.tmux.server())
    until_sessions_exist(ws, names)  # the sessions return without a daemon
    queue.start()
    ws.let_go("exp1")
    ws.until_state("exp1", "succeeded")

    ws.do("start", "exp4,exp5", "0,0")
    ws.until_running("exp4")
    left = sessions_of(ws, "exp2", "exp3", "exp4")
    until_sessions_exist(ws, left)
    os.kill(ws.tmux.server(), signal.SIGKILL)
    queue.kill9()
    queue.start()
    until_sessions_exist(ws, left)
    assert {config: task["state"] for config, task in ws.tasks().items()} == {
        "exp1": "succeeded", "exp2": "running", "exp3": "running", "exp4": "running", "exp5": "queued",
    }  # fmt: skip
    assert not any(map(is_gone, pids[1:]))

    ws.let_go("exp2", "exp3", "exp4", "exp5")
    rows = ws.until_over()
    assert {(row["state"], row["attempt"]) for row in rows.values()} == {("completed", 1)}
    for entries in (ws.starts(), ws.ends()):
        assert sorted(each["config"] for each in entries) == [*CONFIGS, "exp4", "exp5"]
    assert ws.markers() == {*CONFIGS, "exp4", "exp5"}
    assert ws.scheduler_log().count(" completed\n") == 5


VICTIMS: dict[str, Callable[[Workspace], int]] = {
    "program": lambda ws: ws.program("exp"),
    "runner": lambda ws: ws.runner("exp"),
    "keeper": lambda ws: ws.keeper("exp"),
}


@pytest.mark.parametrize("victim", some(VICTIMS, 2))
def test_a_task_is_retried_if_configured_after_a_kill_of_its(
    victim: str, workspaces: Workspaces, own_queue: QueueUnderTest
) -> None:
    again = workspaces.make("again", auto_restart_failed=True, max_retries=1)
    once = workspaces.make("once")
    for ws in (again, once):
        ws.add_gated("exp")
        ws.do("start")
        ws.until_running("exp")
    programs = [ws.program("exp") for ws in (again, once)]
    for pid in {VICTIMS[victim](ws) for ws in (again, once)}:
        kill9(pid)

    once.until_state("exp", "failed")
    again.until_started("exp", times=2)
    until(lambda: all(map(is_gone, programs)), "the end of the programs without a runner")
    assert again.tasks()["exp"]["attempt"] == 2
    # In the session of the first attempt, which still shows that attempt's result.
    again.tmux.wait_to_see(again.rows()["exp"]["session"], "at the gate")
    again.let_go("exp")
    assert again.until_over()["exp"]["state"] == "completed"
    assert (len(again.starts()), len(again.ends()), again.markers()) == (2, 1, {"exp"})
    until(lambda: not list((own_queue.home / "sessions").iterdir()), "the end of the sockets")
    row = once.rows()["exp"]
    assert (row["state"], row["attempt"], once.markers()) == ("failed", 1, set())
    assert len(once.starts()) == 1
