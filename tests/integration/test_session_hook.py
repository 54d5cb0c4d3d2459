"""The hook of a workspace: a user's command before and after each task, in the task's session."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine_fixture import let_go, wait_until_gone
from tests.integration.session_fixture import OwnTmux, Task, Tasks, a_tmux, some_tasks  # noqa: F401 - fixtures

NAME = "TASK_exp1_gpu0"
# Appends its GPUYARD_* variables to a file.
RECORDS_ENVIRONMENT = (
    "import json, os\n"
    "variables = {name: value for name, value in os.environ.items() if name.startswith('GPUYARD_')}\n"
    "open('environments', 'a').write(json.dumps(variables) + '\\n')\n"
)


def hooked(tasks: Tasks, hook: str, script: str = "echo ran", **other: Any) -> Task:
    return tasks.sh(script, hook=["sh", "-c", hook], **other)


def test_output_of_the_hooks_is_in_the_tasks_log_around_its_output(tasks: Tasks) -> None:
    assert hooked(tasks, "echo the hook $GPUYARD_PHASE $GPUYARD_OUTCOME").wait() == 0
    lines = (tasks.folder / "1.1.log").read_text().splitlines()
    assert [line.strip() for line in lines] == ["the hook before", "ran", "the hook after completed"]
    assert "the hook before" in (tasks.folder / "logs/train_logs/exp1.log").read_text()


def test_a_task_whose_hook_before_it_fails_does_not_start_and_fails(tasks: Tasks) -> None:
    task = hooked(tasks, "echo no disk; exit 9")
    assert task.wait() == 9
    why = "the hook before it failed with status 9, so it was not started"
    assert (task.record()["result"], task.record()["status"], task.record()["note"]) == ("failed", 9, why)
    assert (task.output().count("ran"), task.output().count("no disk")) == (0, 1), "no hook runs after it"
    assert f"gpuyard: {why}" in task.output()
    assert f"exp1 failed with status 9: {why}" in (tasks.folder / "logs/TASK_scheduler.log").read_text()
    assert not task.marker.exists()


def test_a_failed_hook_after_the_task_is_noted_and_does_not_change_the_result(tasks: Tasks) -> None:
    task = hooked(tasks, "[ $GPUYARD_PHASE = before ] || exit 9")
    assert task.wait() == 0
    assert (task.record()["result"], task.record()["note"]) == ("completed", "the hook after it failed with status 9")
    assert task.marker.exists()
    assert "exp1 the hook after it failed with status 9" in (tasks.folder / "logs/TASK_scheduler.log").read_text()


def test_a_hook_that_hangs_before_the_task_is_ended_and_the_task_fails(tasks: Tasks) -> None:
    task = hooked(tasks, "echo $$; exec sleep 600", hook_timeout_s=0.5)
    assert task.wait() == 124
    assert task.record()["note"] == "the hook before it did not end within 0.5 s, so it was not started"
    wait_until_gone(int(task.output().split()[0]), "the hook")
    assert "ran" not in task.output()


def test_a_hook_that_hangs_after_the_task_is_ended_and_does_not_change_the_result(tasks: Tasks) -> None:
    task = hooked(tasks, "[ $GPUYARD_PHASE = before ] || exec sleep 600", hook_timeout_s=0.5)
    assert task.wait() == 0
    assert (task.record()["result"], task.record()["note"]) == (
        "completed", "the hook after it did not end within 0.5 s",
    )  # fmt: skip


def test_a_hook_whose_program_is_missing_fails(tasks: Tasks) -> None:
    task = tasks.sh("echo ran", hook=["no-such-hook"])
    assert task.wait() == 127
    assert "gpuyard: there is no program no-such-hook" in task.output()


def test_a_task_stopped_during_the_hook_before_it_does_not_start(tasks: Tasks, pipe: Path) -> None:
    task = hooked(tasks, f"echo up; read x < {pipe}")
    task.wait_for_output("up")
    task.send(signal.SIGTERM)
    assert task.wait() == 143
    assert (task.record()["result"], "ran" in task.output()) == ("stopped", False)


def test_the_result_of_a_task_is_recorded_before_the_hook_after_it(tasks: Tasks, pipe: Path) -> None:
    """Killing the runner during that hook does not lose the result."""
    task = hooked(tasks, f"[ $GPUYARD_PHASE = before ] || {{ echo up; read x < {pipe}; }}")
    task.wait_for_output("up")
    assert (task.record()["result"], task.marker.exists(), task.is_over()) == ("completed", True, False)
    let_go(pipe)
    assert task.wait() == 0


def test_a_task_with_an_existing_marker_runs_no_hook(tasks: Tasks) -> None:
    assert tasks.sh("true").wait() == 0
    task = hooked(tasks, "echo hook")
    assert (task.wait(), "hook" in task.output()) == (0, False)


@pytest.mark.needs("tmux")
def test_a_hook_is_shown_in_the_session_and_ended_with_it(tasks: Tasks, tmux: OwnTmux) -> None:
    task = hooked(tasks, "echo the hook; read x; echo got $x; exec sleep 600", session=NAME)
    tmux.wait_to_see(NAME, "the hook")
    tmux("send-keys", "-t", f"={NAME}:", "hello", "Enter")
    tmux.wait_to_see(NAME, "got hello")
    tmux("kill-session", "-t", f"={NAME}")
    assert task.wait() == 129
    assert task.record()["note"] == "its session was closed"
    assert "ran" not in task.output()


def test_a_marker_does_not_end_the_hook_after_the_task(tasks: Tasks) -> None:
    """The grace period applies to the program only; the marker exists while the runner waits for the hook."""
    task = hooked(tasks, "[ $GPUYARD_PHASE = before ] || sleep 0.3", check_s=0.01, grace_s=0.0)
    assert task.wait() == 0
    assert (task.record()["note"], "goes on" in task.output()) == (None, False)
