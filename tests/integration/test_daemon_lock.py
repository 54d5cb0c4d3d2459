"""One daemon per user, however the last one ended, and while other processes check the lock."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.client.daemon_liveness import hold_daemon_lock, running_pid
from gpuyard.errors import EnvironmentFault
from tests.fakes.daemon import DEADLINE_S, wait_until

HOLD = (
    "import subprocess, sys\n"
    "from gpuyard.client.daemon_liveness import hold_daemon_lock\n"
    "with hold_daemon_lock(sys.argv[1]):\n"
    "    job = subprocess.Popen(['sleep', '3600'], close_fds=False, stdout=subprocess.DEVNULL)\n"
    "    print(job.pid, flush=True)\n"
    "    sys.stdin.readline()\n"
    "    job.kill()\n"
    "    job.wait()\n"
)


@pytest.fixture
def path(own_home: Path) -> Path:
    return own_home / "daemon.lock"


@pytest.fixture
def holder(path: Path) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def job_of(holder: "subprocess.Popen[str]") -> int:
    assert holder.stdout is not None
    return int(holder.stdout.readline())


def test_a_second_daemon_is_refused_with_the_pid_of_the_first(path: Path, holder: "subprocess.Popen[str]") -> None:
    job_of(holder)
    with (
        pytest.raises(EnvironmentFault, match=rf"already runs \(pid {holder.pid}\)") as refused,
        hold_daemon_lock(path),
    ):
        pass
    assert refused.value.hint
    assert running_pid(path) == holder.pid
    holder.communicate("end\n", timeout=DEADLINE_S)
    with hold_daemon_lock(path):
        assert running_pid(path) == os.getpid()
    assert running_pid(path) is None


def test_a_killed_daemon_does_not_hold_the_lock_while_its_jobs_continue(
    path: Path, holder: "subprocess.Popen[str]"
) -> None:
    job = job_of(holder)
    holder.kill()
    holder.wait(DEADLINE_S)
    assert psutil.pid_exists(job)
    assert running_pid(path) is None
    with hold_daemon_lock(path):
        assert running_pid(path) == os.getpid()
    os.kill(job, signal.SIGKILL)


def test_without_a_lock_file_no_daemon_is_reported(path: Path) -> None:
    assert running_pid(path) is None
    assert not path.exists()


def test_the_lock_file_is_private_to_this_user(path: Path) -> None:
    with hold_daemon_lock(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_checking_for_a_daemon_does_not_prevent_one_from_starting(path: Path) -> None:
    with hold_daemon_lock(path):
        pass
    stop, checks = threading.Event(), [0, 0, 0]

    def check(which: int) -> None:
        while not stop.is_set():
            running_pid(path)
            checks[which] += 1

    checkers = [threading.Thread(target=check, args=(which,)) for which in range(3)]
    for looker in checkers:
        looker.start()
    try:
        wait_until(lambda: all(checks))
        for _ in range(50):
            with hold_daemon_lock(path):
                pass
    finally:
        stop.set()
        for looker in checkers:
            looker.join(DEADLINE_S)


def test_a_symbolic_link_in_place_of_the_lock_is_refused(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentFault, match="it is a symbolic link"), hold_daemon_lock(path):
        pass
    assert not (tmp_path / "elsewhere").exists()
