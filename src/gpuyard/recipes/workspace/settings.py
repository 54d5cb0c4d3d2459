"""Load the settings of a workspace from `scheduler_config.yml`, and the options that a task's own YAML overrides. Paths
are relative to the workspace or absolute, `~` means a home directory, and nothing else is expanded.

A task's YAML belongs to its program, and many programs have a key `scheduler:` of their own. That section counts as
gpuyard's only if one of its keys is a gpuyard key or a likely mistake of one; then every key in it must be valid."""

import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import yaml
from msgspec import Struct

from gpuyard.errors import UserError
from gpuyard.model.units import format_size
from gpuyard.recipes.workspace import yaml_settings as types
from gpuyard.recipes.workspace.yaml_settings import SettingType, cannot_read, closest_key, read_mapping
from gpuyard.system.private_files import MOST_CONFIGURED
from gpuyard.system.processes import user_name

CONFIG_FILE = "scheduler_config.yml"
DEFAULT = "default"
TRAIN_LOGS = "train_logs"  # in `log_dir`, for this user alone
_SECTION = "scheduler"


class WorkspaceSettings(Struct, frozen=True, kw_only=True):
    """One field per key, in display order, with the type of its value in YAML. Folders and the script are absolute
    paths; `python_env` is unchanged. `gpu_count` None means all, `vram` (in MB) None learned; times are in seconds."""

    task_name: Annotated[str, types.label]
    work_dir: Annotated[str, types.text]
    config_dir: Annotated[str, types.text]
    script_path: Annotated[str, types.text]
    parser: Annotated[str | None, types.function] = None
    python_env: Annotated[str, types.text] = "python"
    output_dir: Annotated[str, types.text]
    scheduler_session_suffix: Annotated[str, types.text] = "_scheduler"
    worker_prefix: Annotated[str, types.text]
    max_jobs_per_gpu: Annotated[int, types.whole(1)] = 2
    gpu_count: Annotated[int | None, types.gpu_count] = None
    vendor: Annotated[str | None, types.vendor] = None
    check_interval: Annotated[float, types.positive_seconds] = 30.0
    startup_delay: Annotated[float, types.seconds] = 1.0
    command_delay: Annotated[float, types.seconds] = 0.5
    exit_grace: Annotated[float, types.seconds] = 60.0
    log_dir: Annotated[str, types.text]
    enable_logging: Annotated[bool, types.flag] = True
    conda_env: Annotated[str | None, types.text] = None
    cuda_visible_devices_var: Annotated[str, types.variable] = "CUDA_VISIBLE_DEVICES"
    config_pattern: Annotated[str, types.pattern] = "*.yml"
    auto_restart_failed: Annotated[bool, types.flag] = False
    max_retries: Annotated[int, types.whole(0)] = 3
    retry_on: Annotated[str, types.retry_causes] = "failed,timeout,oom,device"
    retry_delay: Annotated[float | None, types.seconds] = None
    cleanup_on_complete: Annotated[bool, types.flag] = False
    vram: Annotated[float | None, types.size_mb] = None
    env: Annotated[dict[str, str], types.environment] = {}
    priority: Annotated[int, types.priority] = 0
    engine: Annotated[str | None, types.engine] = None
    image: Annotated[str | None, types.text] = None
    mounts: Annotated[tuple[str, ...], types.mounts] = ()
    sessions: Annotated[str, types.sessions] = "tmux"
    timeout: Annotated[float | None, types.positive_seconds] = None
    signal: Annotated[str | None, types.stop_signal] = None
    notify: Annotated[tuple[str, ...] | None, types.command] = None
    hook: Annotated[tuple[str, ...] | None, types.command] = None
    hook_timeout: Annotated[float, types.positive_seconds] = 60.0


class TaskOptions(Struct, frozen=True, kw_only=True):
    """None keeps the workspace's value; `env` is added to it. `gpu_count` is always 0 or None, and `gpus` is then 0
    too."""

    vram: Annotated[float | None, types.size_mb] = None
    priority: Annotated[int | None, types.priority] = None
    gpus: Annotated[int | None, types.whole(0)] = None
    gpu_count: Annotated[int | None, types.no_gpu] = None
    timeout: Annotated[float | None, types.positive_seconds] = None
    env: Annotated[dict[str, str], types.environment] = {}


def _types_by_key(options: type[Struct]) -> dict[str, SettingType]:
    return {key: hint.__metadata__[0] for key, hint in get_type_hints(options, include_extras=True).items()}


SETTING_TYPES = _types_by_key(WorkspaceSettings)
_TASK_SETTING_TYPES = _types_by_key(TaskOptions)


class LoadedSettings(Struct, frozen=True, kw_only=True):
    """The settings of a workspace, read from the file `path`; `sources` names the source of each key's value."""

    settings: WorkspaceSettings
    sources: dict[str, str]
    workspace: Path
    path: str

    def rows(self) -> list[tuple[str, str, str]]:
        return [(key, _value_text(key, getattr(self.settings, key)), source) for key, source in self.sources.items()]


