"""`gpuyard daemon restart`: a new daemon replaces the running one, and jobs continue meanwhile."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.client import restart_daemon
from gpuyard.client.daemon_liveness import running_pid
from gpuyard.client.fast_http import NoDaemon
from gpuyard.errors import UserError
from gpuyard.version import __version__
from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import DEADLINE_S, Daemon, QueueUnderTest, until

pytestmark = pytest.mark.usefixtures("unmeasured")

# A minimal service manager: a unit with `Restart=on-failure`.
MANAGER = """
import subprocess, sys
while subprocess.call([sys.executable, "-m", "gpuyard", "daemon", "run"]) != 0:
    pass
"""


@pytest.fixture
def queue_at(home: Path) -> Iterator[QueueUnderTest]:
    queue = QueueUnderTest(home)
    yield queue
    queue.client.close()


def pid_in(home: Path) -> int | None:
    return running_pid(home / "daemon.lock")


def test_a_running_job_outlives_the_restart_and_ends_in_the_next_daemon(home: Path, queue_at: QueueUnderTest) -> None:
    queue, daemon = queue_at, Daemon()
    assert daemon.serves()
    job, gate = queue.start_gated(gpus=0)
    before = queue.job(job)["attempts"]

    result = run("daemon", "restart")

    pid = pid_in(home)
    assert result.stdout == f"daemon restarted (pid {pid}, version {__version__}); 1 job still running\n"
    assert (result.returncode, result.stderr) == (0, "")
    assert pid != daemon.pid
    assert daemon.wait() == 0
    assert f"the daemon stops for a restart: `gpuyard daemon restart`, version {__version__}" in daemon.log
    after = queue.until_state(job, "running")["attempts"]
    assert [(each["number"], each["pid"]) for each in after] == [(each["number"], each["pid"]) for each in before]
    gate.write_text("go\n")
    queue.wait(job)
    assert queue.state(job) == "succeeded"


def test_restart_starts_a_daemon_if_none_runs_and_its_json_names_the_replaced_one(home: Path) -> None:
    result = run("daemon", "restart")
    first = pid_in(home)
    assert (result.returncode, result.stdout) == (0, f"daemon started (pid {first}); none was running\n")
    second = json.loads(run("daemon", "restart", "--json").stdout)
    assert second["replaced"] == {"pid": first, "version": __version__}
    assert (second["pid"], second["version"], second["managed"]) == (pid_in(home), __version__, False)


def test_the_web_page_is_available_again_at_the_same_address(home: Path, queue_at: QueueUnderTest) -> None:
    assert run("daemon", "start").returncode == 0
    before = queue_at.post("/web", port=0, read_only=True)
    assert run("daemon", "restart").returncode == 0
    assert queue_at.get("/web") == before


def test_many_restarts_at_once_leave_one_daemon(home: Path) -> None:
    assert run("daemon", "start").returncode == 0
    commands = [subprocess.Popen([*GPUYARD, "daemon", "restart"], stderr=subprocess.PIPE, text=True) for _ in range(5)]
    results = [(command.communicate(timeout=DEADLINE_S)[1], command.returncode) for command in commands]
    assert results == [("", 0)] * 5
    assert json.loads(run("daemon", "status", "--json").stdout)["pid"] == pid_in(home)


def test_a_daemon_ignores_a_stop_meant_for_another_pid(queue: QueueUnderTest) -> None:
    assert queue.daemon is not None
    with pytest.raises(UserError, match=f"this daemon is process {queue.daemon.pid}, not 1"):
        queue.post("/stop", pid=1, restart=True)
    with pytest.raises(UserError, match="restart: Expected `bool`"):
        queue.post("/stop", restart="yes")
    assert queue.get("/status")["pid"] == queue.daemon.pid


def test_a_service_manager_starts_the_next_one_itself(home: Path) -> None:
    manager = subprocess.Popen([sys.executable, "-c", MANAGER], stderr=subprocess.DEVNULL)
    try:
        until(lambda: pid_in(home) is not None and (home / "daemon.sock").exists(), "the manager's daemon")
        first = json.loads(run("daemon", "status", "--json").stdout)
        result = run("daemon", "restart", "--json")
        second = json.loads(result.stdout)
        assert (result.returncode, result.stderr) == (0, "")
        assert (first["managed"], second["managed"]) == (True, True)
        assert second["replaced"]["pid"] == first["pid"] != second["pid"]
        # A stopped daemon is not restarted: it exits with status 0.
        assert run("daemon", "stop").returncode == 0
        assert manager.wait(DEADLINE_S) == 0
    finally:
        manager.kill()
        manager.wait()


def test_without_a_service_manager_the_next_daemon_runs_in_the_background(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_daemon, "_MANAGER_S", 0.2)
    daemon = Daemon((sys.executable, "-m", "gpuyard", "daemon", "run"))
    assert daemon.serves()
    before = restart_daemon.status_of(str(home / "daemon.sock"))
    assert before is not None
    notes = restart_daemon.replace_daemon(before, "a test")
    assert daemon.wait() == 75
    assert notes == ["its service manager did not start it again within 0 s: it runs in the background now"]
    after = restart_daemon.status_of(str(home / "daemon.sock"))
    assert after is not None
    assert (after["managed"], after["pid"]) == (False, pid_in(home))


def test_a_removed_socket_is_made_anew(queue: QueueUnderTest) -> None:
    """No command could reach the daemon, and no other daemon could start beside it."""
    socket_file, pid = queue.home / "daemon.sock", queue.get("/status")["pid"]
    for _ in range(2):
        queue.client.close()
        socket_file.unlink()
        until(socket_file.exists, "the socket")
        until(lambda: answers(queue), "an answer")
        assert queue.get("/status")["pid"] == pid
    assert socket_file.stat().st_mode & 0o777 == 0o600
    assert queue.wait(queue.submit("true"))["succeeded"] == 1


def answers(queue: QueueUnderTest) -> bool:
    with contextlib.suppress(NoDaemon):  # bound, and not yet listening
        return bool(queue.get("/status"))
    return False
