"""What a machine does to a queue: a damaged database, a full disk, a ledger kept shut, a supervisor that is killed."""

import contextlib
import fcntl
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault, GpuyardError
from tests.in_time import in_time
from tests.integration.queue_fixture import Daemon, QueueUnderTest, is_gone, until
from tests.unit.leases import as_root

SOON_S = 1.0


def refusal() -> str:
    """What a daemon says that does not come to serve; it must not fail for a reason of its own."""
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
def test_a_damaged_database_is_set_aside_and_its_ids_and_logs_are_left_alone(
    own_queue: QueueUnderTest, spoil: object
) -> None:
    queue = own_queue
    queue.start()
    last = queue.send("echo", "old {index}", gpus=0, array="1-40")["last"]
    queue.wait()
    queue.stop()
    assert callable(spoil)
    spoil(queue.home / "queue.db")
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


def test_a_database_that_is_damaged_while_it_is_used_ends_the_daemon_and_the_next_one_sets_it_aside(
    queue: QueueUnderTest,
) -> None:
    last = queue.send("true", gpus=0, array="1-40")["last"]
    queue.wait()
    queue.restart(signal.SIGTERM)  # so that nothing of it is in the file beside it
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as other:
        with other:
            other.execute("INSERT INTO settings VALUES ('other', '')")  # so that the daemon reads it all again
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


def test_a_database_of_a_newer_version_is_left_alone(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    queue.wait(queue.submit("true"))
    queue.stop()
    path = queue.home / "queue.db"
    with contextlib.closing(sqlite3.connect(path)) as database:
        known = database.execute("PRAGMA user_version").fetchone()[0]
        database.execute("PRAGMA user_version = 999")
    said = refusal()
    assert "schema 999" in said
    assert "a newer gpuyard made" in said
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
        database.execute(f"PRAGMA user_version = {known}")


# The folder


def test_a_second_daemon_refuses_and_names_the_first(queue: QueueUnderTest) -> None:
    assert queue.daemon is not None
    assert f"the daemon already runs (pid {queue.daemon.pid})" in refusal()
    assert queue.wait(queue.submit("true"))["succeeded"] == 1


def test_a_state_folder_that_is_none_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path / "file" / "home"))
    assert f"{tmp_path}/file/home cannot be used: Not a directory (set GPUYARD_HOME to another directory)" in refusal()


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@as_root
def test_a_state_folder_that_cannot_be_written_is_told(own_home: Path) -> None:
    with mounted(own_home, "ro,size=1m"):
        assert f"{own_home}/daemon.lock cannot be opened: Read-only file system" in refusal()


# The disk


@pytest.fixture
def small_disk(own_home: Path) -> Iterator[Path]:
    with mounted(own_home, "size=2m,mode=0700"):
        yield own_home


def fill(folder: Path) -> Path:
    """Until not a byte more fits."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    return ballast


def submit_until_refused(queue: QueueUnderTest) -> tuple[list[int], EnvironmentFault]:
    """Those that were acknowledged: what the database had room for is still there to be used."""
    ids: list[int] = []
    while len(ids) < 1000:
        try:
            ids.append(queue.submit("true", gpus=0, env=[f"FILL={'x' * 20000}"]))
        except EnvironmentFault as refused:
            return ids, refused
    pytest.fail("a full disk takes everything")


@as_root
def test_on_a_full_disk_nothing_new_is_taken_nothing_is_lost_and_all_goes_on_when_there_is_room(
    small_disk: Path, own_queue: QueueUnderTest, tmp_path: Path
) -> None:
    queue = own_queue
    (small_disk / "config.toml").write_text("[queue]\ncpu_jobs = 1\n")
    queue.start()
    queue.wait(queue.submit("true", gpus=0))  # so that the journal has its first page
    running, gate = queue.start_gated(gpus=0)
    waiting = queue.shell(f"touch {tmp_path}/has-run", gpus=0)
    ballast = fill(small_disk)
    taken, refused = submit_until_refused(queue)
    assert "the queue's database cannot be written" in str(refused)
    assert "disk space" in (refused.hint or "")
    gate.write_text("go\n")
    until(lambda: queue.get("/status")["notices"], "word of the trouble")
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
    if daemon.serves():  # there may be room left in what the database has
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
def test_a_cancel_that_cannot_be_written_down_is_refused_and_can_be_asked_for_again(
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
        pytest.skip("the database had room for it")
    ballast.unlink()
    assert queue.state(job_id) == "running"
    assert queue.post("/jobs/cancel", ids=str(job_id))["count"] == 1
    assert queue.wait(job_id)["failed"][0]["state"] == "cancelled"


@as_root
def test_a_large_submission_that_does_not_fit_on_the_disk_is_not_there_and_can_be_sent_again(
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


# The ledger


def test_the_daemon_answers_while_somebody_else_keeps_the_ledger_shut(queue: QueueUnderTest) -> None:
    queue.wait(queue.submit("true"))
    with (queue.home / "locks" / "mutex").open() as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        job_id = queue.submit("true")
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            in_time(SOON_S, lambda: queue.get("/status"))
        assert queue.state(job_id) == "queued"
        with pytest.raises(EnvironmentFault, match="was busy for"):
            queue.why(job_id)
    assert queue.wait(job_id)["succeeded"] == 1


# The keeper


def keeper_of(said: Path) -> int:
    """The parent of a program, once that has said its pid."""
    until(lambda: said.exists() and said.read_text().endswith("\n"), "the program")
    return int(Path(f"/proc/{int(said.read_text())}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_program_whose_keeper_was_killed_is_ended_before_its_job_runs_again(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    said = tmp_path / "pid"
    job_id = queue.shell(
        f"if [ -e {said} ]; then cut -d' ' -f3 /proc/$(cat {said})/stat || echo gone; exit 0; fi\n"
        f"echo $$ > {said}; sleep 3600",
        retries=1,
    )
    os.kill(keeper_of(said), signal.SIGKILL)
    assert queue.wait(job_id)["succeeded"] == 1
    assert [attempt["outcome"] for attempt in queue.job(job_id)["attempts"]] == ["lost", "succeeded"]
    assert queue.log_of(job_id, 2).split()[-1] in ("Z", "X", "gone")  # nobody may have taken notice of its end
    assert is_gone(int(said.read_text()))


def test_a_keeper_that_died_while_there_was_no_daemon_is_told_as_lost(queue: QueueUnderTest, tmp_path: Path) -> None:
    gate, said = queue.gate(), tmp_path / "pid"
    job_id = queue.shell(f"echo $$ > {said}; read word < {gate}")
    keeper = keeper_of(said)
    queue.kill9()
    os.kill(keeper, signal.SIGKILL)
    queue.start()
    (failed,) = queue.wait(job_id)["failed"]
    assert (failed["outcome"], failed["state"]) == ("lost", "failed")
    until(lambda: is_gone(int(said.read_text())), "the end of its program, which nobody let go")
