"""The names of a workspace and its tasks in the queue and in tmux, and the files of tasks: markers, records, logs. A
config is named after its file without the last suffix. A name that must be changed for tmux or for a file gets a few
digits of the original's digest, so that different names stay different.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpuyard.engines.session.task_files import append_event, claim_in_shared, expected_log, owner_line
from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.workspace.settings import TRAIN_LOGS, WorkspaceSettings
from gpuyard.recipes.workspace.yaml_settings import LONGEST_LABEL, has_control_characters
from gpuyard.system.private_files import PrivateFileError


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
