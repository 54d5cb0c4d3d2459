"""Attacks on the locks and files of a shared lease directory."""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex, make_shared_directory
from gpuyard.model.lease import Holder, Need
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import anne_gets, gpuyard, lease_gpus
from tests.hostile.users import ANNE, BEN, act_as, become, stay_as
from tests.in_time import wait_until_gone
from tests.integration.queue_fixture import QueueUnderTest, until
from tests.unit.ledger import DEADLINE_S, ME, child, nothing, take, wait_for_message

A_RECORD = b'{"holder": {"uid": 61001, "user": "anne", "pid": 1}, "shares": [{"device_id": "G0"}]}'


@pytest.fixture
def folder(place: Path) -> Path:
    return make_shared_directory(place / "ledger")


def me() -> Holder:
    return Holder(uid=os.getuid(), user=str(os.getuid()), pid=os.getpid())


def hold_lease(connection: Connection, folder: Path, uid: int) -> None:
    """Lease G0 as a user, send the path of the lease, and hold it."""
    become(uid)
    held = Ledger(folder).claim(me(), take("G0"), DEADLINE_S)
    assert held is not None
    connection.send(held.path)
    wait_for_message(connection)


def dead_lease(folder: Path, uid: int) -> Path:
    """Return the lease of a user whose process was killed."""
    with child(hold_lease, folder, uid) as holder:
        path: Path = holder.receive()
        holder.kill()
    return path


def leased_by(folder: Path) -> list[int]:
    return [lease.holder.uid for lease in Ledger(folder).leases()]


# The mutex


def swap_the_mutex(folder: str) -> list[str]:
    """Replace whatever another process may have locked. Return what the kernel allowed."""
    done = []
    for name in ("mutex", *os.listdir(folder)):
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{name}")
            done.append(name)
    with contextlib.suppress(OSError):
        os.rename(folder, f"{folder}.old")
        done.append("the directory")
    return done


def read(folder: str) -> None:
    Ledger(Path(folder)).claim(me(), nothing, DEADLINE_S)


@attack(
    "be the first to use a shared directory, and replace its mutex while another user holds it",
    now="refused",
)
def test_swap_the_mutex(folder: Path) -> None:
    act_as(BEN, read, str(folder))  # he makes what the first user of a directory makes
    with hold_mutex(folder, DEADLINE_S):
        assert act_as(BEN, swap_the_mutex, str(folder)) == []
        with pytest.raises(EnvironmentFault, match="was busy"), hold_mutex(folder, 0.0):
            pytest.fail("two hold it")


def make_private_mutex(folder: str) -> None:
    os.close(os.open(f"{folder}/mutex", os.O_CREAT | os.O_WRONLY, 0o600))


@attack("create a file `mutex` that others cannot open", now="harmless")
def test_private_mutex(folder: Path) -> None:
    act_as(BEN, make_private_mutex, str(folder))
    act_as(ANNE, read, str(folder))


def lock_for_ever(connection: Connection, folder: Path) -> None:
    """Lock the directory, and every file in it, as a user who may only read them."""
    become(BEN)
    kept = [os.open(path, os.O_RDONLY) for path in (folder, *folder.iterdir())]
    for descriptor in kept:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    connection.send(os.getpid())
    wait_for_message(connection)


@attack(
    "lock the directory and stop",
    now="remains: no user gets a new lease; the error names the process after at most 10 s, and reading goes on",
)
def test_stopped_holder_of_the_mutex(folder: Path) -> None:
    with child(hold_lease, folder, ANNE) as anne:
        anne.receive()
        with child(lock_for_ever, folder) as ben:
            pid = ben.receive()
            os.kill(pid, signal.SIGSTOP)
            assert leased_by(folder) == [ANNE]
            with pytest.raises(EnvironmentFault, match=rf"held by .*\(pid {pid}, user {BEN}, stopped\)") as caught:
                Ledger(folder).claim(ME, take("G1"), 0.05)
            assert "kill -CONT" in (caught.value.hint or "")
        lease = Ledger(folder).claim(ME, take("G1"), DEADLINE_S)
        assert lease is not None
        lease.release()


