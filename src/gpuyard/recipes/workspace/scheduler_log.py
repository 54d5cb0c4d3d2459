"""The scheduler's log of a workspace: a line for whatever becomes of its tasks."""

import os
from pathlib import Path

from gpuyard.engines.session.task_files import append_event, claim_in_shared, owner_line
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.task_names import tag_of
from gpuyard.system.private_files import PrivateFileError


def has_own_logs(settings: WorkspaceSettings, workspace: Path) -> bool:
    """Whether `log_dir` is inside the workspace, where no other one writes logs."""
    return Path(os.path.realpath(settings.log_dir)).is_relative_to(os.path.realpath(workspace))


def scheduler_log(settings: WorkspaceSettings, workspace: Path) -> str | None:
    """Return its path: by the task's name, else by the workspace's tag where the former is another workspace's."""
    if not settings.enable_logging:
        return None
    path = f"{settings.log_dir}/{settings.task_name}_scheduler.log"
    if has_own_logs(settings, workspace):
        return path
    tag = tag_of(workspace)
    try:
        is_own = claim_in_shared(path, owner_line(tag, str(workspace)))
    except PrivateFileError:
        is_own = False  # another user's, or nothing that can be written to
    return path if is_own else f"{settings.log_dir}/{tag}_scheduler.log"


def note(path: str | None, text: str) -> str | None:
    """Return why it could not be written, or None: nothing else depends on it."""
    try:
        if path is not None:
            append_event(path, text)
    except PrivateFileError as error:
        return f"no log of the scheduler: {error}"
    return None
