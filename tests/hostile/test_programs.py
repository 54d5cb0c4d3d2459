"""Attacks on the programs of another user's queue: their keeper, their output, their processes."""

import fcntl
import os
import signal
import socket
from pathlib import Path

import pytest

from gpuyard.engines.session.task_files import claim_in_shared, open_log, owner_line
from gpuyard.errors import EnvironmentFault
from gpuyard.system import file_locks
from gpuyard.system.private_files import PrivateFileError
from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as, stay_as
from tests.integration.queue_fixture import QueueUnderTest, is_gone
from tests.unit.ledger import child


def connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(0)
        client.connect(path)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def lock(path: str) -> None:
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def keeper_of(queue: QueueUnderTest) -> int:
    return int(next((queue.home / "keepers").glob("*.sock")).stem)


def program_of(queue: QueueUnderTest, job_id: int) -> int:
    return int(queue.job(job_id)["attempts"][-1]["pid"])


@attack("connect to the keeper of another user's jobs", now="refused")
def test_connect_to_the_keeper(queue: QueueUnderTest) -> None:
    queue.start_gated(gpus=0)
    path = str(next((queue.home / "keepers").glob("*.sock")))
    with pytest.raises(PermissionError):
        act_as(BEN, connect, path)


@attack("stop the keeper of another user's jobs", now="refused")
def test_stop_the_keeper(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated(gpus=0)
    with pytest.raises(PermissionError):
        act_as(BEN, os.kill, keeper_of(queue), signal.SIGSTOP)
    gate.write_text("go\n")
    queue.wait(job_id)


@attack("read and lock the log of another user's job", now="refused")
def test_read_and_lock_a_log(queue: QueueUnderTest) -> None:
    job_id = queue.shell("echo secret", gpus=0)
    queue.wait(job_id)
    for act in (read, lock):
        with pytest.raises(PermissionError):
            act_as(BEN, act, queue.job(job_id)["log"])
    assert queue.log_of(job_id) == "secret\n"


@attack("read the environment of another user's job in /proc", now="refused")
def test_read_the_environment_of_a_job(queue: QueueUnderTest) -> None:
    job_id, _ = queue.start_gated(gpus=0)
    with pytest.raises(PermissionError):
        act_as(BEN, read, f"/proc/{program_of(queue, job_id)}/environ")


@attack("hold the lock of another user's daemon, so that it cannot start", now="refused")
def test_lock_the_daemons_lock(queue: QueueUnderTest) -> None:
    with pytest.raises(PermissionError):
        act_as(BEN, lock, str(queue.home / "daemon.lock"))
    queue.restart()


@attack("connect to the socket through which another user's task is shown", now="refused")
def test_connect_to_a_task(queue: QueueUnderTest) -> None:
    with socket.socket(socket.AF_UNIX) as runner:
        runner.bind(str(queue.home / "sessions" / "1.1.sock"))
        runner.listen()
        with pytest.raises(PermissionError):
            act_as(BEN, connect, str(queue.home / "sessions" / "1.1.sock"))


def pose_as_a_job(marks: dict[str, str]) -> int:
    """Become a process with these variables, as /proc shows them, and return its pid."""
    pid = os.fork()
    if not pid:
        os.execve("/bin/sleep", ["sleep", "600"], marks)
    return pid


@attack("give a process the variables of another user's job, so that it counts as one of its processes",
        now="ignored")  # fmt: skip
def test_pose_as_a_process_of_a_job(queue: QueueUnderTest) -> None:
    job_id, _ = queue.start_gated()
    marks = {"GPUYARD_JOB_ID": str(job_id), "GPUYARD_ATTEMPT": "1", "GPUYARD_QUEUE": str(queue.home)}
    with child(stay_as, BEN, pose_as_a_job, marks) as ben:
        posing = ben.receive()
        queue.post("/jobs/cancel", ids=str(job_id))
        queue.wait(job_id)
        assert not is_gone(posing)
        assert queue.counts() == {"cancelled": 1}
        os.kill(posing, signal.SIGKILL)


@attack("hold the lock of another user's workspace or batch folder, which everyone can read",
        now="bounded: 60 s")  # fmt: skip
def test_lock_a_workspace(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_locks, "_IN_TIME_S", 0.2)
    workspace = place / "workspace"
    workspace.mkdir(mode=0o755)
    with child(stay_as, BEN, lock, str(workspace)) as ben:
        ben.receive()
        with pytest.raises(EnvironmentFault, match="another process has kept"), file_locks.locked(workspace):
            pytest.fail("two processes hold the lock")


@attack("make a pipe with the name of a task's log, so that the task waits for a reader", now="refused")
def test_make_a_pipe_of_a_tasks_log(place: Path) -> None:
    folder = place / "logs"
    folder.mkdir(mode=0o1777)
    folder.chmod(0o1777)
    act_as(BEN, os.mkfifo, str(folder / "task.log"), 0o666)
    with pytest.raises(PrivateFileError):
        open_log(str(folder / "task.log"), None, owner_line("tag", str(place)))
    with pytest.raises(PrivateFileError):
        claim_in_shared(str(folder / "task.log"), owner_line("tag", str(place)))


@attack("kill the program of another user's job", now="refused")
def test_kill_a_program(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated(gpus=0)
    with pytest.raises(PermissionError):
        act_as(BEN, os.kill, program_of(queue, job_id), signal.SIGKILL)
    gate.write_text("go\n")
    queue.wait(job_id)
    assert queue.counts() == {"succeeded": 1}
