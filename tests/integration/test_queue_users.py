"""Another user of the same machine cannot read or reach the queue, and shares the GPUs with it."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import make_shared_directory
from gpuyard.system.processes import this_process, user_name
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.unit.ledger import DEADLINE_S, as_root, child, take, wait_for_message

pytestmark = as_root

ANNE = 61001


def become(uid: int) -> None:
    """Change to another user, after one claim: modules that Python imports late may be unreadable for that user."""
    with tempfile.TemporaryDirectory() as scratch:
        lease = Ledger(Path(scratch)).claim(this_process(), take("G0"), DEADLINE_S)
        assert lease is not None
        lease.release()
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


@pytest.fixture
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A home below a directory that all users may enter; they cannot enter pytest's tmp_path."""
    above = Path(tempfile.mkdtemp(prefix="gpuyard-queue-"))
    above.chmod(0o755)
    monkeypatch.setenv("GPUYARD_HOME", str(above / "home"))
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(make_shared_directory(above / "ledger")))
    yield above / "home"
    shutil.rmtree(above)


def try_all_accesses(connection: Connection, home: Path, uid: int) -> None:
    """Try to access everything as user `uid`, and send the name of each error."""
    become(uid)
    accesses: dict[str, Callable[[], object]] = {
        "connect": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(str(home / "daemon.sock")),
        "database": (home / "queue.db").read_bytes,
        "write-ahead log": (home / "queue.db-wal").read_bytes,
        "journal": (home / "journal").read_bytes,
        "write the journal": lambda: (home / "journal").open("ab"),
        "logs": lambda: os.listdir(home / "logs"),
        "log": (home / "logs" / "1.1.log").read_bytes,
        "lock": (home / "daemon.lock").read_bytes,
        "remove": (home / "queue.db").unlink,
        "add": (home / "config.toml").touch,
    }
    connection.send({access: error_of(go) for access, go in accesses.items()})


def error_of(go: Callable[[], object]) -> str:
    try:
        go()
    except OSError as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("mode", [None, 0o755], ids=["as it is", "with its folder open to all"])
def test_another_user_can_neither_read_nor_reach_a_queue(queue: QueueUnderTest, mode: int | None) -> None:
    queue.wait(queue.submit("echo", "secret"))
    queue.submit("true", hold=True, env=["TOKEN=secret"])
    if mode is not None:
        queue.home.chmod(mode)
    with child(try_all_accesses, queue.home, ANNE) as anne:
        errors = anne.receive()
    assert errors == dict.fromkeys(errors, "PermissionError")
    queue.home.chmod(0o700)


def hold_both(connection: Connection, folder: Path, uid: int) -> None:
    become(uid)
    lease = Ledger(folder).claim(this_process("train.py"), take("SIM-0", "SIM-1"), DEADLINE_S)
    assert lease is not None
    connection.send("held")
    wait_for_message(connection)
    lease.release()


def test_a_job_waits_for_another_users_script_names_it_and_starts_at_its_end(
    queue: QueueUnderTest,
) -> None:
    with child(hold_both, queue.home.parent / "ledger", ANNE) as anne:
        anne.receive()
        job_id = queue.submit("true")
        until(lambda: f"held by {user_name(ANNE)}, pid {anne.pid} (train.py)" in queue.why(job_id), "the holder's name")
        assert queue.wait(queue.submit("true", gpus=0))["succeeded"] == 1
        assert queue.state(job_id) == "queued"
        anne.send("go")
        assert queue.wait(job_id)["succeeded"] == 1


def test_a_job_starts_when_another_users_script_is_killed(queue: QueueUnderTest) -> None:
    with child(hold_both, queue.home.parent / "ledger", ANNE) as anne:
        anne.receive()
        job_id = queue.submit("true")
        until(lambda: "train.py" in queue.why(job_id), "the holder's name")
        anne.kill()
        assert queue.wait(job_id)["succeeded"] == 1
