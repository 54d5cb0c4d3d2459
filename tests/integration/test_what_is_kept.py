"""What the queue keeps: finished jobs, logs, and the values of secret variables; with the daemon and its commands."""

import contextlib
import json
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest, until

SECRET = "hf-52tXq8-" + "z" * 40
LENGTH = "echo ${#HF_TOKEN}"


def files_with(home: Path, text: str) -> list[str]:
    return [path.name for path in home.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def make_older(queue: QueueUnderTest, *job_ids: int, days: float) -> None:
    """Let jobs have ended this long ago. The daemon is stopped meanwhile."""
    queue.stop()
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database, database:
        marks = ", ".join("?" * len(job_ids))
        database.execute(f"UPDATE jobs SET ended_at = ended_at - ? WHERE id IN ({marks})", (days * 86400, *job_ids))
    queue.start()


# Jobs and logs


def test_old_jobs_go_with_their_logs_but_for_those_that_a_kept_job_depends_on(queue: QueueUnderTest) -> None:
    old, awaited, recent = (queue.submit("echo", name, gpus=0) for name in ("old", "awaited", "recent"))
    queue.wait()
    waiting = queue.submit("true", gpus=0, after=str(awaited), hold=True)
    make_older(queue, old, awaited, days=91)
    assert run_here("clean").stdout.startswith("deleted 1 job and 1 log (4 B)")
    assert run_here("show", str(old)).returncode == 3
    assert sorted(path.name for path in (queue.home / "logs").iterdir()) == [f"{awaited}.1.log", f"{recent}.1.log"]
    queue.post("/jobs/release", ids=str(waiting))
    assert queue.wait(waiting)["succeeded"] == 1
    kept = json.loads(run_here("daemon", "status", "--json").stdout)["kept"]
    assert (kept["logs"], kept["keep_jobs_s"], kept["keep_log_bytes"]) == (2, 90 * 86400, 20 << 30)
    assert "3 finished jobs (limit 90d), 2 logs of 15 B (limit 20 GB), database " in run_here("daemon", "status").stdout


def test_logs_beyond_the_limit_go_oldest_first_and_never_of_a_job_that_runs(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    write = "head -c 700000 /dev/urandom"
    running = queue.shell(f"{write}; read word < {gate}", gpus=0)
    first, second = queue.shell(write, gpus=0), queue.shell(write, gpus=0)
    queue.wait(f"{first} {second}")
    logs = queue.home / "logs"
    until(lambda: (logs / f"{running}.1.log").stat().st_size == 700_000, "the log of the running job")
    for job_id, at in ((running, 1.0), (first, 3.0), (second, 2.0)):
        os.utime(logs / f"{job_id}.1.log", (at, at))
    (queue.home / "config.toml").write_text('[keep]\nlog_bytes = "1500K"\n')
    queue.restart(signal.SIGTERM)
    assert run_here("clean").stdout == "deleted 0 jobs and 1 log (683.6 KB)\n"
    assert sorted(path.name for path in logs.iterdir()) == [f"{running}.1.log", f"{first}.1.log"]
    missing = run_here("logs", str(second))
    assert missing.returncode == 1
    assert "[keep]" in missing.stderr
    gate.write_text("go\n")
    queue.wait(running)


def test_with_a_bad_limit_jobs_wait_and_each_command_says_what_to_write(own_queue: QueueUnderTest) -> None:
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text('[keep]\njobs = "never"\n')
    shown, submitted = run_here("queue"), run_here("submit", "--gpus", "0", "--", "true")
    (own_queue.home / "config.toml").unlink()
    run_here("daemon", "stop")
    assert (shown.returncode, submitted.returncode) == (0, 2)
    assert "forever" in shown.stderr
    assert "forever" in submitted.stderr


# Secrets


def dropped(queue: QueueUnderTest, job_id: str) -> list[str]:
    return list(queue.job(int(job_id))["dropped"])


def test_a_secret_is_in_no_file_once_its_job_has_ended_and_a_retry_takes_it_from_the_shell(
    queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("LR", "plain-value-of-lr")
    ids = run_here("submit", "--gpus", "0", "--array", "1-3", "--", "sh", "-c", f"{LENGTH} $LR; exit 1").stdout.strip()
    held = run_here("submit", "--gpus", "0", "--hold", "--", "sh", "-c", LENGTH).stdout.strip()
    first = ids.partition("-")[0]
    assert run_here("wait", ids).returncode == 5
    assert queue.log_of(int(first)) == f"{len(SECRET)} plain-value-of-lr\n"
    until(lambda: "HF_TOKEN" in dropped(queue, first), "the secret is dropped")
    assert dropped(queue, held) == []
    assert run_here("release", held).stdout == f"released {held}\n"
    run_here("wait", held)
    assert queue.log_of(int(held)) == f"{len(SECRET)}\n"
    until(lambda: not files_with(queue.home, SECRET), "no file has the secret")
    assert files_with(queue.home, "plain-value-of-lr")

    monkeypatch.delenv("HF_TOKEN")
    refused = run_here("retry", ids)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"gpuyard: {first} is not queued again" in refused.stderr
    assert "this job lacks HF_TOKEN: " in refused.stderr
    assert run_here("retry", "--allow-missing", first).stdout == f"queued again {first}\n"
    run_here("wait", first)
    assert queue.log_of(int(first), attempt=2) == "0 plain-value-of-lr\n"

    monkeypatch.setenv("HF_TOKEN", f"{SECRET}-new")
    until(lambda: "HF_TOKEN" in dropped(queue, first), "it is dropped again")
    assert run_here("retry", ids).stdout == f"queued again {ids}\n"
    run_here("wait", ids)
    assert queue.log_of(int(first), attempt=3) == f"{len(SECRET) + 4} plain-value-of-lr\n"
    queue.restart()  # its successor drops what a daemon that was killed has left
    until(lambda: not files_with(queue.home, SECRET), "no file has the secret")
    assert "dropped: HF_TOKEN\n" in run_here("show", first).stdout
