"""`gpuyard workspace` and its other names as a command line: help, mistakes, what is printed, and exit statuses."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuyard.connect.daemon_lock import running_pid
from gpuyard.connect.fast_http import connect
from gpuyard.recipes.workspace.create_workspace import init
from gpuyard.recipes.workspace.task_names import workspace_tag
from tests.fakes.queue_command import GPUYARD, run, run_on_terminal
from tests.integration.queue_fixture import end_leftovers, until

BIN = Path(sys.executable).parent
TRAIN = """
import sys
name = sys.argv[2]
print("training", name, flush=True)
if "gated" in name:
    open("gate").read()
sys.exit("broken" in name)
"""
SETTINGS = """\
task_name: TASK
sessions: none
startup_delay: 0
command_delay: 0
log_dir: logs
env: {API_TOKEN: s3cret, WHO: me}
"""


@pytest.fixture
def workspace(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One that is made, in the current directory, with the queue it needs."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    folder = own_home.parent / "sweep"
    init(folder, force=False)
    (folder / "scheduler_config.yml").write_text(SETTINGS)
    (folder / "train.py").write_text(TRAIN)
    os.mkfifo(folder / "gate")
    monkeypatch.chdir(folder)
    yield folder
    end_leftovers(own_home)


def add_configs(workspace: Path, *names: str) -> None:
    for name in names:
        (workspace / "configs" / f"{name}.yml").write_text("lr: 1\n")


def scheduler(*words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    script = "./scheduler.sh" if cwd is None else str(Path.cwd() / "scheduler.sh")
    return subprocess.run([script, *words], capture_output=True, text=True, timeout=90, check=False, cwd=cwd)


def ok(*words: str) -> str:
    result = run("workspace", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def states() -> dict[str, str]:
    return {task["config"]: task["state"] for task in json.loads(ok("status", "--json"))["tasks"]}


def wait_over() -> None:
    run("wait", "--timeout", "90s")  # and not by looking again and again, which takes the machine from what runs
    assert json.loads(ok("status", "--json"))["over"]


def wait_for_state(config: str, state: str) -> None:
    """As the queue has it."""
    tag = workspace_tag(Path.cwd())
    with closing(connect(start=False)) as client:

        def is_so() -> bool:
            tasks = client.request("GET", "/tasks", {"tag": tag})["tasks"]
            return any((task["config"], task["state"]) == (config, state) for task in tasks)

        until(is_so, f"{config} {state}")


def let_go(workspace: Path) -> None:
    (workspace / "gate").write_text("go\n")


# Help


def test_help_is_the_same_by_every_way_of_asking_and_names_every_command(workspace: Path) -> None:
    told = ok("help")
    assert ok() == ok("--help") == ok("-h") == told
    for words in ([], ["help"], ["--help"]):
        assert scheduler(*words).stdout == told
    for command in ("start", "status", "stop", "kill-all", "config", "help", "init"):
        assert f"\n  {command}" in told
    assert "Exit status:" in told
    assert max(map(len, told.splitlines())) <= 80


def test_help_shows_what_to_type_where_one_is(workspace: Path, tmp_path: Path) -> None:
    assert ok("help").startswith("Usage: ./scheduler.sh COMMAND\n")
    (tmp_path / "elsewhere").mkdir()
    elsewhere = scheduler("help", cwd=tmp_path / "elsewhere").stdout
    assert elsewhere.startswith(f"Usage: {workspace}/scheduler.sh COMMAND\n")
    other = ok("--config", "mine.yml", "help")
    assert other.startswith(f"Usage: gpuyard workspace --config {workspace}/mine.yml COMMAND\n")


def test_help_works_where_there_is_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = ok()
    assert told.startswith("Usage: gpuyard workspace COMMAND\n")
    assert "scheduler.sh status" not in told


# Mistakes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("strat",), "did you mean `start`?"),
        (("frobnicate",), "commands: help"),
        (("start", "a.yml", "0", "1"), "separate names with commas: ./scheduler.sh start"),
        (("start", "-rf $(reboot).yml"), "there is no config '-rf $(reboot).yml'"),
        (("start", "--", "--rerun"), "there is no config '--rerun'"),
        (("status", "--json", "--watch"), "leave one of them out"),
        (("--workspace", "", "status"), "a path is empty"),
        (("--workspace", "no such folder", "status"), "is not a workspace"),
        (("--config", "no such file", "status"), "no such file"),
        (("init", "."), "--force"),
        (("stop", "it"), "unexpected extra argument"),
    ],
)
def test_a_mistake_is_told_with_what_to_type_instead(workspace: Path, words: tuple[str, ...], told: str) -> None:
    add_configs(workspace, "exp1")
    result = run("workspace", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert told in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_in_the_configuration_names_file_line_and_key(workspace: Path) -> None:
    (workspace / "scheduler_config.yml").write_text("task_name: TASK\nmax_job_per_gpu: 3\n")
    result = scheduler("status")
    assert result.returncode == 2
    assert "scheduler_config.yml:2" in result.stderr
    assert "max_jobs_per_gpu" in result.stderr


# Making one


def test_init_says_what_it_made_what_it_kept_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = ok("init", "my experiment")
    assert "created  my experiment/scheduler.sh\n" in made
    assert "To start them:  './my experiment/scheduler.sh' start\n" in made
    (tmp_path / "my experiment/scheduler.sh").write_text("#!/bin/sh\n")
    renewed = ok("init", "my experiment", "--force")
    assert "replaced my experiment/scheduler.sh; backup: scheduler.sh.bak\n" in renewed
    assert "kept     my experiment/configs\n" in renewed


# What is set


def test_config_shows_each_value_with_where_it_came_from_and_no_value_of_env(workspace: Path) -> None:
    lines = ok("config").splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert rows["task_name"].split() == ["TASK", "scheduler_config.yml:1"]
    assert rows["max_jobs_per_gpu"].split() == ["2", "default"]
    assert rows["env"].split() == ["API_TOKEN,", "WHO", "scheduler_config.yml:6"]
    starts = {line.rindex("  default") for line in lines if line.startswith(("gpu_count", "max_retries", "engine"))}
    assert len(starts) == 1


def test_config_in_json_has_typed_values_and_no_value_of_env(workspace: Path) -> None:
    answer = json.loads(ok("config", "--json"))
    assert (answer["workspace"], answer["file"]) == (str(workspace), f"{workspace}/scheduler_config.yml")
    settings: dict[str, dict[str, Any]] = answer["settings"]
    assert settings["max_jobs_per_gpu"] == {"value": 2, "from": "default"}
    assert settings["startup_delay"] == {"value": 0.0, "from": "scheduler_config.yml:3"}
    assert settings["env"]["value"] == ["API_TOKEN", "WHO"]


def test_another_configuration_may_be_named(workspace: Path) -> None:
    (workspace / "other.yml").write_text("task_name: OTHER\n")
    assert "OTHER" in ok("--config", "other.yml", "config")


# A sweep as the command line tells it


def test_start_says_what_it_started_and_how_to_look_and_a_second_one_has_nothing_to_do(workspace: Path) -> None:
    add_configs(workspace, "exp1", "exp2")
    first = scheduler("start", "exp1.yml,exp2.yml", "1,0")
    assert first.returncode == 0
    assert "exp1  job 1, GPU 1\nexp2  job 2, GPU 0\n" in first.stdout
    assert "./scheduler.sh status\n" in first.stdout
    wait_over()
    again = scheduler("start")
    assert again.returncode == 0
    assert "exp1  skipped: completed: out/exp1_completed.txt exists\n" in again.stdout
    assert "Nothing to do" in again.stdout
    assert "./scheduler.sh start --rerun\n" in again.stdout
    rerun = scheduler("start", "exp1", "--rerun")
    assert rerun.stdout.startswith("exp1  job 3\n")


def test_a_config_that_is_refused_is_told_with_the_reason_and_the_others_start(workspace: Path) -> None:
    add_configs(workspace, "exp1", "-exp2")
    result = scheduler("start", "-exp2.yml,exp1.yml", "0,9")
    assert result.returncode == 2
    started, refused = result.stdout.splitlines()[:2]
    assert started == "-exp2  job 1, GPU 0"
    assert refused.startswith("exp1   refused: there is no GPU '9'")
    wait_over()
    assert states() == {"-exp2": "completed", "exp1": "not started"}


def test_status_shows_a_table_that_fits_the_terminal(workspace: Path) -> None:
    add_configs(workspace, "exp1", "a-long-name-that-is-cut-somewhere-in-the-middle")
    for columns in (120, 80, 40):
        lines = run_on_terminal("workspace", "status", columns=columns).splitlines()
        plain = [line.replace("\x1b[0m", "") for line in lines]
        assert any("CONFIG" in line for line in plain)
        assert any("0 of 2 done" in line for line in plain)
        assert "\x1b[1m" in "".join(lines)


def test_status_without_colour_is_the_same_without_orders(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_configs(workspace, "exp1")
    monkeypatch.setenv("NO_COLOR", "1")
    told = run_on_terminal("workspace", "status", columns=80)
    assert "\x1b" not in told
    assert "· not started" in told


def test_status_in_json_is_one_object_and_nothing_else(workspace: Path) -> None:
    add_configs(workspace, "exp1")
    answer = json.loads(ok("status", "--json"))
    assert answer["counts"] == {
        "total": 1, "completed": 0, "running": 0, "waiting": 0, "failed": 0, "not_started": 1,
    }  # fmt: skip
    assert (answer["workspace"], answer["task_name"], answer["over"]) == (str(workspace), "TASK", True)
    assert answer["tasks"][0]["config"] == "exp1"


def test_a_watch_in_a_pipe_tells_each_change_and_fails_where_a_task_has(workspace: Path) -> None:
    add_configs(workspace, "broken", "gated")
    ok("start")
    wait_for_state("broken", "failed")
    assert states()["broken"] == "failed"
    with subprocess.Popen([*GPUYARD, "workspace", "status", "--watch"], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("0 of 2 done · 1 running · 1 failed · ")
        let_go(workspace)
        *_, last = watch.stdout.read().splitlines()
    assert last.startswith("1 of 2 done · 1 failed: gated completed")
    assert watch.returncode == 1


def test_a_watch_on_a_terminal_stays_in_place_and_leaves_the_last_picture(workspace: Path) -> None:
    add_configs(workspace, "exp1")
    ok("start")
    told = run_on_terminal("workspace", "status", "--watch", columns=80)
    assert told.rstrip().endswith("\x1b[?25h")  # the cursor is there again
    last = told.rpartition("TASK")[2]
    assert "✓ completed" in last
    assert "1 of 1 done" in last


@pytest.mark.usefixtures("unmeasured")  # one that is interrupted while it is measured can stand still for ever
def test_ctrl_c_ends_the_watching_and_nothing_else(workspace: Path) -> None:
    add_configs(workspace, "gated")
    ok("start")
    with subprocess.Popen([*GPUYARD, "workspace", "status", "--watch"], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(90) == 0
    wait_for_state("gated", "running")
    assert states()["gated"] == "running"
    let_go(workspace)


def test_stop_and_kill_all_say_what_they_did(workspace: Path) -> None:
    (workspace / "scheduler_config.yml").write_text(f"{SETTINGS}max_jobs_per_gpu: 1\ngpu_count: 1\n")
    add_configs(workspace, "gated1", "gated2", "gated3")
    ok("start")
    wait_for_state("gated1", "running")
    assert states()["gated1"] == "running"
    stopped = scheduler("stop")
    assert stopped.stdout.splitlines() == [
        "Stopped: 1 task finishes; 2 waiting tasks will not start.",
        "To continue:  ./scheduler.sh start",
    ]
    killed = scheduler("kill-all")
    assert (killed.returncode, killed.stdout) == (0, "1 task ended, 0 sessions closed.\n")
    assert set(states().values()) == {"stopped"}


# For those who come from shell schedulers


def shell(name: str, *words: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([BIN / name, *words], capture_output=True, text=True, timeout=90, check=False, cwd=cwd)


def test_setup_workspace_makes_a_workspace_and_with_force_makes_it_anew(tmp_path: Path) -> None:
    assert shell("setup_workspace.sh", "mine", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine/scheduler.sh").exists()
    again = shell("setup_workspace.sh", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr
    for words in (("mine", "--force"), ("--force", "mine")):
        assert shell("setup_workspace.sh", *words, cwd=tmp_path).returncode == 0


def test_scheduler_main_runs_any_command_with_this_configuration_in_that_workspace(tmp_path: Path) -> None:
    shell("setup_workspace.sh", "mine", cwd=tmp_path)
    (tmp_path / "other.yml").write_text("task_name: OTHER\n")
    told = shell("scheduler_main.sh", "other.yml", "mine", "config", cwd=tmp_path)
    assert told.returncode == 0
    assert told.stdout.startswith(f"{tmp_path}/mine, by {tmp_path}/other.yml\n")
    mistake = shell("scheduler_main.sh", "other.yml", "mine", "strat", cwd=tmp_path)
    assert mistake.returncode == 2
    assert "did you mean `start`?" in mistake.stderr


@pytest.mark.parametrize(
    "words",
    [("setup_workspace.sh",), ("setup_workspace.sh", "a", "b"), ("setup_workspace.sh", "--frce"),
     ("scheduler_main.sh",), ("scheduler_main.sh", "a", "b")],
)  # fmt: skip
def test_another_use_of_the_shell_names_is_answered_with_how_to_use_them(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    result = shell(*words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"usage: {words[0]} ")
    asked = shell(words[0], "--help", cwd=tmp_path)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout == result.stderr


def test_what_is_only_read_starts_no_daemon(workspace: Path, own_home: Path) -> None:
    ok("help")
    ok("config")
    assert running_pid(own_home / "daemon.lock") is None
