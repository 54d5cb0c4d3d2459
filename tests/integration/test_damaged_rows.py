"""A damaged row of queue.db, with the real daemon: its job is set aside, all others go on."""

import contextlib
import os
import sqlite3
import stat
from pathlib import Path

import pytest

from gpuyard.store.damaged_rows import KEPT_ROWS
from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest, until

SECRET = "hunter2-hunter2"
ENVIRONMENT = {"PATH": os.environ["PATH"], "INNOCENT": SECRET}


def change(home: Path, statement: str, *values: object) -> None:
    """Write to the database as damage does, beside the daemon."""
    with contextlib.closing(sqlite3.connect(home / "queue.db", isolation_level=None)) as database:
        database.execute("PRAGMA ignore_check_constraints = ON")
        database.execute("PRAGMA foreign_keys = OFF")
        assert database.execute(statement, values).rowcount == 1


DAMAGES = {
    "bad byte": "UPDATE specs SET body = CAST(CAST(body AS BLOB) || x'ff7d' AS TEXT) WHERE id = 2",
    "no json": "UPDATE specs SET body = substr(body, 1, length(body) - 1) WHERE id = 2",
    "another type": "UPDATE specs SET body = '[1, 2]' WHERE id = 2",
    "a gap": "DELETE FROM specs WHERE id = 2",
    "an unknown state": "UPDATE jobs SET state = 'zombie' WHERE id = 2",
    "a text for a number": "UPDATE jobs SET submitted_at = 'yesterday', queued_at = x'00' WHERE id = 2",
}


@pytest.mark.parametrize("is_running", [True, False], ids=["while-it-runs", "before-the-start"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=[each.replace(" ", "-") for each in DAMAGES])
def test_a_damaged_job_is_held_and_cancelled_by_its_id_and_the_others_run(
    queue: QueueUnderTest, damage: str, *, is_running: bool
) -> None:
    _, gate = queue.start_gated(gpus=0)
    queue.post("/pause")
    damaged = queue.submit("true", gpus=0, environment=ENVIRONMENT)
    other = queue.submit("true", gpus=0, environment=ENVIRONMENT)
    log = ""
    if is_running:
        change(queue.home, damage)
    else:
        queue.kill9()
        change(queue.home, damage)
        first = run_here("queue")
        assert first.returncode == 0, first.stderr
        log = (queue.home / "daemon.log").read_text()
    shown = run_here("queue")
    assert (shown.returncode, shown.stderr) == (0, "")
    run_here("unpause")
    gate.write_text("go\n")
    assert run_here("wait", str(other), "--timeout", "60s").returncode == 0
    shown = run_here("show", str(damaged))
    assert "could not be read" in shown.stdout, shown
    assert " held" in run_here("queue").stdout
    for text in (shown.stdout, run_here("queue", "--all").stdout, log, queue.daemon.log if queue.daemon else ""):
        assert SECRET not in text
        assert "bug" not in text
        assert "disk space" not in text
    cancelled = run_here("cancel", str(damaged))
    assert (cancelled.returncode, cancelled.stderr) == (0, "")
    kept = queue.home / KEPT_ROWS
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    until(lambda: run_here("wait", "all", "--timeout", "30s").returncode in {0, 6}, "the end of all jobs")
    if not is_running:
        run_here("daemon", "stop")


def test_without_a_request_the_jobs_behind_a_damaged_one_run(queue: QueueUnderTest, tmp_path: Path) -> None:
    (queue.home / "config.toml").write_text("[queue]\ncpu_jobs = 1\n")
    _, gate = queue.start_gated(gpus=0)
    queue.submit("true", gpus=0)
    queue.submit("touch", str(tmp_path / "ran"), gpus=0)
    change(queue.home, DAMAGES["a text for a number"])
    gate.write_text("go\n")
    until((tmp_path / "ran").exists, "the job behind it")
    assert queue.state(2) == "held"


def test_a_job_whose_command_is_lost_never_starts(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    lost = queue.submit("true", gpus=0)
    change(queue.home, "UPDATE specs SET body = '{' WHERE id = 1")
    run_here("unpause")
    assert run_here("release", str(lost)).returncode == 0
    until(lambda: queue.job(lost)["state"] == "rejected", "the refusal")
    assert "could not be read" in queue.job(lost)["reason"]
