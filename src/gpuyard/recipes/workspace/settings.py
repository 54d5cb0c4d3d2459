"""Load the settings of a workspace from `scheduler_config.yml`, and the options that a task's own YAML overrides.

Every key has a default, so an empty file is a complete configuration. Paths are relative to the workspace or absolute,
`~` means a home directory, and nothing else is expanded. A key without a value, or with empty text, has its default.

A task's YAML belongs to its program; gpuyard reads only the top-level key `scheduler:`. Many programs use that key for
their learning rate schedule, so the section counts as gpuyard's only if one of its keys is a gpuyard key or a likely
typing mistake of one; then every key in the section must be valid.
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
from gpuyard.recipes.workspace.yaml_reader import (
    SettingType,
    cannot_read,
    closest_key,
    compose_file,
    compose_first,
    read_mapping,
)

CONFIG_FILE = "scheduler_config.yml"
DEFAULT = "default"
_SECTION = "scheduler"
# Stricter than for a hint: a key of the user's program must not count as a typing mistake of ours.
_MIN_SIMILARITY = 0.75


class WorkspaceSettings(Struct, frozen=True, kw_only=True):
    """One field per key. Folders and the script are absolute paths; `python_env` is unchanged. `gpu_count` None means
    all, `vram_mb` None means learned; delays are in seconds."""

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
    log_dir: str = "/tmp"  # noqa: S108 - the usual place of shell schedulers; our files there are private
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


# Every key, in display order.
SETTING_TYPES: dict[str, SettingType] = {
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
    "check_interval": setting_types.positive_seconds,
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
    "timeout": setting_types.positive_seconds,
    "notify": setting_types.command,
    "hook": setting_types.command,
    "hook_timeout": setting_types.positive_seconds,
}
_FIELDS = {"vram": "vram_mb", "timeout": "timeout_s"}
# How None is shown to users.
_NONE_TEXTS = {"gpu_count": "all", "vram": "learned", "engine": "default"}


class SettingRow(Struct, frozen=True, kw_only=True):
    """A key as shown to users: its current value and the source of that value."""

    key: str
    value: str
    source: str


class LoadedSettings(Struct, frozen=True, kw_only=True):
    """The settings of a workspace, read from the file `path`; `sources` names the source of each key's value."""

    settings: WorkspaceSettings
    sources: dict[str, str]
    workspace: Path
    path: str

    def rows(self) -> list[SettingRow]:
        return [
            SettingRow(key=key, value=_value_text(key, getattr(self.settings, field_name(key))), source=source)
            for key, source in self.sources.items()
        ]


def field_name(key: str) -> str:
    """Return the field for a key: names of sizes and times include the unit."""
    return _FIELDS.get(key, key)


def load(workspace: Path, config_file: Path | None = None) -> LoadedSettings:
    """Load and check the settings. Raises UserError if there is no workspace, or if its file has a mistake."""
    folder = Path(os.path.abspath(workspace))
    path = folder / CONFIG_FILE if config_file is None else Path(os.path.abspath(config_file))
    if config_file is None and not path.exists():
        raise UserError(
            f"{folder} is not a workspace: it has no {CONFIG_FILE}",
            hint=f"`gpuyard workspace init {shlex.quote(str(workspace))}` creates one",
        )
    given = read_mapping(compose_file(path), SETTING_TYPES, path)
    values = {key: each.value for key, each in given.items()}
    sources = {key: f"{path.name}:{given[key].line}" if key in given else DEFAULT for key in SETTING_TYPES}
    sources.update(_fill_in(values, folder))
    settings = WorkspaceSettings(**{field_name(key): value for key, value in values.items()})
    return LoadedSettings(settings=settings, sources=sources, workspace=folder, path=str(path))


def _fill_in(values: dict[str, Any], folder: Path) -> dict[str, str]:
    """Fill in defaults that depend on other values and make all paths absolute. Return the sources of the former."""
    sources = {}
    for key, value, origin in (
        ("task_name", default_task_name(folder), "the folder's name"),
        ("worker_prefix", values.get("task_name") or default_task_name(folder), "task_name"),
        ("work_dir", ".", "the workspace"),
    ):
        if key not in values:
            values[key] = value
            sources[key] = f"{DEFAULT}, from {origin}"
    for key, default in (("work_dir", "."), ("config_dir", "configs"), ("output_dir", "out")):
        values[key] = _absolute(values.get(key, default), folder)
    if "log_dir" in values:
        values["log_dir"] = _absolute(values["log_dir"], folder)
    values["script_path"] = _script(values.get("script_path", "train.py"), folder, Path(values["work_dir"]))
    if "/" in values.get("conda_env", ""):  # a path; other values are names
        values["conda_env"] = _absolute(values["conda_env"], folder)
    return sources


def default_task_name(folder: Path) -> str:
    """Return the name of the folder, symbolic links resolved, with control characters replaced, cut to the limit."""
    name = "".join("_" if setting_types.has_control_characters(letter) else letter for letter in folder.resolve().name)
    return name.encode(errors="replace")[: setting_types.LONGEST_LABEL].decode(errors="ignore") or "workspace"


def _absolute(written: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(written))


def _script(written: str, folder: Path, work_dir: Path) -> str:
    """Return the script's path in the workspace; in the working directory if the script exists only there."""
    in_workspace, in_work_dir = _absolute(written, folder), _absolute(written, work_dir)
    return in_work_dir if not os.path.exists(in_workspace) and os.path.exists(in_work_dir) else in_workspace


def _value_text(key: str, value: Any) -> str:
    if value is None:
        return _NONE_TEXTS.get(key, "none")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return shlex.join(value)
    if isinstance(value, dict):
        return " ".join(f"{name}={shlex.quote(each)}" for name, each in value.items()) or "none"
    if isinstance(value, float):
        return format_size(value) if key == "vram" else f"{value:g}"
    return str(value)


class TaskOptions(Struct, frozen=True, kw_only=True):
    """The options of a task's own YAML. None keeps the workspace's value; `env` is added to the workspace's."""

    vram_mb: float | None = None
    priority: int | None = None
    gpus: int | None = None
    timeout_s: float | None = None
    env: dict[str, str] = {}


TASK_SETTING_TYPES: dict[str, SettingType] = {
    "vram": setting_types.size_mb,
    "priority": setting_types.priority,
    "gpus": setting_types.whole(0),
    "timeout": setting_types.positive_seconds,
    "env": setting_types.environment,
}


def load_task_options(path: Path) -> TaskOptions:
    """Return the options in `scheduler:`. A file that is not YAML is the program's own format and has no options.

    Raises UserError if the file cannot be read, or if `scheduler:` is gpuyard's section and has a mistake.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return TaskOptions()
    except OSError as error:
        raise cannot_read(path, error) from error
    section = _find_section(text)
    if section is None:
        return TaskOptions()
    given = read_mapping(section, TASK_SETTING_TYPES, path)
    return TaskOptions(**{field_name(key): each.value for key, each in given.items()})


def _find_section(text: str) -> yaml.MappingNode | None:
    if _SECTION not in text:  # saves parsing large data files
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
        isinstance(key, yaml.ScalarNode) and closest_key(key.value, TASK_SETTING_TYPES, _MIN_SIMILARITY)
        for key, _ in node.value
    )
