"""The files of a workspace that are not its user's own: markers, records of ends, and the folder that these are in."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuyard.errors import EnvironmentFault
from gpuyard.recipes.workspace.settings import WorkspaceSettings

_OWN_FOLDER = ".gpuyard"


def marker_of(settings: WorkspaceSettings, config: str) -> Path:
    return Path(settings.output_dir) / f"{config}_completed.txt"


def record_of(workspace: Path, config: str) -> Path:
    return workspace / _OWN_FOLDER / "ends" / f"{config}.json"


def record_for(path: Path, task: dict[str, Any]) -> dict[str, Any]:
    """What the task's last attempt left behind; nothing where that is another's."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    is_its_own = isinstance(record, dict) and (record.get("job"), record.get("attempt")) == (
        task["id"],
        task["attempt"],
    )
    return record if is_its_own else {}


def could_not_mark(record: dict[str, Any]) -> bool:
    """Whether a task is done whose marker could not be written."""
    return record.get("result") == "completed" and record.get("marker_by") is None


def make_folders(workspace: Path, settings: WorkspaceSettings) -> None:
    folders = [workspace / _OWN_FOLDER / "ends", Path(settings.output_dir)]
    for folder in [*folders, Path(settings.log_dir)] if settings.enable_logging else folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"{folder} cannot be made: {error.strerror}") from error


@contextlib.contextmanager
def unmarked(marker: Path) -> Iterator[None]:
    """One that runs again is not completed, from before it could start; one that is refused is as it was."""
    aside = marker.with_name(f".{marker.name}.before")
    try:
        if os.path.lexists(marker):
            marker.replace(aside)
        else:
            aside.unlink(missing_ok=True)  # of one who was killed in here
    except OSError as error:
        raise EnvironmentFault(f"{marker} cannot be removed: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if os.path.lexists(aside):
            aside.replace(marker)
        raise
    aside.unlink(missing_ok=True)
