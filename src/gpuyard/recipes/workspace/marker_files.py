"""Markers of completed tasks, records of how attempts ended, and the folders that hold them."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.workspace.settings import WorkspaceSettings

_OWN_FOLDER = ".gpuyard"


def marker_path(settings: WorkspaceSettings, config: str) -> Path:
    return Path(settings.output_dir) / f"{config}_completed.txt"


def record_path(workspace: Path, config: str) -> Path:
    return workspace / _OWN_FOLDER / "ends" / f"{config}.json"


def read_record(path: Path, task: dict[str, Any]) -> dict[str, Any]:
    """Return the record of the task's last attempt; empty if there is none, or if it is from another attempt."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    is_its_own = isinstance(record, dict) and (record.get("job"), record.get("attempt")) == (
        task["id"],
        task["attempt"],
    )
    return record if is_its_own else {}


def lacks_marker(record: dict[str, Any]) -> bool:
    """Whether the task completed but its marker could not be written."""
    return record.get("result") == "completed" and record.get("marker_by") is None


def make_folders(workspace: Path, settings: WorkspaceSettings) -> None:
    folders = [workspace / _OWN_FOLDER / "ends", Path(settings.output_dir)]
    for folder in [*folders, Path(settings.log_dir)] if settings.enable_logging else folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"cannot create the folder {folder}: {error.strerror}") from error


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
