"""A task under its runner, without a session: its result, logs, record and remaining processes."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.executables import write_executable
from tests.integration.engine_fixture import let_go, wait_for, wait_until_gone
from tests.integration.session_fixture import Task, Tasks, a_tmux, some_tasks  # noqa: F401 - fixtures are found where they are named

unmeasured = pytest.mark.usefixtures("unmeasured")
MARK = "mkdir -p ../out; echo done > ../out/exp1_completed.txt"


def ended(task: Task) -> tuple[int, str | None, int | None]:
    """Wait for the task; return the runner's exit status, the recorded result and the program's exit status."""
    status = task.wait()
    record = task.record()
    assert record["ended_at"] >= record["started_at"]
    return status, record["result"], record["status"]


def scheduler_log(tasks: Tasks) -> list[str]:
    """Return the lines of the scheduler log without their times."""
    return [line[20:] for line in (tasks.folder / "logs/TASK_scheduler.log").read_text(errors="replace").splitlines()]


def log_of(task: Task, name: str = "log") -> list[str]:
    """Return the lines of a log without its header line."""
    return [line for line in Path(task.spec[name]).read_text().splitlines() if not line.startswith("# log of ")]


# Results


def test_a_task_that_writes_its_marker_and_exits_0_is_completed(tasks: Tasks) -> None:
    task = tasks.sh(MARK)
    assert ended(task) == (0, "completed", 0)
    assert task.marker.read_text() == "done\n"
    record = task.record()
    assert (record["marker_by"], record["note"]) == ("program", None)
    assert (record["job"], record["attempt"], record["config"], record["session"]) == (1, 1, "exp1", None)
    assert record["log"] == task.spec["log"]
    assert scheduler_log(tasks) == ["exp1 started on gpu0 (job 1, attempt 1)", "exp1 completed"]


def test_a_retry_is_in_the_log_of_the_workspace(tasks: Tasks) -> None:
    task = tasks.sh(MARK, attempt=2, retried="attempt 2 of 4: exit status 3")
    assert ended(task) == (0, "completed", 0)
    assert scheduler_log(tasks) == [
        "exp1 retried, attempt 2 of 4: exit status 3", "exp1 started on gpu0 (job 1, attempt 2)", "exp1 completed",
    ]  # fmt: skip


def test_a_task_that_writes_its_marker_and_fails_is_completed_and_flagged(tasks: Tasks) -> None:
    task = tasks.sh(f"{MARK}; exit 5")
    assert ended(task) == (0, "completed", 5)
    assert task.record()["note"] == "it ended with status 5 after its marker"


def test_a_task_that_exits_0_without_a_marker_is_completed_and_gpuyard_writes_its_marker(tasks: Tasks) -> None:
    task = tasks.sh("true")
    assert ended(task) == (0, "completed", 0)
    assert "exited with status 0 and wrote no marker; written by gpuyard (job 1, attempt 1)" in task.marker.read_text()
    assert task.record()["marker_by"] == "gpuyard"


@unmeasured
@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("kill -SEGV $$", 139)])
def test_a_task_that_fails_without_a_marker_fails_with_its_status(tasks: Tasks, script: str, status: int) -> None:
    task = tasks.sh(script)
    assert ended(task) == (status, "failed", status)
    assert not task.marker.exists()
    assert scheduler_log(tasks)[-1] == f"exp1 failed with status {status}"


def test_a_task_that_exits_0_on_a_stop_request_is_stopped_and_not_completed(tasks: Tasks) -> None:
    task = tasks.sh("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.05; done")
    task.wait_for_output("up")
    task.send(signal.SIGTERM)
    assert ended(task) == (143, "stopped", 0)
    assert "saved" in task.output()
    assert not task.marker.exists()
    assert scheduler_log(tasks)[-1] == "exp1 stopped"


def test_a_task_that_a_stop_request_ends_is_stopped(tasks: Tasks) -> None:
    task = tasks.sh("echo up; exec sleep 600")
    task.wait_for_output("up")
    task.send(signal.SIGTERM)
    assert ended(task) == (143, "stopped", 143)


def test_a_task_that_writes_its_marker_on_a_stop_request_is_completed(tasks: Tasks) -> None:
    task = tasks.sh(f"trap '{MARK}; exit 3' TERM; echo up; while :; do sleep 0.05; done")
    task.wait_for_output("up")
    task.send(signal.SIGTERM)
    assert ended(task) == (0, "completed", 3)


def test_a_task_stopped_before_its_start_does_not_start(tasks: Tasks) -> None:
    task = tasks.sh("echo ran", delay_s=600.0)
    wait_for(Path(task.spec["record"]).exists, "the record")
    assert task.record()["result"] is None
    os.kill(task.runner, signal.SIGTERM)
    assert ended(task) == (143, "stopped", 143)
    assert "ran" not in task.output()


def test_a_task_that_runs_on_after_its_marker_is_ended_after_a_grace_period_and_completed(tasks: Tasks) -> None:
    task = tasks.sh(f"{MARK}; exec sleep 600")
    assert ended(task) == (0, "completed", 143)
    assert "ended by gpuyard: it went on after its marker" in task.record()["note"]


def test_a_task_that_ends_within_its_grace_period_gets_no_signal(tasks: Tasks) -> None:
    task = tasks.sh(f"{MARK}; sleep 0.3", check_s=0.01, grace_s=3600.0)
    assert ended(task) == (0, "completed", 0)
    assert task.record()["note"] is None


def test_a_task_with_an_existing_marker_is_completed_and_not_run(tasks: Tasks) -> None:
    first = tasks.sh(MARK)
    assert ended(first) == (0, "completed", 0)
    second = tasks.sh("echo up; exit 4")
    assert ended(second) == (0, "completed", None)
    assert "up" not in second.output()
    assert second.record()["note"] == "its marker was there already, so it was not run"
    assert scheduler_log(tasks)[-1] == f"exp1 completed: {second.record()['note']}"


@unmeasured
@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT, signal.SIGUSR1])
def test_no_signal_to_the_runner_alone_ends_a_task(tasks: Tasks, pipe: Path, signum: int) -> None:
    task = tasks.sh(f"echo up; read x < {pipe}; exit 6")
    task.wait_for_output("up")
    os.kill(task.runner, signum)
    let_go(pipe)
    assert ended(task) == (6, "failed", 6)


# Starting


def test_a_missing_program_has_status_127_and_its_log_reports_it(tasks: Tasks) -> None:
    task = tasks.start("no-such-program")
    assert ended(task) == (127, "failed", 127)
    assert "gpuyard: there is no program no-such-program" in log_of(task)


def test_a_program_that_cannot_be_executed_has_status_126_and_its_log_reports_it(tasks: Tasks, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("text")
    task = tasks.start(str(tmp_path / "data.txt"))
    assert ended(task) == (126, "failed", 126)
    assert f"gpuyard: {tmp_path}/data.txt cannot be executed: Permission denied" in log_of(task)


def test_a_script_without_a_shebang_is_run_by_the_shell(tasks: Tasks, tmp_path: Path) -> None:
    write_executable(tmp_path / "work/script", 'echo "ran with $1"\n')
    task = tasks.start("./script", "a word")
    assert task.wait() == 0
    assert "ran with a word" in log_of(task)


@unmeasured
def test_the_program_has_its_own_terminal_and_default_signal_handlers(tasks: Tasks) -> None:
    script = (
        "import os, signal, sys\n"
        "assert all(map(os.isatty, (0, 1, 2)))\n"
        "assert os.getsid(0) == os.getpid() == os.tcgetpgrp(0)\n"
        "assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "ignored = {one.name for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN}\n"
        "print(sorted(ignored), os.environ['TERM'], os.getcwd())\n"
    )
    task = tasks.start(sys.executable, "-c", script, environment={"TERM": "dumb"})
    assert task.wait() == 0, task.output()
    # Python itself ignores SIGPIPE and SIGXFSZ.
    assert f"['SIGPIPE', 'SIGXFSZ'] screen-256color {tasks.folder}/work" in log_of(task)


@unmeasured
def test_hostile_names_and_arguments_are_passed_unchanged(tasks: Tasks) -> None:
    arguments = ["a b", "'\"", "$(touch owned)", "`touch owned`", "-x", ";", "größe\udcff", "#(touch owned)", "", "\\;"]
    for number, name in enumerate(("a b'\"", "$(touch owned)", "-x;", "größe\n", "\udcff")):
        task = tasks.start("printf", "<%s>", *arguments, config=name)
        assert ended(task) == (0, "completed", 0)
        assert task.record()["config"] == name
        assert "".join(f"<{argument}>" for argument in arguments) in Path(task.spec["log"]).read_text(
            errors="surrogateescape"
        )
        assert task.marker.exists()
        assert len(scheduler_log(tasks)) == 2 * (number + 1)
    assert not (tasks.folder / "work/owned").exists()


# Logs


@unmeasured
def test_output_is_in_both_logs_and_each_attempt_begins_with_a_header_line(tasks: Tasks) -> None:
    assert tasks.sh("echo one; exit 1").wait() == 1
    task = tasks.sh("echo two; exit 1", attempt=2, job=1, key="1.2")
    assert task.wait() == 1
    lines = log_of(task)
    assert (lines[1], lines[3]) == ("one", "two")
    assert lines[0].startswith("--- exp1, job 1, attempt 1, on gpu0, ")
    assert lines[2].startswith("--- exp1, job 1, attempt 2, on gpu0, ")
    assert task.output() == "two\n"


def test_logs_are_readable_only_by_their_owner(tasks: Tasks) -> None:
    task = tasks.sh("true")
    assert task.wait() == 0
    for name in ("log", "scheduler_log"):
        assert Path(task.spec[name]).stat().st_mode & 0o777 == 0o600
    assert Path(task.spec["log"]).parent.stat().st_mode & 0o777 == 0o700


def others(tasks: Tasks) -> dict[str, str]:
    """The spec of a task of the same name in another workspace with the same log directory."""
    folder = tasks.folder
    return {"record": f"{folder}/other.json", "marker": f"{folder}/other.txt", "owner": "other/12345678"}


@unmeasured
def test_a_task_whose_log_is_in_use_writes_to_its_alternative_log(tasks: Tasks, pipe: Path) -> None:
    first = tasks.sh(f"echo first; read x < {pipe}")
    first.wait_for_output("first")
    second = tasks.sh("echo second", **others(tasks))
    assert second.wait() == 0
    let_go(pipe)
    assert first.wait() == 0
    assert log_of(first)[1:] == ["first"]
    assert log_of(second, "other_log")[1:] == ["second"]
    assert second.record()["log"] == second.spec["other_log"]


def test_a_log_of_another_workspace_is_not_used_even_after_its_task_ended(tasks: Tasks) -> None:
    first = tasks.sh("echo first; exit 1")
    assert first.wait() == 1
    second = tasks.sh("echo second", **others(tasks))
    assert second.wait() == 0
    assert log_of(first)[1:] == ["first"]
    assert log_of(second, "other_log")[1:] == ["second"]
    again = tasks.sh("echo again", job=1, attempt=2, key="1.2")
    assert again.wait() == 0
    assert again.record()["log"] == first.spec["log"]


def test_without_an_alternative_log_the_task_reports_it_and_runs(tasks: Tasks, pipe: Path) -> None:
    first = tasks.sh(f"echo first; read x < {pipe}")
    first.wait_for_output("first")
    second = tasks.sh("echo second", other_log=None, **others(tasks))
    assert second.wait() == 0
    let_go(pipe)
    assert first.wait() == 0
    assert f"{first.spec['log']} is written by another task" in second.record()["note"]
    assert "second" in second.output()


def _link(path: Path) -> None:
    path.symlink_to(path.parent / "victim")


@unmeasured
@pytest.mark.parametrize("lay", [_link, os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["log", "scheduler_log"])
def test_a_log_that_cannot_be_opened_is_reported_and_the_task_runs_without_it(
    tasks: Tasks, name: str, lay: Any
) -> None:
    folder = tasks.folder / "own"
    folder.mkdir(mode=0o700)
    lay(folder / "a.log")
    task = tasks.sh("echo text", **{name: str(folder / "a.log")})
    assert ended(task) == (0, "completed", 0)
    assert f"{folder}/a.log cannot be written" in task.record()["note"]
    assert "text" in task.output()
    assert not (folder / "victim").exists()


@pytest.mark.usefixtures("unmeasured")  # coverage files would exceed the limit on file sizes
def test_a_full_disk_loses_output_only(tasks: Tasks) -> None:
    task = tasks.sh("yes | head -c 200000; echo the end; exit 3", limit=1 << 16)
    assert ended(task) == (3, "failed", 3)
    assert f"some of the output is missing in {task.spec['log']}: File too large" in task.record()["note"]
    assert Path(task.spec["log"]).stat().st_size == 1 << 16


def test_a_blocked_job_log_does_not_block_the_task(tasks: Tasks) -> None:
    task = tasks.sh("yes | head -c 200000", output="/dev/full")
    assert ended(task) == (0, "completed", 0)
    assert "the job's log: No space left on device" in task.record()["note"]
    assert len(log_of(task)) == 100_001


def test_a_record_or_marker_that_cannot_be_written_is_reported(tasks: Tasks) -> None:
    (tasks.folder / "file").write_text("")
    task = tasks.sh("true", record=str(tasks.folder / "file/exp1.json"), marker=str(tasks.folder / "file/exp1.txt"))
    assert task.wait() == 0
    assert f"gpuyard: its marker {tasks.folder}/file/exp1.txt cannot be written" in task.output()
    assert f"gpuyard: {tasks.folder}/file/exp1.json cannot be written" in task.output()


# Remaining processes and files


def left_behind(script: str) -> str:
    """A script that ends after it started a background process that ignores SIGHUP."""
    return f"(trap '' HUP; touch ../up; {script}) & until [ -e ../up ]; do sleep 0.01; done; echo on its own; exit 2"


def test_a_background_process_on_the_terminal_does_not_keep_the_task_running(tasks: Tasks, pipe: Path) -> None:
    task = tasks.sh(left_behind(f"read x < {pipe}; echo late"))
    assert ended(task) == (2, "failed", 2)
    assert "on its own" in log_of(task)
    let_go(pipe)


@unmeasured
def test_a_background_process_that_writes_forever_does_not_keep_the_task_running(tasks: Tasks) -> None:
    task = tasks.sh(left_behind("exec yes"))
    assert ended(task) == (2, "failed", 2)


@unmeasured
def test_no_socket_remains(tasks: Tasks) -> None:
    task = tasks.sh("true", session="TASK_exp1_gpu0")
    assert task.wait() == 0
    assert os.listdir(tasks.folder / "sockets") == []


@unmeasured
def test_the_program_and_its_background_processes_hold_the_lease(tasks: Tasks, pipe: Path) -> None:
    lease = os.open(tasks.folder / "lease", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lease, fcntl.LOCK_EX)
    task = tasks.sh(f"(trap '' HUP; echo up; read x < {pipe}) & wait", lease=lease)
    os.close(lease)
    task.wait_for_output("up")
    os.kill(task.program(), signal.SIGKILL)
    assert task.wait() == 137
    taker = subprocess.Popen(["flock", str(tasks.folder / "lease"), "true"])
    assert subprocess.call(["flock", "-n", str(tasks.folder / "lease"), "true"]) == 1
    let_go(pipe)
    assert taker.wait(60) == 0


def test_a_killed_runner_ends_its_program_and_leaves_a_record_without_a_result(tasks: Tasks) -> None:
    task = tasks.sh("echo up; exec sleep 600")
    task.wait_for_output("up")
    program = task.program()
    os.kill(task.runner, signal.SIGKILL)
    wait_until_gone(program, "the program")
    assert task.record()["result"] is None
