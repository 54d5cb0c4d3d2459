"""A sweep: its GPUs, sessions and status; repeated starts, stop, kill, retries, and kills of what runs it."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import open_ledger
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, is_gone
from tests.integration.workspace_fixture import Workspace, Workspaces, kill9, until
from tests.scale import some

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]


def states(ws: Workspace) -> dict[str, str]:
    return {config: row["state"] for config, row in ws.rows().items()}


# Repeated starts


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


def seen_devices(ws: Workspace) -> dict[str, str]:
    """Return the value of CUDA_VISIBLE_DEVICES in each program."""
    return {each["config"]: each["env"]["CUDA_VISIBLE_DEVICES"] for each in ws.starts()}


def is_always_balanced(ws: Workspace, gpus: int) -> bool:
    """Return whether, after every start, the numbers of tasks of the GPUs differ by at most one."""
    counts = [0] * gpus
    for task in sorted(ws.tasks().values(), key=lambda task: (task["started_at"] or "~", task["id"])):
        for index in task["gpu_labels"]:
            counts[int(index)] += 1
        if max(counts) - min(counts) > 1:
            return False
    return True


def test_configs_are_spread_evenly_and_a_gpu_that_finishes_early_takes_the_next_ones(workspace: Workspace) -> None:
    configs = [f"exp{number}" for number in range(1, 7)]
    workspace.add_gated(*configs)
    assert "exp6  job 6\n" in workspace.do("start")
    workspace.until_running(*configs[:4])
    assert workspace.per_gpu() == {0: 2, 1: 2}
    shares = [share for lease in open_ledger().leases() for share in lease.shares]
    assert Counter(share.memory_mb for share in shares) == {24 * 1024 / 2: 4}
    assert is_always_balanced(workspace, 2)
    on_one = [config for config, task in workspace.tasks().items() if task["gpu_labels"] == ["1"]]
    workspace.let_go(*on_one)
    workspace.until_running("exp5", "exp6")
    assert workspace.per_gpu() == {0: 2, 1: 2}
    devices = seen_devices(workspace)
    assert len(set(devices.values())) == 2
    assert devices["exp5"] == devices["exp6"] == devices[on_one[0]]
    names = {config: row["session"] for config, row in workspace.rows().items()}
    assert {config: [name[-1]] for config, name in names.items()} == {
        config: task["gpu_labels"] for config, task in workspace.tasks().items()
    }
    assert set(names.values()) | {"T_scheduler"} == workspace.session_names()
    workspace.let_go(*set(configs) - set(on_one))
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}
    assert workspace.markers() == set(configs)
    assert Counter(each["config"] for each in workspace.starts()) == dict.fromkeys(configs, 1)


def test_selected_configs_run_on_their_given_gpus(workspace: Workspace) -> None:
    workspace.add_gated("heavy", "light", "test", "other")
    output = workspace.do("start", "heavy.yml,light.yml,test.yml", "1,0,0")
    assert "heavy  job 1, GPU 1\nlight  job 2, GPU 0\ntest   job 3, GPU 0\n" in output
    workspace.until_running("heavy", "light", "test")
    assert {config: task["gpu_labels"] for config, task in workspace.tasks().items()} == {
        "heavy": ["1"], "light": ["0"], "test": ["0"],
    }  # fmt: skip
    assert workspace.session_names() == {"T_heavy_gpu1", "T_light_gpu0", "T_test_gpu0", "T_scheduler"}
    assert workspace.rows()["other"]["state"] == "not started"
    # The third task of one GPU waits, though the other GPU has free memory.
    workspace.do("start", "other", "0")
    full = "limit reached: at most 2 tasks of its workspace on one GPU at a time"
    until(lambda: workspace.tasks()["other"]["reason"] == full, "its reason")
    workspace.let_go("light")
    workspace.until_running("other")
    assert workspace.tasks()["other"]["gpu_labels"] == ["0"]
    workspace.let_go("heavy", "test", "other")
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}


@pytest.mark.full
def test_three_workspaces_with_the_same_names_do_not_interfere(workspaces: Workspaces) -> None:
    shared = str(workspaces.place / "logs of all")
    one, two, three = (workspaces.make(name, log_dir=shared, vram="3G") for name in ("one", "two", "three"))
    for number, ws in enumerate((one, two, three)):
        ws.add_gated("a", "b", seed=number)
        ws.do("start")
        ws.until_running("a", "b")
    names = [ws.session_names() for ws in (one, two, three)]
    assert len(set.union(*names)) == sum(map(len, names)) == 9
    logs = {row["log"] for ws in (one, two, three) for row in ws.rows().values()}
    assert len(logs) == 6
    assert {Path(log).parent for log in logs} == {Path(shared) / "train_logs"}

    others = [ws.program(config) for ws in (two, three) for config in ("a", "b")]
    assert one.do("kill-all") == "2 tasks ended, 3 sessions closed.\n"
    assert [row["state"] for row in one.rows().values()] == ["stopped", "stopped"]
    assert one.session_names() == set()
    assert [two.session_names(), three.session_names()] == names[1:]

    three.add_gated("c", "d", seed=2)
    assert "2 tasks finish" in two.do("stop")
    three.do("start")
    three.until_running("c", "d")
    assert not any(map(is_gone, others))

    two.let_go("a", "b")
    three.let_go("a", "b", "c", "d")
    assert {row["state"] for row in two.until_over().values()} == {"completed"}
    assert {row["state"] for row in three.until_over().values()} == {"completed"}
    assert (one.markers(), two.markers(), three.markers()) == (set(), {"a", "b"}, {"a", "b", "c", "d"})
    assert two.marker("a").read_text() == two.marker("b").read_text() != three.marker("a").read_text()
    for ws in (two, three):
        for row in ws.rows().values():
            assert "epoch 2: loss" in Path(row["log"]).read_text()


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
    assert (status["over"], status["left_s"], status["task_name"]) == (False, None, "T")
    assert status["workspace"] == str(workspace.folder)
    assert status["why"] == "exp3 waits: limit reached: at most 2 tasks of its workspace on one GPU at a time"
    assert status["why"] in workspace.do("status")
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
