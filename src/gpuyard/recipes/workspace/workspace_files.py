"""The names of a workspace and its tasks in the queue and in tmux, and the files of tasks: markers, records, logs. A
name that must be changed for tmux or for a file gets a few digits of the original's digest, so that different names
stay different.

Creating a workspace never loses existing work: a configuration keeps its text, and new keys are appended as comments; a
file is copied under an unused name before it is replaced."""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpuyard.engines.session.task_files import append_event, claim_in_shared, expected_log, owner_line
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import (
    CONFIG_FILE,
    SETTING_TYPES,
    TRAIN_LOGS,
    LoadedSettings,
    WorkspaceSettings,
    default_task_name,
    load,
)
from gpuyard.recipes.workspace.yaml_settings import LONGEST_LABEL, has_control_characters
from gpuyard.system.private_files import PrivateFileError
from gpuyard.system.write_files import write_atomically


def check_config_names(paths: Sequence[Path]) -> None:
    known: dict[str, Path] = {}
    for path in paths:
        name = path.stem
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UserError(f"the name of the config {path.name!a} is not UTF-8", hint="rename it")
        if has_control_characters(name):
            raise UserError(f"the name of the config {path.name!r} has control characters in it", hint="rename it")
        if len(name.encode()) > LONGEST_LABEL:
            hint = f"at most {LONGEST_LABEL} bytes without the suffix"
            raise UserError(f"the name of the config {path.name} is too long", hint=hint)
        if name in known:
            hint = "rename one: marker, log and session are named after the file without its suffix"
            raise UserError(f"{known[name].name} and {path.name} have the same name '{name}'", hint=hint)
        known[name] = path


def workspace_tag(workspace: Path) -> str:
    """Return the tag of a workspace: the same through any symbolic link, and different for each folder."""
    real = os.path.realpath(workspace)
    return f"{slug(os.path.basename(real))}-{_digest(real, 6)}"


def session_name(prefix: str, config: str) -> str:
    return f"{tmux_name(f'{prefix}_{config}')}_{{gpu}}"


def tmux_name(name: str) -> str:
    """Return a safe session name: tmux gives `:`, `.`, `=`, `$` and `@` a meaning of its own."""
    return slug(name, "_-")


def slug(name: str, others: str = "_-.") -> str:
    """Return a safe part of a file name or a job name: unchanged if it is short and has only letters, digits and
    `others`. Else all other characters become `_`, and a first one that would make an option or a hidden file; and it
    is cut."""
    kept = "".join(letter if letter.isalnum() or letter in others else "_" for letter in name)
    kept = f"_{kept[1:]}" if kept[:1] in ("", "-", ".") else kept
    # In bytes: the name of a log combines it with LONGEST_LABEL and a few more, and a file name may have 255.
    if kept == name and len(kept.encode()) <= 60:
        return kept
    return f"{kept.encode()[:55].decode(errors='ignore')}-{_digest(name, 4)}"


def _digest(text: str, digits: int) -> str:
    return hashlib.blake2b(os.fsencode(text)).hexdigest()[:digits]


def marker_path(settings: WorkspaceSettings, config: str) -> Path:
    return Path(settings.output_dir) / f"{config}_completed.txt"


def record_path(workspace: Path, config: str) -> Path:
    return workspace / ".gpuyard" / "ends" / f"{config}.json"


def read_record(workspace: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the task's last attempt; empty if there is none, or if it is from another attempt."""
    try:
        record = json.loads(record_path(workspace, task["config"]).read_bytes())
    except (OSError, ValueError):
        return {}
    attempt = (task["id"], task["attempt"])
    is_its_own = isinstance(record, dict) and (record.get("job"), record.get("attempt")) == attempt
    return record if is_its_own else {}


def lacks_marker(record: dict[str, Any]) -> bool:
    """Whether the task completed but its marker could not be written."""
    return record.get("result") == "completed" and record.get("marker_by") is None


def make_folders(workspace: Path, settings: WorkspaceSettings) -> None:
    folders = [record_path(workspace, "").parent, Path(settings.output_dir)]
    for folder in [*folders, Path(settings.log_dir)] if settings.enable_logging else folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = "set output_dir and log_dir to folders that you can write to"
            raise EnvironmentFault(f"cannot create the folder {folder}: {error.strerror}", hint=hint) from error
    if settings.enable_logging:
        with contextlib.suppress(OSError):  # the runner of each task reports a folder that it cannot use
            os.mkdir(f"{settings.log_dir}/{TRAIN_LOGS}", 0o700)


@contextlib.contextmanager
def without_marker(marker: Path) -> Iterator[None]:
    """Remove the marker before its task is submitted again; restore it if the submission raises."""
    aside = marker.with_name(f".{marker.name}.before")
    try:
        if os.path.lexists(marker):
            marker.replace(aside)
        else:
            aside.unlink(missing_ok=True)  # left by a command that was killed here
    except OSError as error:
        raise EnvironmentFault(f"cannot remove the marker {marker}: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if os.path.lexists(aside):
            aside.replace(marker)
        raise
    aside.unlink(missing_ok=True)


def has_own_logs(settings: WorkspaceSettings, workspace: Path) -> bool:
    """Whether `log_dir` is inside the workspace, so that no other workspace writes logs there."""
    return Path(os.path.realpath(settings.log_dir)).is_relative_to(os.path.realpath(workspace))


def task_logs(settings: WorkspaceSettings, workspace: Path, config: str) -> tuple[str | None, str | None]:
    """Return the path of a task's log, and the one to use if that belongs to another workspace; None without either."""
    if not settings.enable_logging:
        return None, None
    folder = f"{settings.log_dir}/{TRAIN_LOGS}"
    other = None if has_own_logs(settings, workspace) else f"{folder}/{workspace_tag(workspace)}_{config}.log"
    return f"{folder}/{config}.log", other


def likely_log(settings: WorkspaceSettings, workspace: Path, config: str) -> str | None:
    path, other = task_logs(settings, workspace, config)
    return None if path is None else expected_log(path, other, owner_line(workspace_tag(workspace), str(workspace)))


def scheduler_log(settings: WorkspaceSettings, workspace: Path) -> str | None:
    """Return the log's path, or None if logging is off: by the task's name, or by the workspace's tag if that is
    taken."""
    if not settings.enable_logging:
        return None
    path = f"{settings.log_dir}/{settings.task_name}_scheduler.log"
    if has_own_logs(settings, workspace):
        return path
    tag = workspace_tag(workspace)
    try:
        is_own = claim_in_shared(path, owner_line(tag, str(workspace)))
    except PrivateFileError:
        is_own = False  # another user's file, or not writable
    return path if is_own else f"{settings.log_dir}/{tag}_scheduler.log"


def write_scheduler_log(path: str | None, text: str) -> str | None:
    """Append a line. Return a message if it could not be written, else None: nothing else depends on this log."""
    try:
        if path is not None:
            append_event(path, text)
    except PrivateFileError as error:
        return f"cannot write the scheduler log: {error}"
    return None


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
