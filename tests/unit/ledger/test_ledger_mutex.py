import fcntl
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.system.processes import user_name
from tests.unit.ledger import DEADLINE_S, child, wait_for_message


def hold(connection: Connection, folder: Path) -> None:
    with hold_mutex(folder, DEADLINE_S):
        connection.send("held")
        wait_for_message(connection)
    connection.send("free")


def test_a_mutex_held_by_a_stopped_process_is_reported_after_the_timeout(tmp_path: Path) -> None:
    with child(hold, tmp_path) as stopped:
        stopped.receive()
        os.kill(stopped.pid, signal.SIGSTOP)
        with (
            pytest.raises(EnvironmentFault, match=f"the ledger in {tmp_path} was busy for 0.2 s") as caught,
            hold_mutex(tmp_path, 0.2),
        ):
            pytest.fail("two hold it")
        if Path("/proc/locks").exists():
            assert f"(pid {stopped.pid}, user {user_name(os.getuid())}, stopped)" in str(caught.value)
        assert "stopped" in (caught.value.hint or "")
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.send("go on")
        stopped.receive()
        with hold_mutex(tmp_path, DEADLINE_S):
            pass


def test_a_killed_process_releases_the_mutex(tmp_path: Path) -> None:
    with child(hold, tmp_path) as killed:
        killed.receive()
        killed.kill()
    with hold_mutex(tmp_path, 0.0):
        pass


def fork_while_holding(connection: Connection, folder: Path) -> None:
    with hold_mutex(folder, DEADLINE_S):
        pid = os.fork()
        if pid == 0:
            signal.pause()
    connection.send(pid)
    wait_for_message(connection)


def test_a_process_forked_while_the_mutex_is_held_does_not_keep_it(tmp_path: Path) -> None:
    with child(fork_while_holding, tmp_path) as parent:
        forked = parent.receive()
        try:
            with hold_mutex(tmp_path, 0.0):
                pass
        finally:
            os.kill(forked, signal.SIGKILL)


def fork_beside_a_holding_thread(connection: Connection, folder: Path) -> None:
    holds = threading.Event()

    def hold_for_ever() -> None:
        with hold_mutex(folder, DEADLINE_S):
            holds.set()
            signal.pause()

    threading.Thread(target=hold_for_ever, daemon=True).start()
    holds.wait(DEADLINE_S)
    pid = os.fork()
    if pid == 0:
        connection.send(os.getpid())
        signal.pause()
    wait_for_message(connection)


def test_a_fork_does_not_keep_a_mutex_that_a_thread_of_its_killed_parent_held(tmp_path: Path) -> None:
    with child(fork_beside_a_holding_thread, tmp_path) as parent:
        forked = parent.receive()
        try:
            parent.kill()
            with hold_mutex(tmp_path, DEADLINE_S):
                pass
        finally:
            os.kill(forked, signal.SIGKILL)


def test_a_directory_replaced_meanwhile_is_not_the_mutex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    flock = fcntl.flock

    def replace_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        folder.rename(tmp_path / "old")
        folder.mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replace_first)
    with hold_mutex(folder, DEADLINE_S), pytest.raises(EnvironmentFault, match="was busy"), hold_mutex(folder, 0.0):
        pytest.fail("two hold it")


def test_a_directory_removed_while_a_process_waits_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    flock = fcntl.flock

    def remove_first(descriptor: int, operation: int) -> None:
        folder.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with pytest.raises(EnvironmentFault, match="cannot be written: No such file"), hold_mutex(folder, DEADLINE_S):
        pytest.fail("it is held")


def test_an_interrupt_while_the_mutex_is_held_comes_after_its_release(tmp_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupt_inside(tmp_path, steps)
    assert steps == ["whole"]
    with hold_mutex(tmp_path, 0.0):
        pass


def interrupt_inside(folder: Path, steps: list[str]) -> None:
    with hold_mutex(folder, 0.0):
        signal.raise_signal(signal.SIGINT)
        steps.append("whole")


def test_a_missing_or_open_directory_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(EnvironmentFault, match=f"{missing} cannot be written: No such file"), hold_mutex(missing, 0.0):
        pytest.fail("it is held")
    tmp_path.chmod(0o777)
    with pytest.raises(EnvironmentFault, match="shared, but not sticky"), hold_mutex(tmp_path, 0.0):
        pytest.fail("it is held")