def delay_all_who_open(connection: Connection, folder: Path) -> None:
    """Take a lease of the kernel on files of each kind: others who open them without waiting get an error for 45 s."""
    become(BEN)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    for name in ("1-0.lease", "1-0.ticket", "1-0.drain"):
        descriptor = os.open(folder / name, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    connection.send("ready")
    wait_for_message(connection)


@attack(
    "have the kernel delay all who open a file in the ledger (F_SETLEASE)",
    now="ignored",
)
def test_delay_all_who_open_a_file(folder: Path) -> None:
    with child(hold_lease, folder, ANNE) as anne:
        anne.receive()
        with child(delay_all_who_open, folder) as ben:
            ben.receive()
            assert leased_by(folder) == [ANNE]
            assert Ledger(folder).read_drains() == ()
            lease = Ledger(folder).claim(ME, take("G1"), DEADLINE_S)
            assert lease is not None
            lease.release()


def open_directory(folder: str) -> None:
    os.chmod(folder, 0o777)


@attack(
    "make the shared directory one in which all users can remove all files",
    now="refused",
)
def test_make_the_directory_not_sticky(folder: Path) -> None:
    with pytest.raises(PermissionError):
        act_as(BEN, open_directory, str(folder))
    folder.chmod(0o777)  # even if its owner does it while it is in use
    with pytest.raises(EnvironmentFault, match="not sticky"):
        Ledger(folder).claim(ME, take("G0"), DEADLINE_S)


# Leases


def keep_alive(connection: Connection, path: Path) -> None:
    """Lock a dead lease in every way, fork and exit: the kernel then names a process that no longer exists."""
    become(BEN)
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    connection.send(pid)


@attack(
    "keep a dead lease alive in its owner's name: lock it, fork, exit",
    now="harmless",
)
def test_keep_a_dead_lease_alive(folder: Path) -> None:
    path = dead_lease(folder, ANNE)
    with child(keep_alive, path) as ben:
        pid = ben.receive()
        ben.join()
    try:
        assert path.exists()
        assert leased_by(folder) == []
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_until_gone(pid)


def open_for_writing(path: str) -> None:
    os.open(path, os.O_RDWR)


@attack("hold a dead lease of another user with a lock for writing", now="refused")
def test_write_lock_of_another_user(folder: Path) -> None:
    with pytest.raises(PermissionError):
        act_as(BEN, open_for_writing, str(dead_lease(folder, ANNE)))


def change(path: str) -> list[str]:
    """Return the ways in which another user's file could be changed."""
    mine = f"{os.path.dirname(path)}/mine.lease"
    os.close(os.open(mine, os.O_CREAT | os.O_WRONLY, 0o644))
    ways: dict[str, Callable[[], None]] = {
        "remove": lambda: os.unlink(path),
        "truncate": lambda: os.truncate(path, 0),
        "rename": lambda: os.rename(path, f"{path}.gone"),
        "replace": lambda: os.rename(mine, path),
        "open up": lambda: os.chmod(path, 0o666),
        "touch": lambda: os.utime(path, (0, 0)),
        "take": lambda: os.chown(path, os.getuid(), -1),
        "hold": lambda: os.close(os.open(path, os.O_RDWR)),
        "replace its directory": lambda: os.rename(os.path.dirname(path), f"{os.path.dirname(path)}.swapped"),
    }
    done = []
    for way, go in ways.items():
        with contextlib.suppress(PermissionError):
            go()
            done.append(way)
    return done


@attack("remove, replace, truncate or rename another user's lease", now="refused")
def test_change_a_lease(folder: Path) -> None:
    with child(hold_lease, folder, ANNE) as anne:
        path = anne.receive()
        before = path.read_bytes()
        assert act_as(BEN, change, str(path)) == []
        assert path.read_bytes() == before
        assert leased_by(folder) == [ANNE]


def link_all(folder: str) -> int:
    """Give other users' files second names. Return how many it gave."""
    made = 0
    for name in os.listdir(folder):
        with contextlib.suppress(PermissionError):
            os.link(f"{folder}/{name}", f"{folder}/copy-of-{name}")
            made += 1
    return made


@attack(
    "give another user's lease a second name (needs /proc/sys/fs/protected_hardlinks, which is on by default)",
    now="refused",
)
def test_link_a_lease(folder: Path) -> None:
    if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
        pytest.skip("this machine lets users link to files of others")
    with child(hold_lease, folder, ANNE) as anne:
        anne.receive()
        assert act_as(BEN, link_all, str(folder)) == 0
        assert leased_by(folder) == [ANNE]


def lock_all_new_files(connection: Connection, folder: Path) -> None:
    """Read-lock every file as soon as it appears, until a message comes. Send how many were seen."""
    become(BEN)
    kept: dict[str, int] = {}
    connection.send("begun")
    while not connection.poll():
        for name in set(os.listdir(folder)) - kept.keys():
            with contextlib.suppress(OSError):
                kept[name] = os.open(f"{folder}/{name}", os.O_RDONLY)
                fcntl.flock(kept[name], fcntl.LOCK_SH | fcntl.LOCK_NB)
                fcntl.lockf(kept[name], fcntl.LOCK_SH | fcntl.LOCK_NB)
        if len(kept) > 500:
            for descriptor in kept.values():
                os.close(descriptor)
            kept.clear()
    connection.send(len(kept))


@attack(
    "lock every new file of other users before they can lock it",
    now="harmless",
)
def test_lock_new_files(folder: Path) -> None:
    ledger = Ledger(folder)
    with child(lock_all_new_files, folder) as ben:
        ben.receive()
        for _ in range(200):
            lease = ledger.claim(ME, take("G0"), DEADLINE_S)
            assert lease is not None
            lease.release()
        for _ in range(50):  # dead files are used again
            lease = ledger.claim(ME, take("G0"), DEADLINE_S)
            assert lease is not None
            assert [each.id for each in ledger.leases()] == [lease.id]
            lease.leave()
        ben.send("stop")
        ben.receive()


def plant_odd_files(folder: str, victim: str) -> None:
    for number, suffix in enumerate((".lease", ".ticket")):
        os.mkfifo(f"{folder}/pipe{suffix}")
        os.mkdir(f"{folder}/folder{suffix}")
        os.symlink(victim, f"{folder}/link{suffix}")
        os.symlink(f"{folder}/loop{suffix}", f"{folder}/loop{suffix}")
        os.symlink("/dev/zero", f"{folder}/zero{suffix}")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/socket{suffix}")
        os.close(os.open(f"{folder}/closed{number}{suffix}", os.O_CREAT | os.O_WRONLY, 0o000))


@attack("put pipes, sockets, folders, links and closed files where leases are expected", now="ignored")
def test_odd_files(folder: Path, place: Path) -> None:
    precious = place / "precious"
    precious.write_bytes(A_RECORD)
    act_as(BEN, plant_odd_files, str(folder), str(precious))
    before = sorted(os.listdir(folder))
    act_as(ANNE, read, str(folder))
    assert Ledger(folder).leases() == ()
    assert Ledger(folder).contents().tickets == ()
    assert sorted(os.listdir(folder)) == before
    assert precious.read_bytes() == A_RECORD


def hold_ticket(folder: str) -> str:
    global _kept  # noqa: PLW0603 - held until the process ends
    _kept = Ledger(Path(folder)).take_ticket(me(), Need(), 0, hold_mutex(Path(folder), DEADLINE_S))
    return _kept.id


_kept: object = None


@attack("hold a ticket, and hand it to a child that outlives its holder", now="harmless")
def test_ticket_kept_by_a_child(folder: Path) -> None:
    with child(stay_as, BEN, hold_ticket, str(folder)) as ben:
        ticket = ben.receive()
        assert [each.id for each in Ledger(folder).contents().tickets] == [ticket]
        ben.kill()
    assert Ledger(folder).contents().tickets == ()


def wait_in_a_container(connection: Connection, folder: Path) -> None:
    """Wait with a ticket of high priority in another pid namespace. Send the pid that the process has in this one."""
    assert ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWPID) == 0
    pid = os.fork()
    if pid == 0:
        become(BEN)
        ticket = Ledger(folder).take_ticket(me(), Need(devices=2), 100, hold_mutex(folder, DEADLINE_S))
        connection.send(ticket.id)
        wait_for_message(connection)
    connection.send(pid)
    os.waitpid(pid, 0)


