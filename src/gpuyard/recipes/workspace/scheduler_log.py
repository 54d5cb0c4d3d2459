"""The scheduler log of a workspace: one line for each thing that happens to its tasks."""

import os
from pathlib import Path

from gpuyard.engines.session.task_files import append_event, claim_in_shared, owner_line
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.task_names import workspace_tag
from gpuyard.system.private_files import PrivateFileError


def has_own_logs(settings: WorkspaceSettings, workspace: Path) -> bool:
    """Whether `log_dir` is inside the workspace, so that no other workspace writes logs there."""
    return Path(os.path.realpath(settings.log_dir)).is_relative_to(os.path.realpath(workspace))


def scheduler_log(settings: WorkspaceSettings, workspace: Path) -> str | None:
    """Return the log's path, or None if logging is off.

    It is named after the task name, or after the workspace's tag if another workspace uses the first name.
    """
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
