"""Stop a sweep, or kill it. Both work also if the settings have a mistake: `settings` is None then."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpuyard.connect.fast_http import DaemonConnection, connect
from gpuyard.engines.session.tmux import Tmux
from gpuyard.recipes.workspace.scheduler_log import scheduler_log, write_scheduler_log
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.task_names import workspace_tag
from gpuyard.system.file_locks import locked

_KILL_TIMEOUT_S = 20.0


class KilledSweep(Struct, frozen=True, kw_only=True):
    """`left` are the configs of tasks that did not end within the timeout."""

    ended: int
    left: tuple[str, ...]
    sessions: tuple[str, ...]


class StoppedSweep(Struct, frozen=True, kw_only=True):
    cancelled: int
    running: int


def stop(workspace: Path, settings: WorkspaceSettings | None) -> StoppedSweep:
    """Cancel waiting tasks and start no more, retries included; running tasks continue to their end."""
    tag = workspace_tag(workspace)
    with locked(workspace), connect(start=True) as queue:
        queue.request("POST", "/tags/stop", body={"tag": tag}, is_repeatable=True)
        tasks = list_tasks(queue, tag)
        cancelled = _cancel(queue, [task for task in tasks if task["is_waiting"]])
        running = sum(task["is_live"] for task in tasks)
    _note(workspace, settings, f"stopped: {running} running, {cancelled} no longer waiting")
    return StoppedSweep(cancelled=cancelled, running=running)


def kill_all(workspace: Path, settings: WorkspaceSettings | None) -> KilledSweep:
    """Cancel all running and waiting tasks, wait up to 20 s for their end, and close the sessions."""
    tag, tmux = workspace_tag(workspace), Tmux(os.environ)
    with locked(workspace), connect(start=True) as queue:
        tasks = [task for task in list_tasks(queue, tag) if not task["is_finished"]]
        _cancel(queue, tasks)
        left = _wait_for(queue, tag, {task["id"] for task in tasks})
        sessions = _close_sessions(tmux, tag) if tmux.is_there() else ()
    _note(workspace, settings, f"killed: {len(tasks) - len(left)} ended, {len(sessions)} sessions closed")
    return KilledSweep(ended=len(tasks) - len(left), left=left, sessions=sessions)


def _note(workspace: Path, settings: WorkspaceSettings | None, text: str) -> None:
    if settings is not None:
        write_scheduler_log(scheduler_log(settings, workspace), text)


def list_tasks(queue: DaemonConnection, tag: str) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = queue.request("GET", "/tasks", {"tag": tag})["tasks"]
    return tasks


def _cancel(queue: DaemonConnection, tasks: Sequence[dict[str, Any]]) -> int:
    if not tasks:
        return 0
    ids = ",".join(str(task["id"]) for task in tasks)
    return int(queue.request("POST", "/jobs/cancel", body={"ids": ids}, is_repeatable=True)["count"])


def _wait_for(queue: DaemonConnection, tag: str, ids: set[int]) -> tuple[str, ...]:
    """Wait for these jobs to end. Return the configs of those that have not ended after the timeout."""
    if ids:
        queue.request("GET", "/wait", {"ids": ",".join(map(str, sorted(ids))), "timeout": str(_KILL_TIMEOUT_S)})
    return tuple(task["config"] for task in list_tasks(queue, tag) if task["id"] in ids and not task["is_finished"])


def _close_sessions(tmux: Tmux, tag: str) -> tuple[str, ...]:
    owned = [(name, owner) for owner, names in tmux.owned_sessions(f"{tag}/").items() for name in names]
    for name, owner in owned:
        tmux.kill_session(name, owner)
    return tuple(sorted(name for name, _ in owned))
