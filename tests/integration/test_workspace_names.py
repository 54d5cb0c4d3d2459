"""Hostile names of configs, paths and settings are data, and an old workspace runs unchanged."""

import json
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.executables import write_executable
from tests.fakes import train
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.session_fixture import OwnTmux
from tests.integration.workspace_fixture import BIN, TRAINING, Workspaces

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


# A workspace of an earlier shell scheduler

OLD_SCRIPT = """\
#!/bin/bash
# My scheduler. Reads scheduler_config.yml and starts a tmux session per config.
set -euo pipefail
source ~/tools/scheduler_main.sh "$(dirname "$0")/scheduler_config.yml" "$(dirname "$0")" "$@"
"""
OLD_CONFIG = """\
# ============ Task ============
task_name: "OLD_TASK"          # prefix of everything
work_dir: '{folder}'
config_dir: "configs"
script_path: "train.py"
python_env: "python"
output_dir: "out"

# ============ tmux ============
scheduler_session_suffix: "_sched"
worker_prefix: "OLD"

# ============ GPUs ============
max_jobs_per_gpu: 2
gpu_count: 2
check_interval: 30            # seconds
startup_delay: 0
command_delay: 0.1

# ============ Logs ============
log_dir: "{folder}/old logs"
enable_logging: true

# ============ Environment ============
conda_env: ""
cuda_visible_devices_var: "CUDA_VISIBLE_DEVICES"
config_pattern: "exp*.yml"

# ============ Failures ============
auto_restart_failed: true
max_retries: 1
cleanup_on_complete: false
"""


def shell(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def old(workspaces: Workspaces) -> Path:
    """An old workspace with one of its three experiments done."""
    folder = workspaces.place / "old workspace"
    (folder / "configs").mkdir(parents=True)
    (folder / "out").mkdir()
    (folder / "out/exp1_completed.txt").write_text("done in spring\n")
    for name in ("exp1", "exp2", "exp3", "notes"):
        (folder / "configs" / f"{name}.yml").write_text(yaml.safe_dump({**TRAINING, "fails": int(name == "exp3")}))
    write_executable(folder / "scheduler.sh", OLD_SCRIPT)
    (folder / "scheduler_config.yml").write_text(OLD_CONFIG.format(folder=folder))
    shutil.copy(train.__file__, folder / "train.py")
    return folder


def test_an_old_workspace_runs_unchanged_to_its_end(old: Path, own_queue: QueueUnderTest, tmux: OwnTmux) -> None:
    own_queue.start()
    before = (old / "scheduler_config.yml").read_text()
    values = yaml.safe_load(before)
    assert len(values) == 21
    refused = subprocess.run([BIN / "setup_workspace.sh", old], capture_output=True, text=True, check=False)
    assert (refused.returncode, (old / "scheduler.sh").read_text()) == (2, OLD_SCRIPT)

    made = shell(BIN / "setup_workspace.sh", old, "--force", cwd=old.parent)
    assert "scheduler.sh; backup: scheduler.sh.bak\n" in made
    assert f"settings {', '.join(values)}\n" in made
    assert "would accept it: 3 configs, 1 of them completed.\n" in made
    assert (old / "scheduler.sh.bak").read_text() == OLD_SCRIPT
    assert (old / "scheduler_config.yml.bak").read_text() == before
    after = (old / "scheduler_config.yml").read_text()
    assert after.startswith(before)
    assert yaml.safe_load(after) == values
    assert (old / "scheduler.sh").stat().st_mode & stat.S_IXUSR
    assert (old / "out/exp1_completed.txt").read_text() == "done in spring\n"

    output = shell("./scheduler.sh", "start", cwd=old)
    assert "exp1  skipped: completed: out/exp1_completed.txt exists\n" in output
    assert "exp2  job 1\nexp3  job 2\n" in output
    own_queue.wait()
    assert {path.name for path in (old / "out").iterdir()} == {f"exp{n}_completed.txt" for n in (1, 2, 3)}
    assert (old / "out/exp1_completed.txt").read_text() == "done in spring\n"
    rows = {row["config"]: row for row in json.loads(shell("./scheduler.sh", "status", "--json", cwd=old))["tasks"]}
    assert {config: (row["state"], row["attempt"]) for config, row in rows.items()} == {
        "exp1": ("completed", 0), "exp2": ("completed", 1), "exp3": ("completed", 2),
    }  # fmt: skip
    assert set(tmux.sessions()) >= {rows["exp2"]["session"], rows["exp3"]["session"], "OLD_TASK_sched"}
    assert rows["exp2"]["session"].startswith("OLD_exp2_gpu")
    assert "epoch 2: loss" in (old / "old logs/train_logs/exp2.log").read_text()
    assert "exp2 completed" in (old / "old logs/OLD_TASK_scheduler.log").read_text()