def load(workspace: Path, config_file: Path | None = None) -> LoadedSettings:
    """Load and check the settings. Raises UserError if there is no workspace, or if its file has a mistake."""
    folder = Path(os.path.abspath(workspace))
    path = folder / CONFIG_FILE if config_file is None else Path(os.path.abspath(config_file))
    if config_file is None and not path.exists():
        hint = f"`gpuyard workspace init {shlex.quote(str(workspace))}` creates one"
        raise UserError(f"{folder} is not a workspace: it has no {CONFIG_FILE}", hint=hint)
    given = read_mapping(types.compose_file(path), SETTING_TYPES, path)
    values = {key: value for key, (value, _) in given.items()}
    sources = {key: f"{path.name}:{given[key][1]}" if key in given else DEFAULT for key in SETTING_TYPES}
    sources.update(_fill_in(values, folder))
    return LoadedSettings(settings=WorkspaceSettings(**values), sources=sources, workspace=folder, path=str(path))


def keys_in(path: Path) -> tuple[list[str], list[str]]:
    """Return the keys of a configuration that are settings, and the others. Raises UserError if it is not YAML."""
    node = types.compose_file(path)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    keys = [str(key.value) for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
    return [key for key in keys if key in SETTING_TYPES], [key for key in keys if key not in SETTING_TYPES]


def _fill_in(values: dict[str, Any], folder: Path) -> dict[str, str]:
    """Fill in defaults that depend on other values and make all paths absolute. Return the sources of the former."""
    origins = {"task_name": "the folder's name", "worker_prefix": "task_name", "work_dir": "the workspace"}
    sources = {key: f"{DEFAULT}, from {origin}" for key, origin in origins.items() if key not in values}
    values.setdefault("task_name", default_task_name(folder))
    values.setdefault("worker_prefix", values["task_name"])
    for key, default in (("work_dir", "."), ("config_dir", "configs"), ("output_dir", "out")):
        values[key] = _absolute(values.get(key, default), folder)
    if values.get("mounts"):
        values["mounts"] = tuple(_absolute(mount, folder) for mount in values["mounts"])
    # The default is the usual place of shell schedulers; our files there are private.
    log_dir = values["log_dir"] = _absolute(values.get("log_dir", "/tmp"), folder)  # noqa: S108
    logs = f"{log_dir}/{TRAIN_LOGS}"
    if os.path.lexists(logs) and os.lstat(logs).st_uid != os.geteuid():
        values["log_dir"] = f"{log_dir}/logs_{user_name(os.geteuid())}"
        sources["log_dir"] = f"{logs} belongs to another user"
    script = values.get("script_path", "train.py")
    in_workspace, in_work_dir = _absolute(script, folder), _absolute(script, Path(values["work_dir"]))
    is_in_work_dir = not os.path.exists(in_workspace) and os.path.exists(in_work_dir)
    values["script_path"] = in_work_dir if is_in_work_dir else in_workspace
    if "/" in values.get("conda_env", ""):  # a path; other values are names
        values["conda_env"] = _absolute(values["conda_env"], folder)
    return sources


def default_task_name(folder: Path) -> str:
    """Return the name of the folder, symbolic links resolved, with control characters replaced, cut to the limit."""
    name = "".join("_" if types.has_control_characters(letter) else letter for letter in folder.resolve().name)
    return name.encode(errors="replace")[: types.LONGEST_LABEL].decode(errors="ignore") or "workspace"


def _absolute(written: str, folder: Path) -> str:
    return str(folder / os.path.expanduser(written))


def _value_text(key: str, value: Any) -> str:
    if value is None:
        texts = {"gpu_count": "all", "vram": "learned", "engine": "default", "vendor": "default"}
        return {**texts, "parser": "--config_path FILE"}.get(key, "none")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return shlex.join(value) or "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={shlex.quote(each)}" for name, each in value.items()) or "none"
    if isinstance(value, float):
        return format_size(value) if key == "vram" else f"{value:g}"
    return str(value)


def load_task_options(path: Path) -> TaskOptions:
    """Return the options in `scheduler:`. A file that is not YAML is the program's own format and has no options; one
    of more than 1 MB is data of the program, and has no section of ours."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_CONFIGURED + 1)
        is_large = len(content) > MOST_CONFIGURED
        if is_large:
            content = b"".join(re.findall(rb"^scheduler[ \t]*:.*\n(?:[ \t].*\n)*", content, re.MULTILINE))
        section = _find_section(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return TaskOptions()
    except OSError as error:
        raise cannot_read(path, error) from error
    if section is None:
        return TaskOptions()
    if is_large:
        hint = "remove `scheduler:`, or move data to another file"
        raise UserError(f"{path} is too large: a configuration with `scheduler:` has at most 1 MB", hint=hint)
    given = read_mapping(section, _TASK_SETTING_TYPES, path)
    if "gpu_count" in given and given.setdefault("gpus", (0, 0))[0]:
        line = given["gpu_count"][1]
        raise UserError(f"{path}:{line}: `gpu_count: 0` and `gpus` exclude each other", hint="leave one of them out")
    return TaskOptions(**{key: value for key, (value, _) in given.items()})


def _find_section(text: str) -> yaml.MappingNode | None:
    if _SECTION not in text:  # saves parsing large data files
        return None
    try:
        node = types.compose(text, is_first=True)
    except yaml.YAMLError:
        return None
    if not isinstance(node, yaml.MappingNode):
        return None
    sections = [value for key, value in node.value if isinstance(key, yaml.ScalarNode) and key.value == _SECTION]
    if not sections or not isinstance(sections[-1], yaml.MappingNode):
        return None
    keys = [key.value for key, _ in sections[-1].value if isinstance(key, yaml.ScalarNode)]
    # Stricter than for a hint: a key of the user's program must not count as a typing mistake of ours.
    return sections[-1] if any(closest_key(key, _TASK_SETTING_TYPES, 0.75) for key in keys) else None
