"""`gpuyard workspace` and its aliases on the command line: help, errors, output and exit statuses."""

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

from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import connect
from gpuyard.recipes.workspace.workspace_files import init, workspace_tag
from tests.fakes.queue_command import GPUYARD, run, run_here, run_on_terminal
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
    """A new workspace, which is the current directory, with a queue for its tasks."""
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


def scheduler(*arguments: str, script: str = "./scheduler.sh") -> "subprocess.CompletedProcess[str]":
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=90, check=False)


def ok(*arguments: str) -> str:
    result = run_here("workspace", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def states() -> dict[str, str]:
    return {task["config"]: task["state"] for task in json.loads(ok("status", "--json"))["tasks"]}


def wait_for_the_end() -> None:
    run("wait", "--timeout", "90s")  # one blocking call: polling would take CPU from the tasks
    assert json.loads(ok("status", "--json"))["over"]


def wait_for_state(config: str, state: str) -> None:
    """Wait for a state of the task's job in the queue."""
    tag = workspace_tag(Path.cwd())
    with closing(connect(start=False)) as client:

        def is_so() -> bool:
            tasks = client.request("GET", "/tasks", {"tag": tag})["tasks"]
            return any((task["config"], task["state"]) == (config, state) for task in tasks)

        until(is_so, f"{config} {state}")


def open_gates(workspace: Path) -> None:
    (workspace / "gate").write_text("go\n")


# Help


def test_every_form_of_help_lists_every_command_with_examples_for_the_current_directory(
    workspace: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = ok("help")
    assert ok() == ok("--help") == ok("-h") == scheduler("--help").stdout == scheduler().stdout == output
    assert output.startswith("Usage: ./scheduler.sh COMMAND\n")
    for command in ("start", "status", "stop", "kill-all", "config", "help", "init"):
        assert f"\n  {command}" in output
    assert "Exit status:" in output
    assert max(map(len, output.splitlines())) <= 80
    other = ok("--config", "mine.yml", "help")
    assert other.startswith(f"Usage: gpuyard workspace --config {workspace}/mine.yml COMMAND\n")
    script = workspace / "scheduler.sh"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert scheduler("help", script=str(script)).stdout.startswith(f"Usage: {script} COMMAND\n")
    outside = ok()
    assert outside.startswith("Usage: gpuyard workspace COMMAND\n")
    assert "scheduler.sh status" not in outside
    assert running_pid(own_home / "daemon.lock") is None


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("strat",), "did you mean `start`?"),
        (("frobnicate",), "it can be start"),
        (("start", "exp1.yml", "0", "1"), "separate names with commas: ./scheduler.sh start"),
        (("start", "-rf $(reboot).yml"), "there is no config '-rf $(reboot).yml'"),
        (("start", "--", "--rerun"), "there is no config '--rerun'"),
        (("--workspace", "", "status"), "a path is empty"),
        (("--workspace", "no such folder", "status"), "is not a workspace"),
        (("--config", "no such file", "status"), "no such file"),
        (("init", "."), "--force"),
        (("stop", "it"), "unexpected extra argument"),
    ],
)
def test_an_error_names_the_correct_form(workspace: Path, arguments: tuple[str, ...], message: str) -> None:
    add_configs(workspace, "exp1")
    result = run_here("workspace", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_with_json_is_an_object_on_standard_output(workspace: Path) -> None:
    result = run("workspace", "status", "--json", "--watch")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"]["code"] == "usage"
    assert "leave one of them out" in result.stderr


# Initialization


def test_init_lists_new_and_kept_files_and_the_next_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = ok("init", "my experiment")
    assert "created  my experiment/scheduler.sh\n" in made
    assert "To start them:  './my experiment/scheduler.sh' start\n" in made
    (tmp_path / "my experiment/scheduler.sh").write_text("#!/bin/sh\n")
    renewed = ok("init", "my experiment", "--force")
    assert "replaced my experiment/scheduler.sh; backup: scheduler.sh.bak\n" in renewed
    assert "kept     my experiment/configs\n" in renewed


def test_an_update_says_what_it_read_and_whether_start_would_accept_it(workspace: Path) -> None:
    add_configs(workspace, "exp1", "exp2")
    (workspace / "out/exp2_completed.txt").write_text("done")
    lines = ok("init", ".", "--force").splitlines()
    assert lines[-2:] == [
        "settings task_name, sessions, startup_delay, command_delay, log_dir, env",
        "`./scheduler.sh start` would accept it: 2 configs, 1 of them completed.",
    ]
    (workspace / "scheduler_config.yml").write_text(f"{SETTINGS}gpu_memory_limit: 3\nmax_job_per_gpu: 2\n")
    lines = ok("init", ".", "--force").splitlines()
    assert "unknown  gpu_memory_limit, max_job_per_gpu" in lines
    assert "`./scheduler.sh start` would refuse it:" in lines
    assert lines[-1].endswith("there is no key `max_job_per_gpu` (did you mean `max_jobs_per_gpu`?)")
    (workspace / "scheduler_config.yml").write_text(f"{SETTINGS}script_path: gone.py\n")
    lines = ok("init", ".", "--force").splitlines()
    assert lines[-2] == f"  script_path: there is no script {workspace}/gone.py"


# Configuration


def test_config_shows_each_value_with_its_source_and_hides_values_of_env(workspace: Path, own_home: Path) -> None:
    lines = ok("config").splitlines()
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[1:]}
    assert rows["task_name"].split() == ["TASK", "scheduler_config.yml:1"]
    assert rows["max_jobs_per_gpu"].split() == ["2", "default"]
    assert rows["env"].split() == ["API_TOKEN,", "WHO", "scheduler_config.yml:6"]
    starts = {line.rindex("  default") for line in lines if line.startswith(("gpu_count", "max_retries", "engine"))}
    assert len(starts) == 1
    answer = json.loads(ok("config", "--json"))
    assert (answer["workspace"], answer["file"]) == (str(workspace), f"{workspace}/scheduler_config.yml")
    settings: dict[str, dict[str, Any]] = answer["settings"]
    assert settings["max_jobs_per_gpu"] == {"value": 2, "from": "default"}
    assert settings["startup_delay"] == {"value": 0.0, "from": "scheduler_config.yml:3"}
    assert settings["env"]["value"] == ["API_TOKEN", "WHO"]
    assert running_pid(own_home / "daemon.lock") is None


