"""The `hook` of a workspace: it runs before and after each task, even without a daemon."""

import os
from pathlib import Path

from tests.executables import write_executable
from tests.integration.workspace_fixture import Workspace, Workspaces, make_tmux, make_workspace, make_workspaces, until  # noqa: F401 - fixtures are found where they are named

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
