"""Resources that run out under a queue: processes, memory, descriptors, inodes. Jobs wait, and go on by themselves."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import open_ledger
from tests.integration.queue_fixture import DAEMON, QueueUnderTest, until
from tests.small_disk import mounted_disk
from tests.unit.ledger import as_root

COUNT = 40
PIDS = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]


def keeper_of(queue: QueueUnderTest) -> int:
    """Run as many jobs as a test will, and return the keeper that ran them. It then has all memory that it needs."""
    first = queue.submit("true", vram="16M", array=f"1-{COUNT}")
    assert queue.wait(f"{first}-{first + COUNT - 1}")["succeeded"] == COUNT
    assert queue.daemon is not None
    (keeper,) = Path(f"/proc/{queue.daemon.pid}/task/{queue.daemon.pid}/children").read_text().split()
    return int(keeper)


@contextlib.contextmanager
def limited(pid: int, kind: int, most: int) -> Iterator[None]:
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, hard))
    yield
    resource.prlimit(pid, kind, (soft, hard))


@contextlib.contextmanager
def without_processes(pid: int) -> Iterator[None]:
    """Let the process start no other one. A cgroup, because RLIMIT_NPROC does not apply to root."""
    parent = next((path for path in PIDS if (path / "cgroup.procs").exists()), PIDS[0])
    group = parent / f"gpuyard-test-{pid}"
    try:
        group.mkdir()
        (group / "pids.max").write_text("1")
        before = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no cgroup can limit processes: {error.strerror}")
    place = next(line.rpartition(":")[2] for line in before if ":pids:" in line or line.startswith("0::"))
    try:
        yield
    finally:
        (group / "pids.max").write_text("max")
        (parent / place.lstrip("/") / "cgroup.procs").write_text(str(pid))
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of its programs")
        group.rmdir()


def without_memory(pid: int) -> AbstractContextManager[None]:
    """Let the process map no more memory, which starting another one takes. What it has is enough to receive jobs."""
    return limited(pid, resource.RLIMIT_AS, 1 << 20)


def without_files(pid: int) -> AbstractContextManager[None]:
    return limited(pid, resource.RLIMIT_NOFILE, 3)


def waits_for(queue: QueueUnderTest, job_id: int, text: str) -> bool:
    """Return whether the job waits for this reason. No job may fail meanwhile."""
    counts = queue.counts()
    assert set(counts) <= {"queued", "running", "succeeded"}, counts
    return text in queue.why(job_id)


# The keeper cannot start programs


@as_root
@pytest.mark.parametrize(
    ("limit", "says", "remedy"),
    [
        (without_processes, "Resource temporarily unavailable", "ulimit -u"),
        (without_memory, "Cannot allocate memory", "free some memory"),
        (without_files, "Too many open files", "ulimit -n"),
    ],
)
def test_jobs_wait_while_no_program_can_be_started_and_run_once_when_it_can(
    queue: QueueUnderTest,
    tmp_path: Path,
    limit: Callable[[int], AbstractContextManager[None]],
    says: str,
    remedy: str,
) -> None:
    with limit(keeper_of(queue)):
        first = queue.shell(f"echo >> {tmp_path}/$GPUYARD_JOB_ID", vram="16M", array=f"1-{COUNT}")
        until(lambda: waits_for(queue, first, says), "the reason")
        assert remedy in queue.why(first)
        (notice,) = queue.get("/status")["notices"]
        assert says in notice
        assert remedy in notice
        assert queue.counts()["succeeded"] == COUNT
        until(lambda: not open_ledger().leases(), "the end of all leases")
        until(lambda: not list((queue.home / "logs").glob(f"{first}.*")), "the removal of its log")
    assert queue.wait()["succeeded"] == 2 * COUNT
    assert queue.get("/status")["notices"] == []
    for job_id in range(first, first + COUNT):
        assert (tmp_path / str(job_id)).read_text() == "\n"
        job = queue.job(job_id)
        assert ([attempt["number"] for attempt in job["attempts"]], job["failures"]) == ([1], 0)


@pytest.fixture
def few_inodes(own_home: Path) -> Iterator[Path]:
    logs = own_home / "logs"
    own_home.mkdir(mode=0o700, exist_ok=True)
    (own_home / "config.toml").write_text("[host]\nmin_free_disk = '0'\n")
    with mounted_disk(logs, "size=1m,nr_inodes=12,mode=0700"):
        yield logs


@as_root
def test_jobs_wait_while_no_log_can_be_created_and_run_when_there_are_inodes_again(
    few_inodes: Path, own_queue: QueueUnderTest
) -> None:
    queue = own_queue
    queue.start()
    first = queue.submit("true", vram="16M", array=f"1-{COUNT}")
    until(lambda: waits_for(queue, first + COUNT - 1, "No space left on device"), "the reason")
    assert "df -i" in queue.why(first + COUNT - 1)
    subprocess.run(["mount", "-o", "remount,nr_inodes=1000", str(few_inodes)], check=True)
    assert queue.wait()["succeeded"] == COUNT


# Few descriptors


def share_by_memory_alone(queue: QueueUnderTest) -> None:
    queue.home.mkdir(mode=0o700)
    (queue.home / "config.toml").write_text("[packing]\nmin_gain_percent = -100\n")


def test_more_jobs_than_the_daemon_may_open_files_all_start(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    share_by_memory_alone(queue)
    queue.start(("prlimit", "--nofile=64:4096", *DAEMON))
    gate = queue.gate()
    first = queue.shell(f"ulimit -Sn; read word < {gate}", vram="16M", array="1-150")
    until(lambda: queue.counts().get("running") == 150, "all of them at once")
    holder = os.open(gate, os.O_RDWR)
    os.write(holder, b"go\n" * 150)
    assert queue.wait()["succeeded"] == 150
    os.close(holder)
    assert queue.log_of(first) == "64\n"


def test_more_jobs_than_the_keeper_may_hold_leases_run_in_turns(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    share_by_memory_alone(queue)
    queue.start(("prlimit", "--nofile=64:64", *DAEMON))
    gate = queue.gate()
    queue.shell(f"read word < {gate}", vram="16M", array="1-80")
    until(lambda: any("open files" in notice for notice in queue.get("/status")["notices"]), "a notice of the limit")
    assert 0 < queue.counts()["running"] < 80
    holder = os.open(gate, os.O_RDWR)
    os.write(holder, b"go\n" * 80)
    assert queue.wait()["succeeded"] == 80
    os.close(holder)
