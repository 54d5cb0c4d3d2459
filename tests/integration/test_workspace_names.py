"""Hostile names of configs, paths and settings are data: no shell or tmux ever interprets them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.executables import write_executable
from tests.integration.workspace_fixture import Workspace, Workspaces, make_tmux, make_workspace, make_workspaces  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]

CONFIGS = (
    "with  two spaces",
    "quo'te\"s",
    "$(touch pwned)",
    "`touch pwned`;touch pwned",
    "#(touch pwned)#{pane_id}",
    "-rf",
    "%d{gpu}{index}\\n:.=@1*?[a]~",
    "üñí日本🚀",
)
EVIL = "-ev'i\"l `touch pwned` $(touch pwned) #(touch pwned) #{pane_id} {gpu} %H;touch pwned ü🚀"
AS_TMUX_HOLDS_IT = re.compile(r"[\w-]+_gpu[01]")


def pwned(place: Path) -> list[Path]:
    """Return the files that an interpreted name would have created, in all directories where a shell may have run."""
    return [*place.rglob("pwned*"), *Path("/").glob("pwned*"), *Path.cwd().glob("pwned*")]


def test_configs_with_hostile_names_run(workspaces: Workspaces) -> None:
    ws = workspaces.make(max_jobs_per_gpu=4)
    ws.add_gated(*CONFIGS)
    started = ws.do("start")
    assert "skipped" not in started
    ws.until_running(*CONFIGS)
    rows = ws.rows()
    assert set(rows) == set(CONFIGS)
    names = {config: rows[config]["session"] for config in CONFIGS}
    assert {*names.values(), "T_scheduler"} == ws.session_names()
    assert len(set(names.values())) == len(CONFIGS)
    assert all(map(AS_TMUX_HOLDS_IT.fullmatch, names.values()))
    assert names["-rf"].startswith("T_-rf_gpu")
    assert names["$(touch pwned)"].startswith("T___touch_pwned_-")
    assert names["üñí日本🚀"].startswith("T_üñí日本_-")
    # With an attached terminal tmux draws the names.
    for config in ("#(touch pwned)#{pane_id}", "$(touch pwned)"):
        with workspaces.attached(names[config]) as person:
            person.read_until("at the gate")
    ws.let_go(*CONFIGS)
    rows = ws.until_over()
    assert {row["state"] for row in rows.values()} == {"completed"}
    assert ws.markers() == set(CONFIGS)
    for config in CONFIGS:
        assert ws.starts(config)[0]["words"] == ["--config_path", f"configs/{config}.yml"]
        assert "epoch 2: loss" in ws.log(config)
    assert ws.do("kill-all") == f"0 tasks ended, {len(CONFIGS) + 1} sessions closed.\n"
    assert pwned(workspaces.place) == []


def test_a_workspace_with_hostile_paths_and_settings_runs(workspaces: Workspaces) -> None:
    ws = workspaces.make(f"ws {EVIL}")
    work = ws.work_dir = ws.folder / f"work {EVIL}"
    script = work / f"-tr {EVIL}.py"
    work.mkdir()
    (ws.folder / "train.py").rename(script)
    python = ws.folder / f"py {EVIL}"
    write_executable(python, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    ws.configure(
        task_name=f"T {EVIL}", worker_prefix=f"W {EVIL}", work_dir=work.name, script_path=script.name,
        log_dir=f"logs {EVIL}", output_dir=f"out {EVIL}", config_dir=f"configs {EVIL}", env={"EVIL": EVIL},
        scheduler_session_suffix=EVIL, python_env=f"./{python.name}", notify=["touch", "--", f"notified {EVIL}"],
    )  # fmt: skip
    ws.add_gated(f"exp {EVIL}")
    (ws.folder / "configs").rename(ws.folder / f"configs {EVIL}")
    started = ws.do("start", f"exp {EVIL}.yml", "1")
    assert "tmux attach -t T_-ev_i_l_" in started
    ws.until_running(f"exp {EVIL}")
    row = ws.rows()[f"exp {EVIL}"]
    assert row["session"].startswith("W_-ev_i_l_")
    with workspaces.attached(row["session"]) as person:
        person.read_until("at the gate")
    ws.tmux.wait_to_see(started.rstrip().rpartition(" ")[2], "running")
    (start,) = ws.starts()
    assert (start["cwd"], start["env"]["EVIL"]) == (str(work), EVIL)
    ws.let_go(f"exp {EVIL}")
    assert ws.until_over()[f"exp {EVIL}"]["state"] == "completed"
    workspaces.queue.wait()
    assert (ws.folder / f"out {EVIL}" / f"exp {EVIL}_completed.txt").read_text().startswith("slope ")
    assert "epoch 2: loss" in (ws.folder / f"logs {EVIL}" / "train_logs" / f"exp {EVIL}.log").read_text()
    assert "completed" in (ws.folder / f"logs {EVIL}" / f"T {EVIL}_scheduler.log").read_text()
    assert (work / f"notified {EVIL}").exists()
    assert "2 sessions closed" in ws.do("kill-all")
    assert pwned(workspaces.place) == []


@pytest.mark.full
def test_a_workspace_is_found_from_subdirectories_and_through_a_link(workspace: Workspace, tmp_path: Path) -> None:
    link = tmp_path / "a link; touch pwned"
    link.symlink_to(workspace.folder)
    workspace.configure(sessions="none")
    workspace.add("exp1", "exp2")
    for config, script in (("exp1", link / "scheduler.sh"), ("exp2", workspace.folder / "scheduler.sh")):
        done = subprocess.run([script, "start", config], cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert {row["state"] for row in workspace.until_over().values()} == {"completed"}
    assert set(workspace.tasks()) == {"exp1", "exp2"}  # both paths lead to the same workspace
