"""The settings of a workspace, and the source of each value."""

import os
from pathlib import Path

import msgspec
import pytest

from gpuyard.errors import UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, SETTING_TYPES, LoadedSettings, load

# A configuration of a shell scheduler: only these keys.
LEGACY = """\
task_name: "TASK"
work_dir: "."
config_dir: "configs"
script_path: "train.py"
python_env: "python"
output_dir: "out"
scheduler_session_suffix: "_scheduler"
worker_prefix: ""
max_jobs_per_gpu: 3
gpu_count: 8
check_interval: 10
startup_delay: 2
command_delay: 0.25
log_dir: "/var/log/sweeps"
enable_logging: true
conda_env: ""
cuda_visible_devices_var: "CUDA_VISIBLE_DEVICES"
config_pattern: "*.yaml"
auto_restart_failed: true
max_retries: 5
cleanup_on_complete: yes
"""


def loaded(workspace: Path, text: str) -> LoadedSettings:
    workspace.mkdir(exist_ok=True)
    (workspace / CONFIG_FILE).write_text(text, encoding="utf-8")
    return load(workspace)


def test_an_empty_file_is_a_valid_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "my_experiment"
    settings = loaded(folder, "").settings
    assert msgspec.structs.asdict(settings) == {
        "task_name": "my_experiment",
        "work_dir": str(folder),
        "config_dir": f"{folder}/configs",
        "script_path": f"{folder}/train.py",
        "parser": None,
        "python_env": "python",
        "output_dir": f"{folder}/out",
        "scheduler_session_suffix": "_scheduler",
        "worker_prefix": "my_experiment",
        "max_jobs_per_gpu": 2,
        "gpu_count": None,
        "vendor": None,
        "check_interval": 30.0,
        "startup_delay": 1.0,
        "command_delay": 0.5,
        "exit_grace": 60.0,
        "log_dir": "/tmp",
        "enable_logging": True,
        "conda_env": None,
        "cuda_visible_devices_var": "CUDA_VISIBLE_DEVICES",
        "config_pattern": "*.yml",
        "auto_restart_failed": False,
        "max_retries": 3,
        "retry_on": "failed,timeout,oom,device",
        "retry_delay": None,
        "cleanup_on_complete": False,
        "vram_mb": None,
        "env": {},
        "priority": 0,
        "engine": None,
        "image": None,
        "mounts": (),
        "sessions": "tmux",
        "timeout_s": None,
        "signal": None,
        "notify": None,
        "hook": None,
        "hook_timeout": 60.0,
    }


def test_the_configuration_of_a_shell_scheduler_is_understood(tmp_path: Path) -> None:
    settings = loaded(tmp_path, LEGACY).settings
    assert (settings.task_name, settings.worker_prefix) == ("TASK", "TASK")
    assert (settings.max_jobs_per_gpu, settings.gpu_count, settings.max_retries) == (3, 8, 5)
    assert (settings.check_interval, settings.startup_delay, settings.command_delay) == (10.0, 2.0, 0.25)
    assert (settings.log_dir, settings.config_pattern) == ("/var/log/sweeps", "*.yaml")
    assert settings.auto_restart_failed
    assert settings.cleanup_on_complete
    assert settings.conda_env is None
    assert settings.work_dir == str(tmp_path)


def test_the_new_keys_accept_usual_spellings(tmp_path: Path) -> None:
    text = (
        "vram: 8G\ntimeout: 4h\npriority: -5\nengine: Slurm\nsessions: none\ngpu_count: all\n"
        "notify: mail -s 'all done' me\nconda_env: torch\n"
    )
    settings = loaded(tmp_path, text).settings
    assert (settings.vram_mb, settings.timeout_s, settings.priority) == (8192.0, 14400.0, -5)
    assert (settings.engine, settings.sessions, settings.gpu_count) == ("slurm", "none", None)
    assert settings.notify == ("mail", "-s", "all done", "me")
    assert settings.conda_env == "torch"


def test_a_command_can_be_a_list_of_arguments(tmp_path: Path) -> None:
    assert loaded(tmp_path, "notify: [sh, -c, 'echo $HOME | cat']").settings.notify == ("sh", "-c", "echo $HOME | cat")


def test_variables_keep_their_text_as_written(tmp_path: Path) -> None:
    text = "env:\n  LR: 1e-3\n  DEBUG: yes\n  CODE: 007\n  QUOTED: '$(x)'\n  EMPTY:\n"
    assert loaded(tmp_path, text).settings.env == {
        "LR": "1e-3",
        "DEBUG": "yes",
        "CODE": "007",
        "QUOTED": "$(x)",
        "EMPTY": "",
    }


def test_a_yaml_alias_is_resolved(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "task_name: &name night\nworker_prefix: *name\n").settings
    assert settings.worker_prefix == "night"


