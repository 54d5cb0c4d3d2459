"""What the keeper starts in place of a task's program: the runner that shows it in a session and minds its marker."""

import contextlib
import os

from msgspec import to_builtins

from gpuyard.core.job.workspace_task import session_on
from gpuyard.engines.session import runner
from gpuyard.ports import Launch


def forget_sockets(sockets: str, key: str) -> None:
    """A runner that was killed has left its own behind."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{sockets}/{key}.sock")


def words_of(launch: Launch, sockets: str) -> tuple[str, ...]:
    """`sockets` is a folder for what the runner and those who look at it have to say to each other."""
    task = launch.task
    if task is None:
        return launch.command
    return runner.command(
        {
            **to_builtins(task),
            "command": list(launch.command),
            "key": f"{launch.job_id}.{launch.attempt}",
            "job": launch.job_id,
            "attempt": launch.attempt,
            "sockets": sockets,
            "gpu": launch.place,
            "session": session_on(task, launch.place),
        }
    )
