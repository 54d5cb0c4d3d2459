"""Create a workspace: `scheduler.sh`, `scheduler_config.yml`, and the folders for configs and markers. Never loses
existing work: a configuration keeps its text, and new keys are appended as comments; a file is copied under an unused
name before it is replaced. In the templates beside this module, a line of `#` and a key shows that key's default.
"""

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from msgspec import Struct

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import CONFIG_FILE, SETTING_TYPES, LoadedSettings, default_task_name, load
from gpuyard.system.write_files import write_atomically

SCRIPT = "scheduler.sh"
CONFIG_TEMPLATE = Path(__file__).with_name("scheduler_config_template.yml")
WRAPPER_TEMPLATE = Path(__file__).with_name("scheduler_wrapper_template.sh")


class CreatedWorkspace(Struct, kw_only=True):
    folder: Path
    created: list[Path] = []
    kept: list[Path] = []
    backed_up: list[tuple[Path, Path]] = []


def init(folder: Path, *, force: bool) -> CreatedWorkspace:
    """Create a workspace. Raises UserError and changes nothing if one exists there and `force` is False."""
    folder = Path(os.path.abspath(folder))
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} exists and is not a folder", hint="choose another path")
    for name in () if force else (CONFIG_FILE, SCRIPT):
        if os.path.lexists(folder / name):
            hint = "--force updates it: your values are kept, and replaced files are backed up"
            raise UserError(f"{folder} is a workspace already: it has {name}", hint=hint)
    result = CreatedWorkspace(folder=folder)
    try:
        _write_all(result)
    except OSError as error:
        raise EnvironmentFault(f"cannot create the workspace {folder}: {error.strerror}: {error.filename}") from error
    return result


def _write_all(result: CreatedWorkspace) -> None:
    workspace = result.folder
    workspace.mkdir(parents=True, exist_ok=True)
    config = workspace / CONFIG_FILE
    # A symbolic link may be shared with other workspaces, and a file with mistakes is for its owner to correct.
    if os.path.lexists(config) and (config.is_symlink() or _load_if_valid(workspace) is None):
        result.kept.append(config)
    else:
        _write_file(result, config, _config_text(config).encode(), mode=0o666)
    script = scheduler_script(sys.executable).encode("utf-8", "surrogateescape")
    _write_file(result, workspace / SCRIPT, script, mode=0o777)
    loaded = _load_if_valid(workspace)
    named = [] if loaded is None else [Path(loaded.settings.config_dir), Path(loaded.settings.output_dir)]
    for folder in (path for path in named if workspace in path.parents and ".." not in path.parts):
        if os.path.lexists(folder):
            result.kept.append(folder)
        else:
            folder.mkdir(parents=True)
            result.created.append(folder)


def _write_file(result: CreatedWorkspace, path: Path, content: bytes, *, mode: int) -> None:
    if not os.path.lexists(path):
        result.created.append(path)
    elif not path.is_symlink() and path.read_bytes() == content:
        result.kept.append(path)
        return
    else:
        result.backed_up.append((path, _back_up(path)))
    # A file that is replaced keeps its permissions.
    before = path.stat().st_mode & 0o777 if path.is_file() and not path.is_symlink() else None
    write_atomically(path, content, mode=mode, exact_mode=None if before is None else before | (mode & 0o100))


def _load_if_valid(folder: Path) -> LoadedSettings | None:
    try:
        return load(folder)
    except UserError:
        return None


def _back_up(path: Path) -> Path:
    """Copy to the first unused name of NAME.bak, NAME.bak-2 and so on, and return its path."""
    for number in itertools.count(1):
        backup = path.with_name(f"{path.name}.bak" if number == 1 else f"{path.name}.bak-{number}")
        with contextlib.suppress(FileExistsError):
            if path.is_symlink():
                os.symlink(os.readlink(path), backup)
                break
            content = path.read_bytes()
            with open(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
            shutil.copystat(path, backup)
            break
    return backup


def scheduler_script(python: str) -> str:
    """Return `scheduler.sh` with the interpreter that it falls back on when `gpuyard` is not on PATH."""
    text = WRAPPER_TEMPLATE.read_text(encoding="utf-8")
    return text.replace("\npython=python3\n", f"\npython={shlex.quote(python)}\n", 1)


def _config_text(path: Path) -> str:
    """Return a new configuration with every key, most of them as a comment with the default; of an existing one, its
    text with the keys that it does not mention appended as comments."""
    template = CONFIG_TEMPLATE.read_text(encoding="utf-8")
    if not os.path.lexists(path):
        line = f"task_name: {json.dumps(default_task_name(path.parent), ensure_ascii=False)}"
        return template.replace('#task_name: ""'.ljust(37), line.ljust(37), 1)
    text = path.read_bytes().decode()
    mentioned = set(re.findall(r"^\s*#?\s*['\"]?(\w+)['\"]?\s*:", text, re.MULTILINE))
    lines = {line.lstrip("#").partition(":")[0]: f"#{line.lstrip('#')}\n" for line in template.splitlines()}
    missing = [line for key, line in lines.items() if key in SETTING_TYPES and key not in mentioned]
    if not missing:
        return text
    line_end = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{line_end}#\n# More settings, each with its default:\n{''.join(missing)}"
