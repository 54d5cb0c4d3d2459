"""The effect of the keys of a workspace and of a task's own YAML."""

import os
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.executables import write_executable
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.workspace_fixture import Workspace, Workspaces, until

pytestmark = pytest.mark.needs("tmux")

ROUNDED_S = 0.002  # times are given in milliseconds


def environment_of(ws: Workspace, config: str) -> Any:
    return ws.starts(config)[-1]["env"]


# Keys of the workspace


def test_every_task_gets_the_settings_of_the_workspace(workspace: Workspace, own_queue: QueueUnderTest) -> None:
    workspace.configure(
        vram="5G", env={"ALPHA": "1e-3", "BETA": "$(touch pwned) yes"}, priority=7, timeout="2h", gpu_count=1,
        cuda_visible_devices_var="MY_DEVICES", worker_prefix="W", max_jobs_per_gpu=3, scheduler_session_suffix="-all",
    )  # fmt: skip
    workspace.add_gated("exp1", "exp2")
    workspace.do("start")
    workspace.until_running("exp1", "exp2")
    assert workspace.per_gpu() == {0: 2}
    job = own_queue.job(1)
    assert (job["priority"], job["time_limit_s"], job["vram_mb"]) == (7, 7200.0, 5 * 1024)
    assert workspace.tasks()["exp1"]["reserved_mb"] == 5 * 1024
    environment = environment_of(workspace, "exp1")
    assert environment["MY_DEVICES"] == "0"
    assert "CUDA_VISIBLE_DEVICES" not in environment, "the other variable is set instead"
    assert (environment["ALPHA"], environment["BETA"]) == ("1e-3", "$(touch pwned) yes")
    assert workspace.session_names() == {"W_exp1_gpu0", "W_exp2_gpu0", "T-all"}
    workspace.let_go("exp1", "exp2")
    workspace.until_over()


def test_starts_have_the_configured_interval_and_the_notify_command_runs_at_the_end(workspace: Workspace) -> None:
    least_s = 0.8
    notify = ["sh", "-c", 'echo "$GPUYARD_TASK_NAME: $GPUYARD_SUMMARY" >> notice']
    workspace.configure(startup_delay=least_s, sessions="none", notify=notify)
    workspace.add("exp1", "exp2")
    workspace.add("exp3", fails=1)
    workspace.do("start")
    notice = workspace.folder / "notice"
    until(lambda: notice.exists() and notice.read_text().endswith("\n"), "the notice")
    assert notice.read_text() == "T: 2 of 3 completed, 1 failed\n"
    started = sorted(datetime.fromisoformat(task["started_at"]).timestamp() for task in workspace.tasks().values())
    assert len(started) == 3
    assert all(later - earlier >= least_s - ROUNDED_S for earlier, later in pairwise(started)), started


# Keys of a task


def test_a_config_sets_the_needs_of_its_task(workspace: Workspace, own_queue: QueueUnderTest) -> None:
    workspace.configure(vram="2G", timeout="1h", env={"WHO": "all", "ALSO": "this"})
    workspace.add_gated("none", scheduler={"gpus": 0})
    workspace.add_gated("both", scheduler={"gpus": 2, "vram": "6G", "env": {"WHO": "me"}})
    workspace.add_gated("short", scheduler={"timeout": 1})
    workspace.do("start")
    workspace.until_running("none", "both")
    workspace.until_state("short", "failed")
    tasks = workspace.tasks()
    assert (tasks["none"]["gpu_labels"], tasks["both"]["gpu_labels"]) == ([], ["0", "1"])
    assert (tasks["both"]["reserved_mb"], tasks["short"]["reserved_mb"]) == (6 * 1024, 2 * 1024)
    assert environment_of(workspace, "none")["CUDA_VISIBLE_DEVICES"] == "-1"
    both = environment_of(workspace, "both")
    assert (both["CUDA_VISIBLE_DEVICES"], both["WHO"], both["ALSO"]) == ("0,1", "me", "this")
    assert {"T_none_cpu", "T_both_gpu0_1"} < workspace.session_names()
    assert own_queue.job(tasks["none"]["id"])["time_limit_s"] == 3600
    assert tasks["short"]["outcome"] == "timed-out"
    workspace.let_go("none", "both")
    assert {config: row["state"] for config, row in workspace.until_over().items()} == {
        "none": "completed", "both": "completed", "short": "failed",
    }  # fmt: skip


