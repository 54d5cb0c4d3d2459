"""The status of a workspace: markers take precedence over jobs, and the time left is given only if known."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpuyard.recipes.workspace.settings import LoadedSettings, load
from gpuyard.recipes.workspace.sweep_status import ConfigStatus, SweepStatus, estimate_left_s, read_sweep_status

DEFAULTS: dict[str, Any] = {
    "id": 1, "state": "queued", "is_live": False, "is_waiting": True, "is_finished": False, "reason": None,
    "attempt": 0, "priority": 0, "gpu_labels": [], "place": None, "elapsed_s": None, "likely_s": None,
    "memory_mb": None, "peak_mb": None, "log": None,
}  # fmt: skip


class Queue:
    """A daemon that answers with these tasks."""

    def __init__(self, *tasks: dict[str, Any], **fields: Any) -> None:
        self._answer = {"stopped": False, "paused": False, "tasks": list(tasks), **fields}

    def get(self, path: str, query: dict[str, str] | None = None, timeout_s: float = 0.0) -> dict[str, Any]:
        assert path == "/tasks"
        return self._answer


def task(config: str, state: str, **fields: Any) -> dict[str, Any]:
    live = state in ("running", "stopping", "suspending", "suspended", "resuming")
    over = state in ("succeeded", "failed", "cancelled", "rejected")
    how = {"is_live": live, "is_finished": over, "is_waiting": not live and not over}
    return {**DEFAULTS, "config": config, "state": state, **how, **fields}


@pytest.fixture
def workspace(tmp_path: Path) -> LoadedSettings:
    folder = tmp_path / "w"
    for name in ("configs", "out", ".gpuyard/ends"):
        (folder / name).mkdir(parents=True)
    (folder / "scheduler_config.yml").write_text("task_name: w\n")
    for name in ("a", "b"):
        (folder / "configs" / f"{name}.yml").write_text("")
    return load(folder)


def status_of(workspace: LoadedSettings, *tasks: dict[str, Any], **fields: Any) -> SweepStatus:
    return read_sweep_status(workspace, Queue(*tasks, **fields))  # type: ignore[arg-type]


def mark(workspace: LoadedSettings, config: str) -> None:
    (workspace.workspace / "out" / f"{config}_completed.txt").write_text("done\n")


def states(status: SweepStatus) -> dict[str, str]:
    return {row.config: row.state for row in status.rows}


@pytest.mark.parametrize(
    ("state", "unmarked", "marked"),
    [
        ("running", "running", "finishing"),
        ("stopping", "stopping", "finishing"),
        ("suspended", "suspended", "finishing"),
        ("queued", "waiting", "completed"),
        ("blocked", "waiting", "completed"),
        ("delayed", "retrying", "completed"),
        ("held", "held", "completed"),
        ("succeeded", "no marker", "completed"),
        ("failed", "failed", "completed"),
        ("rejected", "failed", "completed"),
        ("cancelled", "stopped", "completed"),
    ],
)
def test_the_marker_takes_precedence_over_the_job(
    workspace: LoadedSettings, state: str, unmarked: str, marked: str
) -> None:
    assert states(status_of(workspace, task("a", state))) == {"a": unmarked, "b": "not started"}
    mark(workspace, "a")
    assert states(status_of(workspace, task("a", state))) == {"a": marked, "b": "not started"}


def test_tasks_are_counted_with_their_workspace_their_config_and_their_marker(workspace: LoadedSettings) -> None:
    status = status_of(workspace, task("a", "queued"), task("b", "running"), stopped=True)
    assert states(status) == {"a": "stopped", "b": "running"}
    assert [status.counts[kind] for kind in ("running", "waiting", "not_started")] == [1, 0, 1]
    status = status_of(workspace, task("old", "running"), task("older", "failed"), task("oldest", "succeeded"))
    assert states(status) == {"a": "not started", "b": "not started", "old": "running", "older": "failed"}
    mark(workspace, "b")
    assert states(status_of(workspace)) == {"a": "not started", "b": "completed"}


def test_a_task_without_a_marker_has_a_note(workspace: LoadedSettings) -> None:
    record = {"job": 7, "attempt": 1, "result": "completed", "marker_by": None, "note": "its marker cannot be written"}
    (workspace.workspace / ".gpuyard/ends/a.json").write_text(json.dumps(record))
    row = status_of(workspace, task("a", "succeeded", id=7, attempt=1)).rows[0]
    assert (row.state, row.note) == ("completed", "its marker cannot be written")
    status = status_of(workspace, task("a", "succeeded", id=8, attempt=1))
    assert (status.rows[0].state, status.rows[0].note) == (
        "no marker", "it completed, but its marker is gone: start runs it again",
    )  # fmt: skip
    assert (status.counts["completed"], status.counts["not_started"], status.is_over) == (0, 2, True)


def test_a_record_counts_for_the_attempt_that_wrote_it(workspace: LoadedSettings) -> None:
    record = {"job": 7, "attempt": 2, "session": "w_a_gpu0", "log": "/l/a.log", "note": "ended with status 3"}
    (workspace.workspace / ".gpuyard/ends/a.json").write_text(json.dumps(record))
    mark(workspace, "a")
    its_own = status_of(workspace, task("a", "succeeded", id=7, attempt=2)).rows[0]
    assert (its_own.session, its_own.log, its_own.note) == ("w_a_gpu0", "/l/a.log", "ended with status 3")
    another = status_of(workspace, task("a", "succeeded", id=8, attempt=2)).rows[0]
    assert (another.session, another.log, another.note) == (None, None, None)


def test_the_log_of_a_task_that_has_just_started_is_where_its_runner_will_write_it(workspace: LoadedSettings) -> None:
    loaded = replace(workspace, settings=replace(workspace.settings, log_dir=f"{workspace.workspace}/logs"))
    rows = status_of(loaded, task("a", "running", log="/q/1.log"), task("b", "failed", log="/q/2.log")).rows
    assert [row.log for row in rows] == [f"{workspace.workspace}/logs/train_logs/a.log", "/q/2.log"]


@pytest.mark.parametrize("content", ["", "[1]", '{"job": 7', "null"])
def test_an_invalid_record_is_ignored(workspace: LoadedSettings, content: str) -> None:
    (workspace.workspace / ".gpuyard/ends/a.json").write_text(content)
    assert status_of(workspace, task("a", "running", id=7, attempt=1)).rows[0].session is None


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("one\ntwo\n", "two"),
        ("epoch 1\r\n\r\n", "epoch 1"),
        ("10%\r20%\r 30%", "30%"),
        ("\n\n", None),
        ("", None),
        ("x" * 5000 + "\nlast\n", "last"),
    ],
)
def test_the_last_line_is_what_a_terminal_would_show(
    workspace: LoadedSettings, tmp_path: Path, written: str, expected: str | None
) -> None:
    log = tmp_path / "log"
    log.write_text(written, newline="")
    assert status_of(workspace, task("a", "running", log=str(log))).rows[0].last_line == expected


def test_the_reason_of_the_first_waiting_task_is_shown(workspace: LoadedSettings) -> None:
    first, second = (
        task("b", "queued", id=2, priority=5, reason="no free GPU"),
        task("a", "queued", id=1, reason="later"),
    )
    assert status_of(workspace, second, first).why == "b waits: no free GPU"
    assert "paused" in (status_of(workspace, first, paused=True).why or "")
    assert status_of(workspace).why is None


# The time left


def row(state: str, likely_s: float | None, seconds: float | None = None) -> ConfigStatus:
    return ConfigStatus(config="x", state=state, likely_s=likely_s, seconds=seconds)


def test_the_time_left_is_that_of_the_running_tasks_and_unknown_if_any_duration_is() -> None:
    rows = [row("running", 100.0, 90.0), row("running", 100.0, 40.0), *[row("waiting", 100.0)] * 3]
    assert estimate_left_s(rows) == 210.0
    assert estimate_left_s([row("running", None, 5.0)]) is None
    assert estimate_left_s([row("running", 10.0, 5.0), row("waiting", None)]) is None
    assert estimate_left_s([row("waiting", 10.0)]) is None, "it is unknown how many will run at once"
    assert estimate_left_s([row("completed", None), row("failed", None)]) == 0.0
    assert estimate_left_s([row("running", 100.0, 200.0)]) == pytest.approx(20.0)
