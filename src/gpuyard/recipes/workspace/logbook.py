"""The scheduler's log of a workspace: a line for whatever becomes of its tasks."""

import os
import time

from gpuyard.engines.private import PrivateFileError, open_in_shared
from gpuyard.recipes.workspace.settings import Settings


def scheduler_log(settings: Settings) -> str | None:
    return f"{settings.log_dir}/{settings.task_name}_scheduler.log" if settings.enable_logging else None


def note(settings: Settings, text: str) -> str | None:
    """Why it could not be written, where it could not: nothing else depends on it."""
    path = scheduler_log(settings)
    if path is None:
        return None
    try:
        descriptor = open_in_shared(path)
    except PrivateFileError as error:
        return str(error)
    try:
        os.write(descriptor, os.fsencode(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"))
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    finally:
        os.close(descriptor)
    return None
