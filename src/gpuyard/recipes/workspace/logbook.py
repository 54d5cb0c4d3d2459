"""The scheduler's log of a workspace: a line for whatever becomes of its tasks."""

from gpuyard.engines.private import PrivateFileError
from gpuyard.engines.session_logs import tell
from gpuyard.recipes.workspace.settings import Settings


def scheduler_log(settings: Settings) -> str | None:
    return f"{settings.log_dir}/{settings.task_name}_scheduler.log" if settings.enable_logging else None


def note(settings: Settings, text: str) -> str | None:
    """Why it could not be written, where it could not: nothing else depends on it."""
    path = scheduler_log(settings)
    try:
        if path is not None:
            tell(path, text)
    except PrivateFileError as error:
        return f"no log of the scheduler: {error}"
    return None
