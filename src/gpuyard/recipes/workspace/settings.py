"""What a workspace is to do: `scheduler_config.yml` made into values, and what a task's own YAML changes of them.

Every key has a default, so an empty file is a whole configuration. Paths are relative to the workspace or absolute,
`~` is somebody's home, and nothing else is expanded. A key that has no value, or an empty text, has its default.

A task's YAML belongs to its program; only `scheduler:` at its top is looked at. That word is also what many programs
call the schedule of their learning rate, so it is ours as soon as one of its keys is, or could be a slip of one; and
from then on every key of it must be.
"""

import os
import shlex
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

from gpuyard.core.units import format_size
from gpuyard.errors import UserError
from gpuyard.recipes.workspace import setting_types
from gpuyard.recipes.workspace.yaml_reader import Kind, compose_file, compose_first, nearest, read_text, take

CONFIG_FILE = "scheduler_config.yml"
DEFAULT = "default"
_SECTION = "scheduler"
# Closer than for a hint: nobody's own key is to be mistaken for a slip of ours.
_ALIKE = 0.75


class WorkspaceSettings(Struct, frozen=True, kw_only=True):
    """A field per key. Folders and the script are absolute paths; `python_env` is as it was written. `gpu_count` is
    `None` for all, `vram_mb` where it is to be learned; delays are in seconds."""

    task_name: str
    work_dir: str
    config_dir: str
    script_path: str
    output_dir: str
    worker_prefix: str
    python_env: str = "python"
    scheduler_session_suffix: str = "_scheduler"
    max_jobs_per_gpu: int = 2
    gpu_count: int | None = None
    check_interval: float = 30.0
    startup_delay: float = 1.0
    command_delay: float = 0.5
    exit_grace: float = 60.0
    log_dir: str = "/tmp"  # noqa: S108 - where shell schedulers keep them; what is made there is made private
    enable_logging: bool = True
    conda_env: str | None = None
    cuda_visible_devices_var: str = "CUDA_VISIBLE_DEVICES"
    config_pattern: str = "*.yml"
    auto_restart_failed: bool = False
    max_retries: int = 3
    cleanup_on_complete: bool = False
    vram_mb: float | None = None
    env: dict[str, str] = {}
    priority: int = 0
    engine: str | None = None
    sessions: str = "tmux"
    timeout_s: float | None = None
    notify: tuple[str, ...] | None = None
    hook: tuple[str, ...] | None = None
    hook_timeout: float = 60.0


# Every key, in the order people are shown them.
KINDS: dict[str, Kind] = {
    "task_name": setting_types.label,
    "work_dir": setting_types.text,
    "config_dir": setting_types.text,
    "script_path": setting_types.text,
    "python_env": setting_types.text,
    "output_dir": setting_types.text,
    "scheduler_session_suffix": setting_types.text,
    "worker_prefix": setting_types.text,
    "max_jobs_per_gpu": setting_types.whole(1),
    "gpu_count": setting_types.gpu_count,
    "check_interval": setting_types.some_seconds,
    "startup_delay": setting_types.seconds,
    "command_delay": setting_types.seconds,
    "exit_grace": setting_types.seconds,
    "log_dir": setting_types.text,
    "enable_logging": setting_types.flag,
    "conda_env": setting_types.text,
    "cuda_visible_devices_var": setting_types.variable,
    "config_pattern": setting_types.pattern,
    "auto_restart_failed": setting_types.flag,
    "max_retries": setting_types.whole(0),
    "cleanup_on_complete": setting_types.flag,
    "vram": setting_types.size_mb,
    "env": setting_types.environment,
    "priority": setting_types.priority,
    "engine": setting_types.engine,
    "sessions": setting_types.choice("tmux", "none"),
    "timeout": setting_types.some_seconds,
    "notify": setting_types.command,
    "hook": setting_types.command,
    "hook_timeout": setting_types.some_seconds,
}
_FIELDS = {"vram": "vram_mb", "timeout": "timeout_s"}
# What a value of None stands for, where people read it.
_NONE = {"gpu_count": "all", "vram": "learned", "engine": "default"}


class SettingRow(Struct, frozen=True, kw_only=True):
    """A key as people are shown it: the value in force, and where it came from."""

    key: str
    value: str
    source: str


class Loaded(Struct, frozen=True, kw_only=True):
    """The settings of a workspace, as the file `path` has them; `sources` says of each key where it came from."""

    settings: WorkspaceSettings
    sources: dict[str, str]
    workspace: Path
    path: str

    def rows(self) -> list[SettingRow]:
        settings = self.settings
        return [
            SettingRow(key=key, value=_shown(key, getattr(settings, field_of(key))), source=self.sources[key])
            for key in KINDS
        ]


