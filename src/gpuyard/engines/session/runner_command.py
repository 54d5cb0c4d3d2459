"""The command that starts a task's runner in place of its program."""

import json
from collections.abc import Mapping

from msgspec import to_builtins

from gpuyard.core.job.workspace_task import session_on
from gpuyard.ports import Launch
from gpuyard.system.python_command import python_command


def start_command(launch: Launch, sockets: str) -> tuple[str, ...]:
    """Return the launch's command, or for a task that of its runner. `sockets` is the folder of its socket."""
    task = launch.task
    if task is None:
        return launch.command
    spec = {
        **to_builtins(task),
        "command": list(launch.command),
        "key": launch.key,
        "job": launch.job_id,
        "attempt": launch.attempt,
        "sockets": sockets,
        "gpu": launch.place,
        "retried": launch.retried,
        "session": session_on(task, launch.place),
        "log_cap": launch.log_cap,
    }
    return runner_command(spec)


def runner_command(spec: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command that starts a runner. `spec` has the fields of a RunnerSpec."""
    return python_command("gpuyard.engines.session.runner", json.dumps(spec))
