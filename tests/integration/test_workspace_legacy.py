"""A workspace of an earlier shell scheduler runs unchanged under gpuyard."""

import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.executables import write_executable
from tests.fakes import train
from tests.integration.queue_fixture import QueueUnderTest
from tests.integration.session_fixture import OwnTmux
from tests.integration.workspace_fixture import BIN, TRAINING, Workspaces, make_tmux, make_workspaces, until  # noqa: F401 - fixtures are found where they are named

pytestmark = [pytest.mark.needs("tmux"), pytest.mark.usefixtures("unmeasured")]

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


@pytest.mark.full
def test_the_old_scheduler_command_works_with_any_configuration(old: Path, own_queue: QueueUnderTest) -> None:
    own_queue.start()
    shell(BIN / "setup_workspace.sh", old, "--force", cwd=old.parent)
    other = old.parent / "other config.yml"
    other.write_text(f"{OLD_CONFIG.format(folder=old)}\nsessions: none\n".replace("exp*.yml", "[n]*.yml"))
    main: tuple[str | Path, ...] = (BIN / "scheduler_main.sh", other.name, old.name)
    assert "notes  job 1\n" in shell(*main, "start", cwd=old.parent)
    until((old / "out/notes_completed.txt").exists, "the end of the task")
    own_queue.wait()
    assert "1 of 1 done" in shell(*main, "status", cwd=old.parent)
    assert "OLD_TASK" in shell(*main, "config", cwd=old.parent)
    by_default = shell(BIN / "scheduler_main.sh", old / "scheduler_config.yml", old, "status", cwd=old.parent)
    assert "1 of 3 done" in by_default
