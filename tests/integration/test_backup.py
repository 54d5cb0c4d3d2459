"""`gpuyard backup` and `restore`, and estimates that are taken to another machine, with real daemons."""

import contextlib
import json
import os
import re
import sqlite3
import stat
from pathlib import Path

import pytest

from gpuyard.engines.common.spawn_program import is_unbegun
from gpuyard.engines.local.keeper_connection import parse_journal
from gpuyard.model.selection import format_ids
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

SECRET = "wandb-" + "q" * 40


def backed_up(path: Path, *options: str) -> str:
    result = run("backup", str(path), *options)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def test_a_backup_of_a_running_queue_brings_back_history_estimates_and_waiting_jobs_as_held(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    os.umask(0o022)
    done = queue.shell("echo done", gpus=0)
    queue.wait(done)
    running, gate = queue.start_gated(gpus=0)
    environment = {"PATH": os.environ["PATH"], "WANDB_API_KEY": SECRET}
    waiting = queue.shell(
        f"echo ${{#WANDB_API_KEY}} >> {tmp_path}/ran", gpus=0, after=str(running), environment=environment
    )
    held = queue.submit("true", gpus=0, hold=True)
    path = tmp_path / "queue.backup"
    assert backed_up(path).startswith(f"wrote {path}: 1 finished job, 3 unfinished jobs, 2 estimates, ")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET.encode() not in path.read_bytes()
    gate.write_text("go\n")
    queue.post("/jobs/release", ids=str(held))
    queue.wait()
    (queue.home / "journal").write_bytes(b"")  # as when it is long: the names of logs say what has begun
    after = queue.submit("true", gpus=0)
    queue.wait()

    queue.lacks_attempts = True
    restored = run("restore", str(path))
    assert restored.returncode == 0, restored.stderr
    assert f"have started since the backup: {waiting}-{held};" in restored.stdout
    (aside,) = queue.home.glob("queue.db.before-restore-*")
    assert str(aside) in restored.stdout
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    queue.client.close()
    try:
        shown = {job["id"]: job["state"] for job in queue.get("/jobs", all="1")["jobs"]}
        assert shown == {done: "succeeded", running: "held", waiting: "held", held: "held"}
        assert queue.get("/status")["notices"] == []
        assert queue.job(running)["attempts"][0]["outcome"] == "lost"
        assert "begun since" in queue.job(waiting)["reason"]
        refused = run("release", str(waiting))
        assert refused.returncode == 1
        assert "this job lacks WANDB_API_KEY: " in refused.stderr
        assert run("release", str(waiting), env={**os.environ, "WANDB_API_KEY": SECRET}).returncode == 0
        assert queue.submit("true", gpus=0) > after, "ids are not given again"
        queue.post("/jobs/cancel", ids=str(running))
        queue.post("/jobs/release", ids=str(held))
        queue.wait(held)
        assert [each["number"] for each in queue.job(held)["attempts"]] == [2], "attempt 1 has a log already"
        assert queue.wait(waiting)["selection"] == str(waiting)
        assert (tmp_path / "ran").read_text() == f"{len(SECRET)}\n", "it waits for job 2, which was cancelled"
    finally:
        run("daemon", "stop")
        assert queue.daemon is not None
        queue.daemon.wait()
        queue.daemon = None


@pytest.mark.parametrize("is_emptied", [False, True], ids=["journal", "logs"])
def test_after_a_crash_restore_names_the_jobs_that_have_begun_and_no_others(
    queue: QueueUnderTest, tmp_path: Path, *, is_emptied: bool
) -> None:
    """The daemon creates logs of short jobs before these begin; a long journal is emptied."""
    runs, path = tmp_path / "runs", tmp_path / "queue.backup"
    queue.shell(f"echo $GPUYARD_JOB_ID >> {runs}", array="1-4000", vram="8G")
    until(lambda: len(ids_in(runs)) > 50, "the first runs")
    backed_up(path)
    before = len(ids_in(runs))
    until(lambda: len(ids_in(runs)) > before + 200, "runs of slices that were not in the backup")
    queue.kill9()
    while not logs_in_advance(queue, runs):  # after the daemon's end
        queue.start()
        until(lambda: len(logs_in_advance(queue, runs)) > 20, "logs of jobs that have not begun")
        queue.kill9()
    until(lambda: all(word != "began" for word in last_words(queue).values()), "the ends of those that have")
    if is_emptied:
        (queue.home / "journal").write_bytes(b"")
    ran = set(ids_in(runs))
    begun_before = jobs_in(path, "attempts > 0")

    queue.lacks_attempts = True
    restored = run("restore", "--force", str(path))
    assert restored.returncode == 0, restored.stderr
    try:
        (named,) = re.findall("have started since the backup: (.*);", restored.stdout)
        assert named == format_ids(sorted(ran - begun_before))
        assert jobs_in(queue.home / "queue.db", "state = 'held' AND attempts = 0") == set(range(1, 4001)) - ran
    finally:
        run("cancel", "all")
        run("daemon", "stop")


def jobs_in(database: Path, condition: str) -> set[int]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return {job_id for (job_id,) in connection.execute(f"SELECT id FROM jobs WHERE {condition}")}


def ids_in(runs: Path) -> list[int]:
    return list(map(int, runs.read_text(encoding="utf-8").split())) if runs.exists() else []


def last_words(queue: QueueUnderTest) -> dict[str, str]:
    """Return the last word of the journal on each attempt."""
    entries, _ = parse_journal((queue.home / "journal").read_bytes())
    return {entry.key: entry.word for entry in entries}


def logs_in_advance(queue: QueueUnderTest, runs: Path) -> set[int]:
    """Return the jobs that have logs and have not begun."""
    logged = {int(path.name.partition(".")[0]) for path in (queue.home / "logs").glob("*.log")}
    begun = {int(key.partition(".")[0]) for key, word in last_words(queue).items() if not is_unbegun(word)}
    return logged - begun - set(ids_in(runs))


def test_restore_refuses_unfinished_jobs_and_files_that_are_no_backup(queue: QueueUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "queue.backup"
    backed_up(path)
    job_id = queue.submit("true", gpus=0, hold=True)
    refused = run("restore", str(path))
    assert refused.returncode == 2
    assert "the queue has jobs that have not finished: 1 held" in refused.stderr
    assert queue.state(job_id) == "held"
    queue.post("/jobs/cancel", ids=str(job_id))
    queue.wait()
    before = (tmp_path / "text", tmp_path / "other.db", tmp_path / "cut")
    before[0].write_text("no database")
    with contextlib.closing(sqlite3.connect(before[1])) as other:
        other.execute("CREATE TABLE jobs (id)")
        other.execute(f"PRAGMA user_version = {sqlite_version(path)}")
    before[2].write_bytes(path.read_bytes()[:20_000])
    for file in (*before, tmp_path / "absent"):
        result = run("restore", str(file))
        assert result.returncode == 2, file
        assert str(file) in result.stderr
        assert "Traceback" not in result.stderr
    assert run("show", str(job_id)).returncode == 0
    assert list(queue.home.glob("queue.db.before-restore-*")) == []
    assert list(queue.home.glob(".*")) == []
    assert run("backup", str(path)).returncode == 2
    assert "--force" in run("backup", str(path)).stderr
    backed_up(path, "--force")
    assert run("backup", str(tmp_path / "no" / "folder")).returncode == 1


def sqlite_version(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return int(database.execute("PRAGMA user_version").fetchone()[0])


def test_estimates_are_taken_to_another_queue_where_what_was_learned_stays(
    queue: QueueUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        queue.wait(queue.shell("exit 0", gpus=0))
    queue.wait(queue.shell("true", gpus=0))
    path = tmp_path / "estimates.json"
    assert run("estimates", "export", str(path)).stdout == "wrote 3 estimates\n"
    content = json.loads(path.read_text())
    assert {each["runs"] for each in content["estimates"]} == {1, 2, 3}
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("GPUYARD_HOME", str(tmp_path / "second"))
        try:
            run("wait", run("submit", "--gpus", "0", "--cwd", "/", "--", "/bin/sh", "-c", "true").stdout.strip())
            imported = run("estimates", "import", str(path))
            assert imported.stdout == "imported 1 estimate; 2 were learned here and stay (--replace replaces them)\n"
            assert run("estimates", "import", "--replace", str(path)).stdout == "imported 3 estimates\n"
            assert run("estimates", "export", "-").stdout == path.read_text()
            content["estimates"][0]["runs"] = -1
            path.write_text(json.dumps(content))
            assert run("estimates", "import", str(path)).returncode == 2
            path.write_text("[]")
            refused = run("estimates", "import", str(path))
            assert (refused.returncode, "`gpuyard estimates export FILE` makes such a file" in refused.stderr) == (
                2,
                True,
            )
        finally:
            run("daemon", "stop")