def test_a_number_may_be_in_quotes_and_a_name_may_be_a_number(tmp_path: Path) -> None:
    settings = loaded(tmp_path, "max_jobs_per_gpu: '4'\ntask_name: 007\nvram: 512\n").settings
    assert (settings.max_jobs_per_gpu, settings.task_name, settings.vram_mb) == (4, "007", 512.0)


@pytest.mark.parametrize("empty", ["", "~", "null", "''", '" "'])
def test_an_empty_value_is_the_default(tmp_path: Path, empty: str) -> None:
    found = loaded(tmp_path, f"max_retries: {empty}\nvram: {empty}\ntask_name: {empty}\n")
    assert (found.settings.max_retries, found.settings.vram_mb) == (3, None)
    assert found.settings.task_name == tmp_path.name
    assert found.sources["max_retries"] == "default"


def test_paths_are_relative_to_the_workspace_absolute_or_in_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    text = "work_dir: ../code\nconfig_dir: /data/configs\noutput_dir: ~/out\nlog_dir: ./$LOGS\nconda_env: ./env\n"
    settings = loaded(tmp_path / "ws", text).settings
    assert settings.work_dir == f"{tmp_path}/ws/../code"
    assert settings.config_dir == "/data/configs"
    assert settings.output_dir == "/home/ada/out"
    assert settings.log_dir == f"{tmp_path}/ws/$LOGS"
    assert settings.conda_env == f"{tmp_path}/ws/env"


def test_a_script_is_found_in_the_workspace_first_and_then_in_the_working_directory(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    text = f"work_dir: {code}\nscript_path: main.py\n"
    here = tmp_path / "ws" / "main.py"
    assert loaded(tmp_path / "ws", text).settings.script_path == str(here)
    (code / "main.py").touch()
    assert loaded(tmp_path / "ws", text).settings.script_path == f"{code}/main.py"
    here.touch()
    assert loaded(tmp_path / "ws", text).settings.script_path == str(here)


def test_each_value_has_its_source(tmp_path: Path) -> None:
    sources = loaded(tmp_path, "# mine\ntask_name: a\n\nmax_retries: 1\n").sources
    assert sources["task_name"] == f"{CONFIG_FILE}:2"
    assert sources["max_retries"] == f"{CONFIG_FILE}:4"
    assert sources["worker_prefix"] == "default, from task_name"
    assert sources["work_dir"] == "default, from the workspace"
    assert sources["vram"] == "default"
    assert loaded(tmp_path, "").sources["task_name"] == "default, from the folder's name"


def test_all_keys_are_shown_in_their_usual_spelling(tmp_path: Path) -> None:
    text = "vram: 1.5G\nenv: {A: b c, D: 1}\nnotify: [mail, a b]\nenable_logging: no\ngpu_count: 4\n"
    rows = {key: value for key, value, _ in loaded(tmp_path, text).rows()}
    assert list(rows) == list(SETTING_TYPES)
    assert rows["vram"] == "1.5 GB"
    assert rows["env"] == "A='b c' D=1"
    assert rows["notify"] == "mail 'a b'"
    assert (rows["enable_logging"], rows["gpu_count"], rows["command_delay"]) == ("false", "4", "0.5")
    rows = {key: value for key, value, _ in loaded(tmp_path, "").rows()}
    assert (rows["vram"], rows["gpu_count"], rows["timeout"], rows["env"]) == ("learned", "all", "none", "none")


def test_another_file_can_be_the_configuration(tmp_path: Path) -> None:
    other = tmp_path / "night.yml"
    other.write_text("task_name: night\n")
    found = load(tmp_path, other)
    assert found.settings.task_name == "night"
    assert found.sources["task_name"] == "night.yml:1"
    assert found.path == str(other)
    assert found.workspace == tmp_path
    assert found.settings.config_dir == f"{tmp_path}/configs"


def test_an_unusable_folder_name_gives_a_usable_task_name(tmp_path: Path) -> None:
    odd = tmp_path / f"two\nlines{'é' * 100}"
    name = loaded(odd, "").settings.task_name
    assert name.startswith("two_linesé")
    assert len(name.encode()) <= 180


@pytest.mark.linux("file names that are not UTF-8")
def test_a_folder_name_that_is_not_text_gives_a_valid_task_name(tmp_path: Path) -> None:
    broken = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert loaded(broken, "").settings.task_name == "?"


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_bytes(b"\xef\xbb\xbftask_name: a\r\nmax_retries: 1\r\n")
    assert load(tmp_path).settings.task_name == "a"


def test_a_folder_without_a_configuration_is_not_a_workspace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a workspace") as caught:
        load(tmp_path / "a b")
    assert caught.value.hint == f"`gpuyard workspace init '{tmp_path}/a b'` creates one"
    with pytest.raises(UserError, match=r"there is no file .*other\.yml"):
        load(tmp_path, tmp_path / "other.yml")