# A sweep


def test_start_lists_its_tasks_and_sessions_and_a_second_start_does_nothing(workspace: Path) -> None:
    add_configs(workspace, "exp1", "exp2")
    first = scheduler("start", "exp1.yml,exp2.yml", "1,0")
    assert first.returncode == 0
    assert "exp1  job 1, GPU 1\nexp2  job 2, GPU 0\n" in first.stdout
    assert "./scheduler.sh status\n" in first.stdout
    wait_for_the_end()
    again = scheduler("start")
    assert again.returncode == 0
    assert "exp1  skipped: completed: out/exp1_completed.txt exists\n" in again.stdout
    assert "Nothing to do" in again.stdout
    assert "./scheduler.sh start --rerun\n" in again.stdout
    rerun = scheduler("start", "exp1.yml", "exp2.yml", "--rerun")
    assert rerun.stdout.startswith("exp1  job 3\nexp2  job 4\n")
    assert f"logs: {workspace}/logs/train_logs/CONFIG.log\n" in rerun.stdout
    wait_for_the_end()
    assert f"logs: {workspace}/logs/train_logs/CONFIG.log\n" in ok("status")


def test_a_rejected_config_is_reported_with_its_reason_and_the_others_start(workspace: Path) -> None:
    add_configs(workspace, "exp1", "-exp2")
    result = scheduler("start", "-exp2.yml,exp1.yml", "0,9")
    assert result.returncode == 2
    started, refused = result.stdout.splitlines()[:2]
    assert started == "-exp2  job 1, GPU 0"
    assert refused.startswith("exp1   refused: there is no GPU '9'")
    wait_for_the_end()
    assert states() == {"-exp2": "completed", "exp1": "not started"}