def field_of(key: str) -> str:
    """The field that a key is kept in: sizes and times say their unit."""
    return _FIELDS.get(key, key)


def load(workspace: Path, config_file: Path | None = None) -> Loaded:
    """UserError where there is no workspace, or something in its file is not as it should be."""
    folder = Path(os.path.abspath(workspace))
    path = folder / CONFIG_FILE if config_file is None else Path(os.path.abspath(config_file))
    if config_file is None and not path.exists():
        raise UserError(
            f"there is no workspace in {folder}: it has no {CONFIG_FILE}",
            hint=f"`gpuyard workspace init {shlex.quote(str(workspace))}` makes one",
        )
    taken = take(compose_file(path), KINDS, path)
    values = {key: each.value for key, each in taken.items()}
    sources = {key: f"{path.name}:{taken[key].line}" if key in taken else DEFAULT for key in KINDS}
    sources.update(_settle(values, folder))
    settings = WorkspaceSettings(**{field_of(key): value for key, value in values.items()})
    return Loaded(settings=settings, sources=sources, workspace=folder, path=str(path))


def _settle(values: dict[str, Any], folder: Path) -> dict[str, str]:
    """Fills in what has its default from elsewhere, and says so; makes all paths absolute."""
    told = {}
    for key, value, origin in (
        ("task_name", default_task_name(folder), "the folder's name"),
        ("worker_prefix", values.get("task_name") or default_task_name(folder), "task_name"),
        ("work_dir", ".", "the workspace"),
    ):
        if key not in values:
            values[key] = value
            told[key] = f"{DEFAULT}, from {origin}"
    for key, default in (("work_dir", "."), ("config_dir", "configs"), ("output_dir", "out")):
        values[key] = _absolute(values.get(key, default), folder)
    if "log_dir" in values:
        values["log_dir"] = _absolute(values["log_dir"], folder)
    values["script_path"] = _script(values.get("script_path", "train.py"), folder, Path(values["work_dir"]))
    if "/" in values.get("conda_env", ""):  # an environment by its path; all others are found by their names
        values["conda_env"] = _absolute(values["conda_env"], folder)
    return told


def default_task_name(folder: Path) -> str:
    """That of the folder itself, whatever link leads to it, so far as a name can have it."""
    name = "".join("_" if setting_types.has_control_characters(letter) else letter for letter in folder.resolve().name)
    return name.encode(errors="replace")[: setting_types.LONGEST_LABEL].decode(errors="ignore") or "workspace"


def _absolute(written: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(written))


def _script(written: str, folder: Path, work_dir: Path) -> str:
    """In the workspace, else in the working directory; in the workspace where it is in neither."""
    here, there = _absolute(written, folder), _absolute(written, work_dir)
    return there if not os.path.exists(here) and os.path.exists(there) else here


def _shown(key: str, value: Any) -> str:
    if value is None:
        return _NONE.get(key, "none")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return shlex.join(value)
    if isinstance(value, dict):
        return " ".join(f"{name}={shlex.quote(each)}" for name, each in value.items()) or "none"
    if isinstance(value, float):
        return format_size(value) if key == "vram" else f"{value:g}"
    return str(value)


# What a task's own YAML says


class TaskOptions(Struct, frozen=True, kw_only=True):
    """`None` where the workspace's value holds; `env` is added to the workspace's."""

    vram_mb: float | None = None
    priority: int | None = None
    gpus: int | None = None
    timeout_s: float | None = None
    env: dict[str, str] = {}


TASK_KINDS: dict[str, Kind] = {
    "vram": setting_types.size_mb,
    "priority": setting_types.priority,
    "gpus": setting_types.whole(0),
    "timeout": setting_types.some_seconds,
    "env": setting_types.environment,
}


def load_task_options(path: Path) -> TaskOptions:
    """What is no YAML is the program's own dialect, and has no options. UserError where it cannot be read, or where
    `scheduler:` is ours and has a mistake."""
    section = _section(_text_if_any(path))
    if section is None:
        return TaskOptions()
    taken = take(section, TASK_KINDS, path)
    return TaskOptions(**{field_of(key): each.value for key, each in taken.items()})


def _text_if_any(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return ""
    except OSError:
        return read_text(path)


def _section(text: str) -> yaml.MappingNode | None:
    if _SECTION not in text:  # large files of data are not parsed for nothing
        return None
    try:
        node = compose_first(text)
    except yaml.YAMLError:
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    found = [value for key, value in node.value if isinstance(key, yaml.ScalarNode) and key.value == _SECTION]
    return found[-1] if found and _is_ours(found[-1]) else None


def _is_ours(node: yaml.Node) -> bool:
    return isinstance(node, yaml.MappingNode) and any(
        isinstance(key, yaml.ScalarNode) and nearest(key.value, TASK_KINDS, _ALIKE) for key, _ in node.value
    )
