"""Faults of the machine under a queue: a damaged database, a full disk, a locked ledger, a killed keeper."""

import contextlib
import fcntl
import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault, GpuyardError
from tests.in_time import in_time
from tests.integration.queue_fixture import Daemon, QueueUnderTest, is_gone, until
from tests.small_disk import mounted_disk
from tests.unit.ledger import as_root

SOON_S = 1.0


def failed_start_log() -> str:
    """Start a daemon, assert that it exits with status 1 and without a traceback, and return its log."""
    daemon = Daemon()
    served = daemon.serves()
    status = daemon.kill() if served else daemon.wait()
    assert (served, status) == (False, 1), daemon.log
    assert "Traceback" not in daemon.log
    return daemon.log


# The database


def spoil_middle(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 3)
        file.write(b"\xff" * (size // 3))


def spoil_all(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize("spoil", [spoil_middle, spoil_all])
def test_a_damaged_database_is_set_aside_and_its_ids_and_logs_are_not_reused(
    own_queue: QueueUnderTest, spoil: object
) -> None:
    queue = own_queue
    queue.start()
    last = queue.send("echo", "old {index}", gpus=0, array="1-40")["last"]
    queue.wait()
    queue.stop()
    assert callable(spoil)
    spoil(queue.home / "queue.db")
    (queue.home / "queue.record").unlink()  # which has the last id, too
    content = (queue.home / "queue.db").read_bytes()
    queue.start()
    (notice,) = queue.get("/status")["notices"]
    (aside,) = queue.home.glob("queue.db.damaged-*")
    assert str(aside) in notice
    assert aside.read_bytes() == content
    assert queue.counts() == {}
    job_id = queue.submit("echo", "new")
    queue.wait()
    assert job_id > last
    assert (queue.log_of(job_id), queue.log_of(last)) == ("new\n", "old 40\n")


def has_in_file(path: Path, job_id: int) -> bool:
    """Whether a copy of the database's file, without its write-ahead log, has the job."""
    copy = path.with_name("copy.db")
    copy.write_bytes(path.read_bytes())
    with contextlib.closing(sqlite3.connect(f"file:{copy}?immutable=1", uri=True)) as database:
        has_tables = database.execute("SELECT 1 FROM sqlite_schema").fetchone()
        return has_tables is not None and database.execute("SELECT 1 FROM jobs WHERE id = ?", (job_id,)).fetchone()


def test_a_quiet_queue_is_complete_in_its_file(queue: QueueUnderTest) -> None:
    job_id = queue.submit("true", gpus=0, hold=True)
    until(lambda: has_in_file(queue.home / "queue.db", job_id), "the job in the file")


def test_an_older_copy_of_the_database_is_noticed_and_what_has_run_since_does_not_run_again(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    path = queue.home / "queue.db"
    queue.post("/pause")
    ran, other = queue.shell(f"echo ran >> {tmp_path}/ran", gpus=0), queue.submit("true", gpus=0)
    until(lambda: has_in_file(path, other), "the jobs in the file")
    copy = path.read_bytes()
    queue.post("/jobs/hold", ids=str(other))
    queue.post("/unpause")
    queue.wait(ran)
    last = queue.submit("true", gpus=0)
    queue.wait(last)
    queue.stop()
    path.write_bytes(copy)
    queue.lacks_attempts = True
    queue.start()
    (notice,) = queue.get("/jobs")["notices"]
    assert "the queue's database is an older copy" in notice
    assert f"jobs up to {other} are known" in notice
    assert f"are held: {ran} " in notice
    assert notice in queue.daemon.log if queue.daemon is not None else False
    assert (queue.state(ran), queue.state(other)) == ("held", "queued")
    queue.post("/unpause")
    assert queue.wait(other)["succeeded"] == 1
    assert queue.submit("true", gpus=0) > last, "ids are not given again"
    assert (tmp_path / "ran").read_text() == "ran\n"
    queue.post("/jobs/release", ids=str(ran))
    queue.wait(ran)
    assert [each["number"] for each in queue.job(ran)["attempts"]] == [2], "attempt 1 has a log already"


@pytest.mark.parametrize("harm", ["removed", "emptied", "log removed"])
def test_a_database_that_lost_jobs_is_noticed(queue: QueueUnderTest, harm: str) -> None:
    path = queue.home / "queue.db"
    job_id = queue.submit("true", gpus=0, hold=True)
    queue.kill9()
    if harm != "log removed":
        path.write_bytes(b"")
    if harm == "removed":
        path.unlink()
    path.with_name("queue.db-wal").unlink()
    queue.start()
    (notice,) = queue.get("/status")["notices"]
    assert {"log removed": "(queue.db-wal) was removed"}.get(harm, "was missing or empty") in notice
    assert f"job ids up to {job_id} were given" in notice
    assert queue.submit("true", gpus=0) > job_id
    queue.restart(signal.SIGTERM)
    assert queue.get("/status")["notices"] == [], "it is said once"


def test_a_database_damaged_while_open_ends_the_daemon_and_the_next_one_sets_it_aside(
    queue: QueueUnderTest,
) -> None:
    last = queue.send("true", gpus=0, array="1-40")["last"]
    queue.wait()
    queue.restart(signal.SIGTERM)  # so that the write-ahead log is empty
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as other:
        with other:
            other.execute("INSERT INTO settings VALUES ('other', '')")  # so that the daemon drops its page cache
        spoil_middle(queue.home / "queue.db")
    with contextlib.suppress(GpuyardError):
        for job_id in range(1, last + 1):
            queue.job(job_id)
        queue.submit("true", gpus=0)
        queue.wait()
    daemon = queue.await_end()
    assert daemon.status == 1
    assert "damaged" in daemon.log
    assert "Traceback" not in daemon.log
    queue.start()
    assert "set aside" in queue.get("/status")["notices"][0]
    assert queue.wait(queue.submit("true"))["succeeded"] == 1


def test_the_daemon_refuses_a_database_of_a_newer_version_and_keeps_it(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    queue.wait(queue.submit("true"))
    queue.stop()
    path = queue.home / "queue.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        known = database.execute("PRAGMA user_version").fetchone()[0]
        database.execute("PRAGMA user_version = 999")
    log = failed_start_log()
    assert "schema 999" in log
    assert "a newer gpuyard made" in log
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
        database.execute(f"PRAGMA user_version = {known}")


# The folder


def test_a_second_daemon_refuses_and_names_the_first(queue: QueueUnderTest) -> None:
    assert queue.daemon is not None
    assert f"the daemon already runs (pid {queue.daemon.pid})" in failed_start_log()
    assert queue.wait(queue.submit("true"))["succeeded"] == 1


def test_a_state_directory_below_a_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path / "file" / "home"))
    assert f"{tmp_path}/file cannot be created: File exists (set GPUYARD_HOME to another folder)" in failed_start_log()


@as_root
def test_a_read_only_state_directory_is_reported(own_home: Path) -> None:
    with mounted_disk(own_home, "ro,size=1m,mode=700"):
        assert f"{own_home}/daemon.lock cannot be opened: Read-only file system" in failed_start_log()


# The disk


@pytest.fixture
def small_disk(own_home: Path) -> Iterator[Path]:
    with mounted_disk(own_home, "size=3m,mode=0700"):
        (own_home / "config.toml").write_text("[host]\nmin_free_disk = '0'\n")
        yield own_home


def fill(folder: Path) -> Path:
    """Write a file until the disk is full, and return its path."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


def submit_until_refused(queue: QueueUnderTest) -> tuple[list[int], EnvironmentFault]:
    """Submit until the daemon refuses (the database may have free pages). Return the accepted ids and the error."""
    ids: list[int] = []
    while len(ids) < 1000:
        try:
            ids.append(queue.submit("true", gpus=0, env=[f"FILL={'x' * 20000}"]))
        except EnvironmentFault as refused:
            return ids, refused
    pytest.fail("the daemon accepted 1000 submissions on a full disk")


@as_root
def test_a_full_disk_rejects_submissions_loses_no_job_and_the_queue_continues_after_it(
    small_disk: Path, own_queue: QueueUnderTest, tmp_path: Path
) -> None:
    queue = own_queue
    (small_disk / "config.toml").write_text("[queue]\ncpu_jobs = 1\n[host]\nmin_free_disk = '0'\n")
    queue.start()
    queue.wait(queue.submit("true", gpus=0))  # so that the journal has its first page
    running, gate = queue.start_gated(gpus=0)
    waiting = queue.shell(f"touch {tmp_path}/has-run", gpus=0)
    ballast = fill(small_disk)
    taken, refused = submit_until_refused(queue)
    assert "the queue's database cannot be written" in str(refused)
    assert "disk space" in (refused.hint or "")
    gate.write_text("go\n")
    until(lambda: queue.get("/status")["notices"], "a notice")
    assert "cannot be written" in queue.get("/status")["notices"][0]
    assert {queue.state(job_id) for job_id in (waiting, *taken)} == {"queued"}
    assert not (tmp_path / "has-run").exists()
    ballast.unlink()
    assert queue.wait(running)["succeeded"] == 1
    assert queue.wait()["succeeded"] == len(taken) + 3
    assert queue.get("/status")["notices"] == []


@as_root
def test_a_daemon_that_is_killed_on_a_full_disk_loses_nothing(small_disk: Path, own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    held = queue.submit("true", gpus=0, hold=True)
    _, gate = queue.start_gated(gpus=0)
    ballast = fill(small_disk)
    taken, _ = submit_until_refused(queue)
    queue.kill9()
    gate.write_text("go\n")
    daemon = Daemon()
    if daemon.serves():  # the database may have free pages left
        daemon.kill()
    else:
        assert daemon.wait() == 1
        assert "disk" in daemon.log
    assert "Traceback" not in daemon.log
    ballast.unlink()
    queue.start()
    queue.post("/jobs/release", ids=str(held))
    assert queue.wait()["succeeded"] == len(taken) + 2


@as_root
def test_a_cancel_that_cannot_be_stored_is_rejected_and_can_be_repeated(
    small_disk: Path, own_queue: QueueUnderTest
) -> None:
    queue = own_queue
    queue.start()
    job_id = queue.shell("trap '' TERM; while :; do sleep 0.05; done", gpus=0, grace="100ms")
    queue.until_state(job_id, "running")
    ballast = fill(small_disk)
    submit_until_refused(queue)
    with contextlib.suppress(EnvironmentFault):
        queue.post("/jobs/cancel", ids=str(job_id))
        pytest.skip("the database had free pages for it")
    ballast.unlink()
    assert queue.state(job_id) == "running"
    assert queue.post("/jobs/cancel", ids=str(job_id))["count"] == 1
    assert queue.wait(job_id)["failed"][0]["state"] == "cancelled"


@as_root
def test_a_large_submission_that_does_not_fit_on_the_disk_is_rolled_back_and_can_be_repeated(
    small_disk: Path, own_queue: QueueUnderTest
) -> None:
    queue = own_queue
    queue.start()
    ballast = fill(small_disk)
    os.truncate(ballast, ballast.stat().st_size - 512 * 1024)  # so that a part of it fits
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        queue.send("true", token="again", gpus=0, array="1-20000", hold=True)
    ballast.unlink()
    assert queue.send("true", token="again", gpus=0, array="1-1500", hold=True)["count"] == 1500
    assert queue.counts() == {"held": 1500}


@as_root
def test_the_jobs_of_a_refused_submission_are_not_listed_and_are_deleted_when_there_is_space_again(
    small_disk: Path, own_queue: QueueUnderTest
) -> None:
    queue = own_queue
    queue.start()
    kept = queue.submit("true", gpus=0, hold=True)
    ballast = fill(small_disk)
    os.truncate(ballast, ballast.stat().st_size - 512 * 1024)
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        queue.send("true", token="", gpus=0, array="1-20000", hold=True)
    assert queue.counts() == {"held": 1}
    assert [row["id"] for row in queue.get("/jobs")["jobs"]] == [kept]
    with pytest.raises(GpuyardError, match="there is no job"):
        queue.job(kept + 1)
    ballast.unlink()

    def stored() -> list[tuple[int]]:
        with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database:
            query = "SELECT count(*) FROM jobs UNION ALL SELECT count(*) FROM specs"
            return database.execute(f"{query} UNION ALL SELECT count(*) FROM submissions").fetchall()

    until(lambda: stored() == [(1,), (1,), (1,)], "the end of what was stored of it")
    assert queue.counts() == {"held": 1}


# The ledger


def test_the_daemon_answers_while_another_process_locks_the_ledger(queue: QueueUnderTest) -> None:
    queue.wait(queue.submit("true"))
    folder = os.open(queue.home / "locks", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        job_id = queue.submit("true")
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            in_time(SOON_S, lambda: queue.get("/status"))
        assert queue.state(job_id) == "queued"
        until(lambda: "was busy for" in queue.why(job_id), "a reason that names the ledger")
    finally:
        os.close(folder)
    assert queue.wait(job_id)["succeeded"] == 1


# The keeper


def keeper_of(pid_file: Path) -> int:
    """Return the parent of the program that writes its pid to `pid_file`, waiting for the file."""
    until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"), "the program")
    return int(Path(f"/proc/{int(pid_file.read_text())}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_program_whose_keeper_was_killed_is_ended_before_its_job_is_retried(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    job_id = queue.shell(
        f"if [ -e {pid_file} ]; then cut -d' ' -f3 /proc/$(cat {pid_file})/stat || echo gone; exit 0; fi\n"
        f"echo $$ > {pid_file}; sleep 3600",
        retries=1,
    )
    os.kill(keeper_of(pid_file), signal.SIGKILL)
    assert queue.wait(job_id)["succeeded"] == 1
    assert [attempt["outcome"] for attempt in queue.job(job_id)["attempts"]] == ["lost", "succeeded"]
    assert queue.log_of(job_id, 2).split()[-1] in ("Z", "X", "gone")  # a zombie until its parent reaps it
    assert is_gone(int(pid_file.read_text()))


def test_a_keeper_that_died_without_a_daemon_leaves_its_job_lost(queue: QueueUnderTest, tmp_path: Path) -> None:
    gate, pid_file = queue.gate(), tmp_path / "pid"
    job_id = queue.shell(f"echo $$ > {pid_file}; read word < {gate}")
    keeper = keeper_of(pid_file)
    queue.kill9()
    os.kill(keeper, signal.SIGKILL)
    queue.start()
    (failed,) = queue.wait(job_id)["failed"]
    assert (failed["outcome"], failed["state"]) == ("lost", "failed")
    until(lambda: is_gone(int(pid_file.read_text())), "the end of its program")
