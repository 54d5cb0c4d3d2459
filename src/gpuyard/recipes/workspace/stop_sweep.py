"""How a sweep is stopped, and how all of it is ended: also where its settings have a mistake, and are `None`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpuyard.connect.fast_http import DaemonConnection, connect
from gpuyard.engines.session.tmux import Tmux
from gpuyard.recipes.workspace.scheduler_log import note, scheduler_log
from gpuyard.recipes.workspace.settings import WorkspaceSettings
from gpuyard.recipes.workspace.task_names import tag_of
from gpuyard.system.atomic_files import locked

_ENDS_WITHIN_S = 20.0


class Killed(Struct, frozen=True, kw_only=True):
    """`left` are configs whose tasks have not ended in time."""

    ended: int
    left: tuple[str, ...]
    sessions: tuple[str, ...]


class StoppedSweep(Struct, frozen=True, kw_only=True):
    cancelled: int
    running: int


def stop(workspace: Path, settings: WorkspaceSettings | None) -> StoppedSweep:
    """What runs comes to its end; nothing new starts, whatever becomes of it."""
    tag = tag_of(workspace)
    with locked(workspace), connect(start=True) as queue:
        queue.request("POST", "/tags/stop", body={"tag": tag}, is_repeatable=True)
        tasks = tasks_of(queue, tag)
        cancelled = _cancel(queue, [task for task in tasks if task["is_waiting"]])
        running = sum(task["is_live"] for task in tasks)
    _note(workspace, settings, f"stopped: {running} running, {cancelled} no longer waiting")
    return StoppedSweep(cancelled=cancelled, running=running)


def kill_all(workspace: Path, settings: WorkspaceSettings | None) -> Killed:
    """Ends all that runs or waits, and closes the sessions."""
    tag, tmux = tag_of(workspace), Tmux(os.environ)
    with locked(workspace), connect(start=True) as queue:
        tasks = [task for task in tasks_of(queue, tag) if not task["is_finished"]]
        _cancel(queue, tasks)
        left = _wait_for(queue, tag, {task["id"] for task in tasks})
        sessions = _close_sessions(tmux, tag) if tmux.is_there() else ()
    _note(workspace, settings, f"killed: {len(tasks) - len(left)} ended, {len(sessions)} sessions closed")
    return Killed(ended=len(tasks) - len(left), left=left, sessions=sessions)


def _note(workspace: Path, settings: WorkspaceSettings | None, text: str) -> None:
    if settings is not None:
        note(scheduler_log(settings, workspace), text)


def tasks_of(queue: DaemonConnection, tag: str) -> list[dict[str, Any]]:
    tasks: list[dict[str, Any]] = queue.request("GET", "/tasks", {"tag": tag})["tasks"]
    return tasks


def _cancel(queue: DaemonConnection, tasks: Sequence[dict[str, Any]]) -> int:
    if not tasks:
        return 0
    ids = ",".join(str(task["id"]) for task in tasks)
    return int(queue.request("POST", "/jobs/cancel", body={"ids": ids}, is_repeatable=True)["count"])


def _wait_for(queue: DaemonConnection, tag: str, ids: set[int]) -> tuple[str, ...]:
    """Those that are still there after the time in which they are made to end."""
    if ids:
        asked = {"ids": ",".join(map(str, sorted(ids))), "timeout": str(_ENDS_WITHIN_S)}
        queue.request("GET", "/wait", asked)
    return tuple(task["config"] for task in tasks_of(queue, tag) if task["id"] in ids and not task["is_finished"])


def _close_sessions(tmux: Tmux, tag: str) -> tuple[str, ...]:
    owned = [(name, owner) for owner, names in tmux.owned_sessions(f"{tag}/").items() for name in names]
    for name, owner in owned:
        tmux.kill_session(name, owner)
    return tuple(sorted(name for name, _ in owned))