# Logs and sessions


@pytest.mark.full
def test_without_logging_only_the_queue_keeps_logs(workspace: Workspace) -> None:
    workspace.configure(enable_logging=False)
    workspace.add("exp1")
    workspace.do("start")
    row = workspace.until_over()["exp1"]
    assert row["state"] == "completed"
    assert row["last_line"].startswith("epoch 2: loss ")
    assert "epoch 1: loss" in Path(row["log"]).read_text()
    assert not (workspace.folder / "logs").exists()


def test_logs_in_a_linked_or_shared_folder_are_private(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "link").symlink_to("shared")
    workspace.configure(log_dir=str(tmp_path / "link"))
    workspace.add("exp1")
    workspace.do("start")
    workspace.until_over()
    log, scheduler_log = tmp_path / "shared/train_logs/exp1.log", tmp_path / "shared/T_scheduler.log"
    assert "epoch 2: loss" in log.read_text()
    first, *others = scheduler_log.read_text().splitlines()
    assert first == log.read_text().splitlines()[0] == f"# log of the workspace {workspace.tag}: {workspace.folder}"
    lines = [line.split(" ", 2)[2] for line in others]
    assert lines == ["exp1 queued as job 1", "exp1 started on gpu0 (job 1, attempt 1)", "exp1 completed"]
    assert [path.stat().st_mode & 0o777 for path in (log.parent, log, scheduler_log)] == [0o700, 0o600, 0o600]


def test_a_symbolic_link_at_the_path_of_a_log_is_not_followed(workspace: Workspace, tmp_path: Path) -> None:
    victim = tmp_path / "precious"
    victim.write_text("mine\n")
    (workspace.folder / "logs/train_logs").mkdir(parents=True)
    for name in ("train_logs/exp1.log", "T_scheduler.log"):
        (workspace.folder / "logs" / name).symlink_to(victim)
    workspace.add("exp1")
    workspace.do("start")
    row = workspace.until_over()["exp1"]
    assert (row["state"], victim.read_text()) == ("completed", "mine\n")
    assert "it is a symbolic link" in row["note"]