_CLONE_NEWPID = 0x20000000


@attack(
    "wait with a ticket in another container, and stop",
    now="bounded: the ticket loses its place after 30 s",
)
def test_stopped_ticket_holder_in_a_container(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with child(wait_in_a_container, folder) as ben:
        (pid,) = [each for each in (ben.receive(), ben.receive()) if isinstance(each, int)]
        try:
            os.kill(pid, signal.SIGSTOP)
            assert lease_gpus(str(folder), 2) is None
            now = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now + 32)
            assert lease_gpus(str(folder), 2) == ["G0", "G1"]
            assert len(Ledger(folder).contents().tickets) == 1
        finally:
            os.kill(pid, signal.SIGKILL)
            wait_until_gone(pid)


def flood(folder: str, count: int) -> None:
    for number in range(count):
        os.close(os.open(f"{folder}/{number}.lease", os.O_CREAT | os.O_WRONLY, 0o644))


@attack(
    "leave thousands of dead files that others cannot remove",
    now="bounded: the newest 4,096 files of a user are read, each of them once; root removes them",
)
def test_flood_of_dead_files(folder: Path) -> None:
    act_as(BEN, flood, str(folder), 5000)
    assert anne_gets(folder) == ["G0", "G1"]
    [ignored] = Ledger(folder).contents().bad
    assert (ignored.uid, "904 files" in ignored.name) == (BEN, True)
    for _ in range(2):
        assert lease_gpus(str(folder), 2) == ["G0", "G1"]
    assert os.listdir(folder) == []


@attack(
    "lock the directory and stop, while another user's queue has jobs",
    now="bounded: jobs that need no GPU go on, and `gpuyard why` names the process",
)
def test_queue_beside_a_stopped_holder(own_home: Path, place: Path, queue: QueueUnderTest) -> None:
    folder = make_shared_directory(place / "ledger")
    assert queue.wait(queue.submit("true"))["succeeded"] == 1
    with child(lock_for_ever, folder) as ben:
        pid = ben.receive()
        os.kill(pid, signal.SIGSTOP)
        waits = queue.submit("true")
        assert queue.wait(queue.submit("true", gpus=0))["succeeded"] == 1
        until(lambda: f"(pid {pid}, user {BEN}, stopped)" in queue.why(waits), "a reason that names the process")
        assert "kill -CONT" in queue.why(waits)
        doctor = gpuyard("doctor", "--json")
        assert f"(pid {pid}, user {BEN}, stopped)" in doctor.stdout.decode()
    assert queue.wait(waits)["succeeded"] == 1
    assert own_home.exists()
