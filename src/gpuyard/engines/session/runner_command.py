"""The command that starts a task's runner in place of its program."""

import contextlib
import os

from msgspec import to_builtins

from gpuyard.core.job.workspace_task import session_on
from gpuyard.engines.session import runner
from gpuyard.ports import Launch


def remove_socket(sockets: str, key: str) -> None:
    """Remove the socket that a killed runner left behind."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{sockets}/{key}.sock")


def start_command(launch: Launch, sockets: str) -> tuple[str, ...]:
    """Return the launch's command, or for a task the command of its runner.

    `sockets` is the folder for the socket between the runner and its viewers.
    """
    task = launch.task
    if task is None:
        return launch.command
    return runner.command(
        {
            **to_builtins(task),
            "command": list(launch.command),
            "key": launch.key,
            "job": launch.job_id,
            "attempt": launch.attempt,
            "sockets": sockets,
            "gpu": launch.place,
            "session": session_on(task, launch.place),
        }
    )
