"""Attacks on what users share and can use up (disks, inodes, processes), and on another user's processes."""

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.ledger import Ledger
from gpuyard.model.lease import Claim, Share
from gpuyard.system.processes import this_process
from tests.hostile.catalogue import attack
from tests.hostile.users import ANNE, BEN, act_as, become
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.small_disk import mounted_disk
from tests.unit.ledger import child

COUNT = 10
PIDS = Path("/sys/fs/cgroup/pids")


@pytest.fixture
def shared_disk(place: Path) -> Iterator[Path]:
    """A small disk on which both users have files: 2 MB and 150 inodes."""
    with mounted_disk(place, "size=2m,nr_inodes=150,mode=1777"):
        (place / "home").mkdir(mode=0o700)
        (place / "home" / "config.toml").write_text("[host]\nmin_free_disk = '0'\n")
        yield place


def use_up_inodes(folder: str) -> None:
    os.mkdir(f"{folder}/of-ben")
    with contextlib.suppress(OSError):
        for number in range(10_000):
            os.close(os.open(f"{folder}/of-ben/{number}", os.O_CREAT | os.O_WRONLY))


def use_up_space(folder: str) -> None:
    os.mkdir(f"{folder}/of-ben")
    with contextlib.suppress(OSError), open(f"{folder}/of-ben/ballast", "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def give_back(folder: str) -> None:
    for name in os.listdir(f"{folder}/of-ben"):
        os.unlink(f"{folder}/of-ben/{name}")


def waits_for(queue: QueueUnderTest, job_id: int, text: str) -> bool:
    """Return whether the job waits for this reason. No job may fail meanwhile."""
    counts = queue.counts()
    assert set(counts) <= {"queued", "pending", "running", "succeeded"}, counts
    return text in queue.why(job_id)


@attack(
    "use up the inodes of a disk that holds another user's queue",
    now="remains: jobs wait, a notice says what is missing, and they go on when there are inodes again",
)
def test_use_up_the_inodes(shared_disk: Path, own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    assert queue.wait(queue.submit("true", gpus=0))["succeeded"] == 1
    act_as(BEN, use_up_inodes, str(shared_disk))
    first = queue.submit("true", gpus=0, array=f"1-{COUNT}")
    until(lambda: waits_for(queue, first, "No space left on device"), "the reason")
    assert "df -i" in " ".join(queue.get("/status")["notices"])
    act_as(BEN, give_back, str(shared_disk))
    assert queue.wait()["succeeded"] == COUNT + 1


def submit_much(queue: QueueUnderTest) -> None:
    """Submit more than the free pages of the database hold."""
    for _ in range(1000):
        queue.submit("true", gpus=0, env=[f"FILL={'x' * 20000}"], hold=True)


@attack(
    "fill a disk that holds another user's queue",
    now="remains: submissions are refused with the reason, nothing is lost, and jobs go on when there is space",
)
def test_fill_the_disk(shared_disk: Path, own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    running, gate = queue.start_gated(gpus=0)
    act_as(BEN, use_up_space, str(shared_disk))
    with pytest.raises(EnvironmentFault, match="cannot be written") as refused:
        submit_much(queue)
    assert "disk space" in str(refused.value.hint)
    gate.write_text("go\n")
    act_as(BEN, give_back, str(shared_disk))
    assert queue.wait(running)["succeeded"] == 1


@attack(
    "use up the inodes of the shared lease directory",
    now="remains: jobs wait, a notice says what is missing, and they go on when there are inodes again",
)
def test_use_up_the_inodes_of_the_lease_directory(
    shared_disk: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path / own_home.name))
    queue = QueueUnderTest(tmp_path / own_home.name)
    queue.start()
    assert queue.wait(queue.submit("true"))["succeeded"] == 1
    for name in (shared_disk / "ledger").glob("*.lease"):
        name.unlink()
    act_as(BEN, use_up_inodes, str(shared_disk))
    job_id = queue.submit("true")
    until(lambda: "No space left on device" in " ".join(queue.get("/status")["notices"]), "the notice")
    until(lambda: waits_for(queue, job_id, "No space left on device"), "the reason")
    act_as(BEN, give_back, str(shared_disk))
    assert queue.wait(job_id)["succeeded"] == 1
    queue.close()


def claim_device(folder: str) -> None:
    Ledger(Path(folder)).claim(this_process("anne"), lambda *_: Claim(shares=(Share(device_id="G0"),)), 5.0)


@attack(
    "use up the inodes of the lease directory of scripts and `gpuyard run`",
    now="remains: refused with the reason and the remedy",
)
def test_use_up_the_inodes_of_scripts(shared_disk: Path) -> None:
    ledger = shared_disk / "ledger"
    ledger.mkdir()
    ledger.chmod(0o1777)
    act_as(ANNE, claim_device, str(ledger))  # so that nothing but the lease has to be made
    for path in ledger.glob("*.lease"):
        path.unlink()
    act_as(BEN, use_up_inodes, str(shared_disk))
    with pytest.raises(EnvironmentFault, match="No space left on device") as refused:
        act_as(ANNE, claim_device, str(ledger))
    assert "df -i" in str(refused.value.hint)
    assert Ledger(ledger).leases() == ()


def fork_until_refused(connection: Connection) -> None:
    """Become Ben, and start processes until the system refuses; send how many, and end with them."""
    connection.recv()
    become(BEN)
    started: list[int] = []
    try:
        while len(started) < 1000:
            pid = os.fork()
            if not pid:
                time.sleep(600)
                os._exit(0)
            started.append(pid)
    except OSError:
        pass
    connection.send(len(started))
    connection.recv()
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    connection.send(None)


@attack(
    "use up the processes of a container that another user's jobs run in",
    now="remains: jobs wait, a notice says what is missing, and they go on when processes can be started again",
)
def test_use_up_the_processes(queue: QueueUnderTest) -> None:
    assert queue.wait(queue.submit("true"))["succeeded"] == 1
    assert queue.daemon is not None
    (keeper,) = Path(f"/proc/{queue.daemon.pid}/task/{queue.daemon.pid}/children").read_text().split()
    group = PIDS / f"gpuyard-hostile-{keeper}"
    with _limited_group(group, 30) as add, child(fork_until_refused) as ben:
        add(int(keeper))
        add(ben.pid)
        ben.send(None)
        assert ben.receive() > 0
        first = queue.submit("true", array=f"1-{COUNT}")
        until(lambda: waits_for(queue, first, "Resource temporarily unavailable"), "the reason")
        ben.send(None)
        ben.receive()
        assert queue.wait()["succeeded"] == COUNT + 1
        ben.join()


@contextlib.contextmanager
def _limited_group(group: Path, most: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that moves a process into a new group of at most `most` processes. Moves all out at the end."""
    try:
        group.mkdir()
        (group / "pids.max").write_text(str(most))
    except OSError as error:
        pytest.skip(f"no cgroup can limit processes: {error.strerror}")
    before = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":pids:" in line)
    home = PIDS / before.rpartition(":")[2].lstrip("/") / "cgroup.procs"
    try:
        yield lambda pid: (group / "cgroup.procs").write_text(str(pid))
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                home.write_text(pid)
        until(lambda: not (group / "cgroup.procs").read_text(), "the end of its processes")
        group.rmdir()


# The limits and the processes of another user


def processes_of(queue: QueueUnderTest) -> list[int]:
    """Return the daemon, its keeper, and a program that runs."""
    _, _ = queue.start_gated()
    assert queue.daemon is not None
    (keeper,) = Path(f"/proc/{queue.daemon.pid}/task/{queue.daemon.pid}/children").read_text().split()
    (program,) = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return [queue.daemon.pid, int(keeper), int(program)]


def lower_limits(pids: list[int]) -> list[str]:
    return [_error(resource.prlimit, pid, resource.RLIMIT_NOFILE, (3, 3)) for pid in pids]


def signal_all(pids: list[int]) -> list[str]:
    return [_error(os.kill, pid, signum) for pid in pids for signum in (signal.SIGSTOP, signal.SIGKILL)]


def read_secrets(pids: list[int]) -> list[str]:
    return [_error(Path(f"/proc/{pid}/environ").read_bytes) for pid in pids]


def open_lease(pids: list[int]) -> list[str]:
    return [_error(os.open, f"/proc/{pid}/fd/8", os.O_RDONLY) for pid in pids]


def _error(act: object, *arguments: object) -> str:
    assert callable(act)
    try:
        act(*arguments)
    except OSError as error:
        return type(error).__name__
    return "it worked"


@attack("lower the limits of another user's daemon, keeper and jobs", now="refused")
def test_lower_limits(queue: QueueUnderTest) -> None:
    assert set(act_as(BEN, lower_limits, processes_of(queue))) == {"PermissionError"}


@attack("stop or kill another user's daemon, keeper and jobs", now="refused")
def test_signal_processes(queue: QueueUnderTest) -> None:
    assert set(act_as(BEN, signal_all, processes_of(queue))) == {"PermissionError"}


@attack("read the environment of another user's daemon, keeper and jobs", now="refused")
def test_read_environments(queue: QueueUnderTest) -> None:
    assert set(act_as(BEN, read_secrets, processes_of(queue))) == {"PermissionError"}


@attack("open the lease of another user's job through /proc, to keep it held", now="refused")
def test_open_the_lease_of_a_job(queue: QueueUnderTest) -> None:
    assert set(act_as(BEN, open_lease, processes_of(queue)[2:])) == {"PermissionError"}


def reach_in(home: str, keeper: int) -> list[str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        return [
            _error(link.connect, f"{home}/keepers/{keeper}.sock"),
            _error(os.symlink, "/etc/passwd", f"{home}/logs/99.1.log"),
            _error(os.open, f"{home}/journal", os.O_WRONLY | os.O_APPEND),
            _error(os.listdir, f"{home}/logs"),
        ]


@attack("connect to another user's keeper, forge its journal, plant a log as a link", now="refused")
def test_reach_into_the_folder(queue: QueueUnderTest) -> None:
    keeper = processes_of(queue)[1]
    assert set(act_as(BEN, reach_in, str(queue.home), keeper)) == {"PermissionError"}
