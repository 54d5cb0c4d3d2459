"""The status of a sweep: the state of each config, from its marker first and then its job, and the time left. As a job
of the queue, this module runs a workspace's `notify` command when all submitted tasks have finished."""

import heapq
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpuyard.client.retrying import RetryingClient
from gpuyard.errors import GpuyardError
from gpuyard.recipes.workspace import workspace_files as files
from gpuyard.recipes.workspace.prepare_sweep import find_configs
from gpuyard.recipes.workspace.settings import LoadedSettings, load

# Other states keep their names.
_STATES = {
    **dict.fromkeys(("suspending", "suspended", "resuming"), "suspended"),
    **dict.fromkeys(("queued", "blocked"), "waiting"),
    "delayed": "retrying",
    "succeeded": "completed",
    "rejected": "failed",
    "cancelled": "stopped",
}
# The task succeeded, and its marker has gone since.
NO_MARKER = "no marker"
_RUNNING = {"running", "finishing", "stopping", "suspended"}
_WAITING = {"waiting", "pending", "retrying", "held"}


class ConfigStatus(Struct, frozen=True, kw_only=True):
    """The status of one config. `note` is a reason or a remark about how its task ended."""

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
    """`left_s` is the estimated time left, None if unknown; `why` is the reason that the next task waits."""

    workspace: str
    task_name: str
    tag: str
    rows: tuple[ConfigStatus, ...]
    is_stopped: bool = False
    is_paused: bool = False
    left_s: float | None = None
    why: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        """The counts of `status --json`."""
        kinds = {"completed": {"completed"}, "running": _RUNNING, "waiting": _WAITING, "failed": {"failed"}}
        kinds["not_started"] = {"not started", "stopped", NO_MARKER}
        counts = {kind: sum(row.state in states for row in self.rows) for kind, states in kinds.items()}
        return {"total": len(self.rows), **counts}

    @property
    def is_over(self) -> bool:
        return not any(row.state in _RUNNING | _WAITING for row in self.rows)


def read_sweep_status(loaded: LoadedSettings, queue: RetryingClient) -> SweepStatus:
    tag = files.workspace_tag(loaded.workspace)
    response = queue.get("/tasks", {"tag": tag})
    tasks = {task["config"]: task for task in response["tasks"]}
    names = [path.stem for path in find_configs(loaded.settings)]
    hidden = ("succeeded", "cancelled")  # once their config file is gone
    gone = [name for name, task in tasks.items() if name not in names and task["state"] not in hidden]
    rows = tuple(_row(loaded, name, tasks.get(name), is_stopped=response["stopped"]) for name in [*names, *gone])
    why = "the queue is paused: `gpuyard unpause` resumes it" if response["paused"] else None
    waiting = [task for task in tasks.values() if task["is_waiting"] and task["reason"]]
    if why is None and waiting:
        first = min(waiting, key=lambda task: (task["state"] != "queued", -task["priority"], task["id"]))
        why = f"{first['config']} waits: {first['reason']}"
    return SweepStatus(
        workspace=str(loaded.workspace),
        task_name=loaded.settings.task_name,
        tag=tag,
        rows=rows,
        is_stopped=response["stopped"],
        is_paused=response["paused"],
        left_s=estimate_left_s(rows),
        why=why,
    )


def _row(loaded: LoadedSettings, config: str, task: dict[str, Any] | None, *, is_stopped: bool) -> ConfigStatus:
    is_marked = os.path.lexists(files.marker_path(loaded.settings, config))
    if task is None:
        return ConfigStatus(config=config, state="completed" if is_marked else "not started")
    record = files.read_record(loaded.workspace, task)
    state = _state(task, is_marked=is_marked, is_stopped=is_stopped)
    if state == "completed" and not is_marked and not files.lacks_marker(record):
        state = NO_MARKER
    # The runner of a task that has just started has not recorded its log yet.
    is_new = task["is_live"] and not record
    log = files.likely_log(loaded.settings, loaded.workspace, config) if is_new else record.get("log")
    indexes = [label or "?" for label in task["gpu_labels"]]
    return ConfigStatus(
        config=config,
        state=state,
        gpu=",".join(indexes) or task["place"],
        seconds=task["elapsed_s"],
        memory_mb=task["peak_mb"] if task["memory_mb"] is None else task["memory_mb"],
        attempt=task["attempt"],
        job=task["id"],
        session=record.get("session"),
        log=log or task["log"],
        last_line=_last_line(task["log"]),
        note=_note(task, record, state),
        likely_s=task["likely_s"],
    )


def _state(task: dict[str, Any], *, is_marked: bool, is_stopped: bool) -> str:
    state: str = _STATES.get(task["state"], task["state"])
    if task["is_live"]:
        return "finishing" if is_marked else state
    if is_marked:
        return "completed"
    return "stopped" if is_stopped and task["is_waiting"] else state


def _note(task: dict[str, Any], record: dict[str, Any], state: str) -> str | None:
    recorded: str | None = record.get("note")
    if state == NO_MARKER:
        return "it completed, but its marker is gone: start runs it again"
    if state == "completed" or task["is_live"]:
        return recorded
    reason: str | None = task["reason"]
    return f"{reason}: {recorded}" if reason and recorded and recorded not in reason else reason


def _last_line(log: str | None) -> str | None:
    """Return the last line of a log as a terminal shows it: only the last text of a line rewritten with \\r."""
    try:
        with open(log or "", "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    lines = [line for line in text.replace("\r", "\n").split("\n") if line.strip()]
    return lines[-1].strip() if lines else None


def estimate_left_s(rows: Sequence[ConfigStatus]) -> float | None:
    """Estimate the time left if tasks take as long as similar ones did and as many run at once as now; None if
    unknown."""
    running = [row for row in rows if row.state in _RUNNING]
    waiting = [row for row in rows if row.state in _WAITING]
    if not running and not waiting:
        return 0.0
    if not running or any(row.likely_s is None for row in (*running, *waiting)):
        return None
    # An overdue task is expected to need 10% of its time so far.
    ends = [max((row.likely_s or 0.0) - (row.seconds or 0.0), 0.1 * (row.seconds or 0.0)) for row in running]
    heapq.heapify(ends)
    for row in waiting:
        heapq.heapreplace(ends, ends[0] + (row.likely_s or 0.0))
    return max(ends)


def main() -> None:
    workspace, config_file = map(Path, sys.argv[1:3])
    try:
        loaded = load(workspace, config_file)
        with RetryingClient() as queue:
            status = read_sweep_status(loaded, queue)
    except GpuyardError as error:
        sys.exit(f"gpuyard: {error}")
    counts = status.counts
    facts = [f"{counts['completed']} of {counts['total']} completed"]
    facts += [
        f"{counts[kind]} {what}" for kind, what in (("failed", "failed"), ("not_started", "not done")) if counts[kind]
    ]
    own = {"GPUYARD_WORKSPACE": str(workspace), "GPUYARD_TASK_NAME": loaded.settings.task_name}
    environment = {**os.environ, **own, "GPUYARD_SUMMARY": ", ".join(facts)}
    sys.exit(subprocess.run(loaded.settings.notify or ("true",), env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