def test_a_missing_tmux_is_reported_and_everything_else_works(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.add_gated("exp1")
    workspace.add("exp2")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", without_tmux(tmp_path))
        started = workspace.scheduler("start")
        assert started.returncode == 0
        assert "gpuyard: tmux is not installed, so tasks have no sessions" in started.stderr
        workspace.until_running("exp1")
        assert workspace.do("kill-all").endswith(" ended, 0 sessions closed.\n")
        assert "exp1  job 3\n" in workspace.do("start")
        workspace.let_go("exp1")
        rows = workspace.until_over()
    assert {(row["state"], row["session"]) for row in rows.values()} == {("completed", None)}
    assert "epoch 2: loss" in workspace.log("exp1")


def without_tmux(place: Path) -> str:
    """Return PATH with a folder of links to all other programs in place of each folder that has tmux.

    Python's own folder stays as it is: through a link Python 3.14 does not find its environment.
    """
    folders = []
    for number, directory in enumerate(os.environ["PATH"].split(os.pathsep)):
        folder = Path(directory)
        if (folder / "tmux").exists():
            folder = place / f"bin{number}"
            folder.mkdir()
            for name in os.listdir(directory):
                if name != "tmux":
                    (folder / name).symlink_to(f"{directory}/{name}")
        folders.append(str(folder))
    return os.pathsep.join(folders)


FACTS = (
    "WORKSPACE", "TASK_NAME", "CONFIG_NAME", "CONFIG_PATH", "ATTEMPT", "GPUS", "LOG", "MARKER", "OUTCOME",
    "EXIT_STATUS",
)  # fmt: skip


def write_hook(workspace: Workspace, script: str) -> None:
    """Write `hooks/mine.sh` in the workspace, which the configuration names by its relative path."""
    hook = workspace.folder / "hooks/mine.sh"
    hook.parent.mkdir(exist_ok=True)
    write_executable(hook, f"#!/bin/sh\n{script}\n")


def hook_lines(workspace: Workspace) -> list[str]:
    path = workspace.folder / "hook-lines"
    return path.read_text().splitlines() if path.exists() else []


def test_a_hook_runs_before_and_after_each_task_with_variables_that_describe_it(workspace: Workspace) -> None:
    facts = "|".join(f"${{GPUYARD_{name}-}}" for name in FACTS)
    write_hook(workspace, f'echo "$1 $GPUYARD_PHASE $CUDA_VISIBLE_DEVICES|{facts}" >> hook-lines')
    workspace.configure(hook="hooks/mine.sh word", sessions="none", gpu_count=1, max_jobs_per_gpu=1)
    workspace.add("exp1")
    workspace.add("exp2", fails=1)
    workspace.do("start")
    workspace.until_over()
    folder = workspace.folder
    common = {
        name: f"|{folder}|T|{name}|{folder}/configs/{name}.yml|1|0|{folder}/logs/train_logs/{name}.log"
        f"|{folder}/out/{name}_completed.txt"
        for name in ("exp1", "exp2")
    }
    visible = workspace.starts("exp1")[0]["env"]["CUDA_VISIBLE_DEVICES"]
    assert hook_lines(workspace) == [
        f"word before {visible}{common['exp1']}||",
        f"word after {visible}{common['exp1']}|completed|0",
        f"word before {visible}{common['exp2']}||",
        f"word after {visible}{common['exp2']}|failed|1",
    ]


def test_a_task_whose_hook_before_it_fails_is_retried_like_a_failed_task(workspace: Workspace) -> None:
    write_hook(workspace, "[ $GPUYARD_ATTEMPT != 1 ] || exit 7")
    workspace.configure(hook="hooks/mine.sh", sessions="none", auto_restart_failed=True, max_retries=1)
    workspace.add("exp")
    workspace.do("start")
    row = workspace.until_over()["exp"]
    assert (row["state"], row["attempt"], len(workspace.starts())) == ("completed", 2, 1)

    workspace.configure(hook=["sh", "-c", "exit 7"], sessions="none")
    workspace.do("start", "--rerun")
    row = workspace.until_over()["exp"]
    why = "exit status 7: the hook before it failed with status 7, so it was not started"
    assert (row["state"], row["attempt"], row["note"]) == ("failed", 1, why)
    assert why in workspace.do("status")
    assert len(workspace.starts()) == 1


def test_a_hook_survives_a_kill_of_the_daemon(workspaces: Workspaces) -> None:
    workspace, queue = workspaces.make(), workspaces.queue
    gates = {phase: workspace.folder / f"gate-{phase}" for phase in ("before", "after")}
    for gate in gates.values():
        os.mkfifo(gate)
    write_hook(
        workspace, 'echo "$GPUYARD_PHASE begins" >> hook-lines; read x < gate-$GPUYARD_PHASE; echo "ends" >> hook-lines'
    )
    workspace.configure(hook="hooks/mine.sh", sessions="none")
    workspace.add("exp")
    workspace.do("start")
    for phase in ("before", "after"):
        until(lambda: hook_lines(workspace)[-1:] == [f"{phase} begins"], f"the hook {phase}")  # noqa: B023 - at once
        queue.kill9()
        open_gate(gates[phase])
        queue.start()
    row = workspace.until_over()["exp"]
    assert (row["state"], row["attempt"], row["note"]) == ("completed", 1, None)
    assert hook_lines(workspace) == ["before begins", "ends", "after begins", "ends"]


def open_gate(gate: Path) -> None:
    """Open the gate once the hook waits at it."""
    gate.write_text("go\n")
