"""The command that starts a task's runner in place of its program."""

from msgspec import to_builtins

from gpuyard.core.job.workspace_task import session_on
from gpuyard.engines.session import runner
from gpuyard.ports import Launch


def start_command(launch: Launch, sockets: str) -> tuple[str, ...]:
    """Return the launch's command, or for a task that of its runner. `sockets` is the folder of its socket."""
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
            "log_cap": launch.log_cap,
        }
    )
