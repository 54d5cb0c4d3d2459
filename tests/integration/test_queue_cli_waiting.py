"""The long-running commands of the queue: `wait`, `logs -f`, and those that start and stop the daemon."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuyard.client.daemon_liveness import hold_daemon_lock
from gpuyard.client.retrying import has_crashed
from tests.fakes.queue_command import GPUYARD, run_here, run_on_terminal
from tests.fakes.queue_standin import ReceivedRequest, StandIn, attempt, counts, job, page, row


@pytest.fixture
def daemon(own_home: Path) -> Iterator[StandIn]:
    with StandIn(own_home) as stand_in:
        yield stand_in


def waited(*, left: int = 0, running: int = 0, succeeded: int = 0, failed: int = 0) -> dict[str, Any]:
    """An answer of GET /wait; only the last one (`left` = 0) counts succeeded and failed jobs."""
    how = {"selection": "1-50", "chosen_by": "ids", "is_stuck": False}
    answer = {"done": not left, "left": left, "running": running, **how}
    if left:
        return answer
    who = [{"id": n, "state": "failed", "outcome": "failed", "reason": f"exit {n}"} for n in range(1, failed + 1)]
    return {**answer, "succeeded": succeeded, "failed": who[:100], "failed_count": failed}


def test_wait_returns_when_all_have_succeeded(daemon: StandIn) -> None:
    answers = iter([waited(left=2), waited(left=1), waited(succeeded=2)])
    daemon.answers["GET /wait"] = lambda _: next(answers)
    result = run_here("wait")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    *asked, reported = daemon.requests
    assert [each.query["ids"] for each in asked] == ["", "1-50", "1-50"]
    assert reported.body["ids"] == "1-50"


def test_wait_lists_failed_jobs_and_reports_a_timeout(daemon: StandIn) -> None:
    daemon.answers["GET /wait"] = waited(failed=30, succeeded=1)
    result = run_here("wait", "1-50")
    assert (result.returncode, len(result.stderr.splitlines())) == (5, 21)
    assert "gpuyard: 1 failed: exit 1\n" in result.stderr
    daemon.answers["GET /wait"] = waited(left=7)
    late = run_here("wait", "--timeout", "0.1", "--json")
    assert (late.returncode, json.loads(late.stdout)["left"]) == (124, 7)
    assert "timeout: 7 not finished" in late.stderr


def test_wait_continues_with_the_next_daemon(own_home: Path) -> None:
    is_asked = threading.Event()

    def first(_: ReceivedRequest) -> dict[str, Any]:
        is_asked.set()
        return waited(left=1)

    with StandIn(own_home, {"GET /wait": first}):
        process = subprocess.Popen([*GPUYARD, "wait", "1"], stderr=subprocess.PIPE, text=True)
        assert is_asked.wait(90)
    try:
        with StandIn(own_home, {"GET /wait": waited(succeeded=1)}):
            _, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, errors) == (0, "")


def test_wait_shows_its_progress_on_a_terminal(daemon: StandIn) -> None:
    answers = iter([waited(left=24), waited(left=12, running=2), waited(succeeded=24)])
    daemon.answers["GET /wait"] = lambda _: next(answers)
    assert "12 of 24 done, 2 running" in run_on_terminal("wait", columns=80)


def test_logs_prints_the_bytes_of_a_log_unchanged(daemon: StandIn, tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"one\ntwo\nthr\xffee\n")
    (tmp_path / "2").write_bytes(b"again\n")
    attempts = [attempt(1, tmp_path / "1"), attempt(2, tmp_path / "2")]
    daemon.answers["GET /jobs/17"] = job(17, "failed", attempts=attempts)
    assert run_here("logs", "17").stdout == "again\n"
    first = subprocess.run(
        [*GPUYARD, "logs", "--attempt", "1", "-n2", "17"], capture_output=True, timeout=90, check=True
    )
    assert first.stdout == b"two\nthr\xffee\n"
    assert run_here("logs", "--attempt", "3", "17").returncode == 2
    (tmp_path / "2").unlink()
    assert run_here("logs", "17").returncode == 1


def test_logs_prints_a_progress_bar_as_a_terminal_shows_it_in_the_end(daemon: StandIn, tmp_path: Path) -> None:
    bar = b"".join(b"\r%3d%%|%-50s|" % (each // 60, b"#" * (each // 120)) for each in range(6001))
    log = tmp_path / "1"
    log.write_bytes(b"begins\n" + bar + b"\n")
    daemon.answers["GET /jobs/17"] = job(17, "succeeded", attempts=[attempt(1, log)])
    assert len(bar) > 300_000
    last = b"100%|" + b"#" * 50 + b"|\n"
    for options, expected in (
        (["-n1"], last),
        (["-f"], b"begins\n" + last),
        (["--raw", "-n1"], bar + b"\n"),
        (["--raw", "-f"], log.read_bytes()),
    ):
        result = subprocess.run([*GPUYARD, "logs", *options, "17"], capture_output=True, timeout=90, check=True)
        assert result.stdout == expected, options


def test_a_follower_on_a_terminal_shows_a_progress_bar_move(daemon: StandIn, tmp_path: Path) -> None:
    """What was written before is shown as it is by then; what follows comes unchanged."""
    log = tmp_path / "1"
    log.write_bytes(b" 1%\r 2%\r 3%")
    asked = iter(range(8))

    def stage(_: object) -> Any:
        is_over = next(asked, None) is None
        if not is_over:
            with log.open("ab") as file:
                file.write(b"\r 4%")
        return job(17, "succeeded" if is_over else "running", attempts=[attempt(1, log, is_over=is_over)])

    daemon.answers["GET /jobs/17"] = stage
    shown = run_on_terminal("logs", "-f", "17", columns=80)
    assert " 1%" not in shown
    assert shown.count("\r 4%") > 3


def test_logs_of_several_jobs_are_printed_below_their_ids_and_only_one_is_followed(
    daemon: StandIn, tmp_path: Path
) -> None:
    (tmp_path / "1").write_text("one\n")
    daemon.answers["GET /jobs/17"] = job(17, "failed", attempts=[attempt(1, tmp_path / "1")])
    daemon.answers["GET /jobs"] = page(row(17))
    assert run_here("logs", "name=big").stdout == "one\n"
    (tmp_path / "2").write_text("two, without an end")
    daemon.answers["GET /jobs/18"] = job(18, "failed", attempts=[attempt(1, tmp_path / "2")])
    daemon.answers["GET /jobs/19"] = job(19, "queued")
    daemon.answers["GET /jobs"] = page(row(17), row(18), row(19))
    several = run_here("logs", "state=failed", "name=big")
    assert daemon.requests[-4].query["ids"] == "state=failed name=big"
    assert several.stdout.count("==> ") == 2
    assert "==> 17 " in several.stdout
    assert "two, without an end\n" in several.stdout
    assert several.stderr == "gpuyard: job 19 is queued and has no output: it has not run\n"
    daemon.answers["GET /jobs"] = page(row(17), row(18), following="2")
    followed = run_here("logs", "-f", "name=big")
    assert (followed.returncode, followed.stdout) == (2, "")
    assert "'name=big' matches several jobs: 17, 18 and more\n" in followed.stderr


def test_logs_follows_a_waiting_job_through_all_its_attempts(daemon: StandIn, tmp_path: Path) -> None:
    logs = [tmp_path / "1", tmp_path / "2"]
    stages = iter([
        job(17), job(17),
        job(17, "running", attempts=[attempt(1, logs[0], is_over=False)]),
        job(17, "delayed", attempts=[attempt(1, logs[0])]),
        job(17, "running", attempts=[attempt(1, logs[0]), attempt(2, logs[1], is_over=False)]),
    ])  # fmt: skip
    over = job(17, "succeeded", attempts=[attempt(1, logs[0]), attempt(2, logs[1])])
    daemon.answers["GET /jobs/17"] = lambda _: next(stages, over)
    for number, log in enumerate(logs, start=1):
        log.write_text(f"attempt {number}\n")
    result = run_here("logs", "-f", "17")
    assert (result.returncode, result.stdout) == (0, "attempt 1\nattempt 2\n")
    assert "waiting for it to start" in result.stderr
    assert "--- attempt 2 ---\n" in result.stderr


@pytest.mark.usefixtures("unmeasured")  # an interrupt under the coverage tracer can hang the process
def test_ctrl_c_ends_a_follower_quietly(daemon: StandIn, tmp_path: Path) -> None:
    (tmp_path / "1").write_text("begun\n")
    daemon.answers["GET /jobs/17"] = job(17, "running", attempts=[attempt(1, tmp_path / "1", is_over=False)])
    command = [*GPUYARD, "logs", "-f", "17"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    assert (process.returncode, errors) == (130, "")


def test_a_killed_daemon_counts_as_crashed_a_running_or_stopped_one_does_not(own_home: Path) -> None:
    assert not has_crashed()
    with hold_daemon_lock(own_home / "daemon.lock"):
        assert not has_crashed()
    assert not has_crashed()
    program = (
        "import sys; from gpuyard.client.daemon_liveness import hold_daemon_lock\n"
        "with hold_daemon_lock(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(own_home / "daemon.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert not has_crashed()
        holder.kill()
    assert has_crashed()


def test_daemon_status_reports_a_running_or_an_absent_daemon(own_home: Path) -> None:
    absent = run_here("daemon", "status")
    assert (absent.returncode, absent.stdout) == (1, "")
    assert "gpuyard daemon start" in absent.stderr
    assert json.loads(run_here("daemon", "status", "--json").stdout) == {"running": False}
    assert run_here("daemon", "stop").returncode == 1
    with StandIn(own_home) as daemon:
        daemon.answers["GET /status"] = status(own_home)
        assert "queue: 2 queued, 1 running, paused\n" in run_here("daemon", "status").stdout
        assert json.loads(run_here("daemon", "status", "--json").stdout)["pid"] == 4242
        assert run_here("daemon", "start").stdout == "daemon already running (pid 4242)\n"


def status(home: Path) -> dict[str, Any]:
    return {
        "pid": 4242, "version": "0.1.0", "started_at": "2026-01-02T03:04:05.678Z", "uptime_s": 75.0, "paused": True,
        "socket": str(home / "daemon.sock"), "state_dir": str(home), "draining": False, "step_us": None,
        "counts": counts(running=1, queued=2), "notices": ["the disk is nearly full"],
        "kept": {
            "database_bytes": 4096, "logs": None, "log_bytes": None, "keep_jobs_s": None, "keep_logs_s": None,
            "keep_log_bytes": None,
        },
    }  # fmt: skip
