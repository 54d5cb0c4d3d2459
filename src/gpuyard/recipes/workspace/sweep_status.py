"""How a workspace stands: each config by its marker first, then by its job; and how long the rest may take."""

import heapq
import os
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from gpuyard.connect.retrying import RetryingClient
from gpuyard.recipes.workspace.marker_files import could_not_mark, marker_of, record_for, record_of
from gpuyard.recipes.workspace.select_configs import configs_of
from gpuyard.recipes.workspace.settings import Loaded
from gpuyard.recipes.workspace.task_names import config_name, tag_of

_TAIL_BYTES = 4096
_LONGER = 0.1
_LIVE = {
    "running": "running",
    "stopping": "stopping",
    "suspending": "suspended",
    "suspended": "suspended",
    "resuming": "suspended",
}
_OTHERS = {
    "pending": "pending",
    "queued": "waiting",
    "blocked": "waiting",
    "delayed": "retrying",
    "held": "held",
    "succeeded": "completed",
    "failed": "failed",
    "rejected": "failed",
    "cancelled": "stopped",
}
# A config that is gone is of interest while its task is under way, and where that failed.
_FORGOTTEN = frozenset({"succeeded", "cancelled"})
_UNDER_WAY = frozenset({"running", "finishing", "stopping", "suspended"})
_WAITING = frozenset({"waiting", "pending", "retrying", "held"})


class ConfigStatus(Struct, frozen=True, kw_only=True):
    """`note` is a reason, or what is remarkable about its end."""

    config: str
    state: str
    gpu: str | None = None
    seconds: float | None = None
    memory_mb: float | None = None
    attempt: int = 0
    job: int | None = None
    session: str | None = None
    log: str | None = None
    last_line: str | None = None
    note: str | None = None
    likely_s: float | None = None


class SweepStatus(Struct, frozen=True, kw_only=True):
    """`left_s` is how long the rest may take, where that is known; `why` is what the next one waits for."""

    workspace: str
    task_name: str
    tag: str
    rows: tuple[ConfigStatus, ...]
    is_stopped: bool = False
    is_paused: bool = False
    left_s: float | None = None
    why: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return len(self.rows)

    @property
    def completed(self) -> int:
        return self._count({"completed"})

    @property
    def running(self) -> int:
        return self._count(_UNDER_WAY)

    @property
    def waiting(self) -> int:
        return self._count(_WAITING)

    @property
    def failed(self) -> int:
        return self._count({"failed"})

    @property
    def not_started(self) -> int:
        """Those that were stopped before they were done, too."""
        return self._count({"not started", "stopped"})

    @property
    def is_over(self) -> bool:
        return not self.running and not self.waiting

    def _count(self, states: Iterable[str]) -> int:
        wanted = set(states)
        return sum(row.state in wanted for row in self.rows)


def standing_of(loaded: Loaded, queue: RetryingClient) -> SweepStatus:
    tag = tag_of(loaded.workspace)
    told = queue.get("/tasks", {"tag": tag})
    tasks = {task["config"]: task for task in told["tasks"]}
    names = [config_name(path) for path in configs_of(loaded.settings)]
    gone = [name for name, task in tasks.items() if name not in names and task["state"] not in _FORGOTTEN]
    rows = tuple(_row(loaded, name, tasks.get(name), is_stopped=told["stopped"]) for name in [*names, *gone])
    return SweepStatus(
        workspace=str(loaded.workspace),
        task_name=loaded.settings.task_name,
        tag=tag,
        rows=rows,
        is_stopped=told["stopped"],
        is_paused=told["paused"],
        left_s=left_s(rows),
        why=_why(told, tasks),
    )


def _row(loaded: Loaded, config: str, task: dict[str, Any] | None, *, is_stopped: bool) -> ConfigStatus:
    is_marked = os.path.lexists(marker_of(loaded.settings, config))
    if task is None:
        return ConfigStatus(config=config, state="completed" if is_marked else "not started")
    record = record_for(record_of(loaded.workspace, config), task)
    state = _state(task, is_marked=is_marked, is_stopped=is_stopped)
    indexes = ["?" if index is None else str(index) for index in task["gpu_indexes"]]
    return ConfigStatus(
        config=config,
        state=state,
        gpu=",".join(indexes) or task["place"],
        seconds=task["elapsed_s"],
        memory_mb=task["peak_mb"] if task["memory_mb"] is None else task["memory_mb"],
        attempt=task["attempt"],
        job=task["id"],
        session=record.get("session"),
        log=record.get("log") or task["log"],
        last_line=_last_line(task["log"]),
        note=_note(task, record, state, is_marked=is_marked),
        likely_s=task["likely_s"],
    )


def _state(task: dict[str, Any], *, is_marked: bool, is_stopped: bool) -> str:
    if task["is_live"]:
        return "finishing" if is_marked else _LIVE[task["state"]]
    if is_marked:
        return "completed"
    return "stopped" if is_stopped and task["is_waiting"] else _OTHERS[task["state"]]


def _note(task: dict[str, Any], record: dict[str, Any], state: str, *, is_marked: bool) -> str | None:
    told: str | None = record.get("note")
    if state == "completed" and not is_marked and not could_not_mark(record):
        return "its marker is gone: start runs it again"
    if state == "completed" or task["is_live"]:
        return told
    reason: str | None = task["reason"]
    return f"{reason}: {told}" if reason and told else reason


def _last_line(log: str | None) -> str | None:
    """What it wrote last, as a terminal would show it: of a line that was written over, the last."""
    try:
        with open(log or "", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return lines[-1].strip() if lines else None


def _why(told: dict[str, Any], tasks: dict[str, dict[str, Any]]) -> str | None:
    if told["paused"]:
        return "the queue is paused: `gpuyard unpause` lets it go on"
    waiting = [task for task in tasks.values() if task["is_waiting"] and task["reason"]]
    first = min(waiting, key=lambda task: (task["state"] != "queued", -task["priority"], task["id"]), default=None)
    return None if first is None else f"{first['config']} waits: {first['reason']}"


def _rest_s(row: ConfigStatus) -> float:
    """One that takes longer than its like did is not about to end for that."""
    likely_s, seconds = row.likely_s or 0.0, row.seconds or 0.0
    return max(likely_s - seconds, _LONGER * seconds)


def left_s(rows: Sequence[ConfigStatus]) -> float | None:
    """If the rest takes as long as its like did, as many at a time as now; `None` where anything of that is unknown."""
    under_way = [row for row in rows if row.state in _UNDER_WAY]
    waiting = [row for row in rows if row.state in _WAITING]
    if not under_way and not waiting:
        return 0.0
    if not under_way or any(row.likely_s is None for row in (*under_way, *waiting)):
        return None
    ends = [_rest_s(row) for row in under_way]
    heapq.heapify(ends)
    for row in waiting:
        heapq.heapreplace(ends, ends[0] + (row.likely_s or 0.0))
    return max(ends)