def test_status_shows_a_table_that_fits_the_terminal_and_watch_updates_it_in_place(workspace: Path) -> None:
    add_configs(workspace, "exp1", "a-long-name-that-is-cut-somewhere-in-the-middle")
    for columns in (120, 80, 40):
        lines = run_on_terminal("workspace", "status", columns=columns).splitlines()
        plain = [line.replace("\x1b[0m", "") for line in lines]
        assert any("CONFIG" in line for line in plain)
        assert any("0 of 2 done" in line for line in plain)
        assert "\x1b[1m" in "".join(lines)
    ok("start", "exp1")
    output = run_on_terminal("workspace", "status", "--watch", columns=80)
    assert "\x1b[?25l" not in output  # the cursor stays visible
    last = output.rpartition("TASK")[2]
    assert "✓ completed" in last
    assert "1 of 2 done" in last


@pytest.mark.usefixtures("unmeasured")  # an interrupt under the coverage tracer can hang the process
def test_watch_in_a_pipe_prints_each_change_and_fails_if_a_task_failed_and_ctrl_c_ends_only_it(workspace: Path) -> None:
    add_configs(workspace, "broken", "gated")
    ok("start")
    wait_for_state("broken", "failed")
    command = [*GPUYARD, "workspace", "status", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        watch.stdout.readline()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(90) == 0
    assert states() == {"broken": "failed", "gated": "running"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("0 of 2 done · 1 running · 1 failed · ")
        open_gates(workspace)
        *_, last = watch.stdout.read().splitlines()
    assert last.startswith("1 of 2 done · 1 failed: gated completed")
    assert watch.returncode == 1


# Commands of earlier shell schedulers


def shell(name: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([BIN / name, *arguments], capture_output=True, text=True, timeout=90, check=False, cwd=cwd)


def test_setup_workspace_makes_a_workspace_and_replaces_it_with_force(tmp_path: Path) -> None:
    assert shell("setup_workspace.sh", "mine", cwd=tmp_path).returncode == 0
    assert (tmp_path / "mine/scheduler.sh").exists()
    again = shell("setup_workspace.sh", "mine", cwd=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr
    for arguments in (("mine", "--force"), ("--force", "mine")):
        assert shell("setup_workspace.sh", *arguments, cwd=tmp_path).returncode == 0


def test_scheduler_main_runs_a_command_with_a_given_configuration_and_workspace(tmp_path: Path) -> None:
    shell("setup_workspace.sh", "mine", cwd=tmp_path)
    (tmp_path / "other.yml").write_text("task_name: OTHER\n")
    result = shell("scheduler_main.sh", "other.yml", "mine", "config", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith(f"{tmp_path}/mine, from {tmp_path}/other.yml\n")
    mistake = shell("scheduler_main.sh", "other.yml", "mine", "strat", cwd=tmp_path)
    assert mistake.returncode == 2
    assert "did you mean `start`?" in mistake.stderr


def test_wrong_arguments_of_the_shell_commands_print_their_usage(tmp_path: Path) -> None:
    for program, *wrong in (("setup_workspace.sh", (), ("a", "b"), ("--frce",)), ("scheduler_main.sh", (), ("a", "b"))):
        asked = shell(program, "--help", cwd=tmp_path)
        assert (asked.returncode, asked.stderr) == (0, "")
        assert asked.stdout.startswith(f"usage: {program} ")
        results = [shell(program, *arguments, cwd=tmp_path) for arguments in wrong]
        assert [(each.returncode, each.stdout, each.stderr) for each in results] == [(2, "", asked.stdout)] * len(wrong)
