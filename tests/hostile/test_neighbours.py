"""Attacks with announcements of lease directories, and what two users with different directories are told."""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.ledger.ledger_mutex import make_shared_directory
from gpuyard.ledger.neighbours import Neighbour, announce, find_neighbours
from tests.hostile.catalogue import attack
from tests.hostile.hostile_texts import FORBIDDEN, NASTY, check_bytes
from tests.hostile.ledger_attacks import gpuyard
from tests.hostile.users import BEN, stay_as
from tests.integration.queue_fixture import QueueUnderTest
from tests.unit.ledger import Child, child

_kept: list[socket.socket] = []


def announce_as(folder: str, home: str) -> int:
    """As another user with the same GPUs, in a process that stays."""
    os.environ.update({"GPUYARD_SIMULATE": "2x24GB", "GPUYARD_HOME": home})
    announce(Path(folder))
    return os.getpid()


def listen(name: str, count: int) -> int:
    for number in range(count):
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(b"\0" + name.format(number).encode()[:106])
        listening.listen(0)
        _kept.append(listening)
    return len(_kept)


@contextlib.contextmanager
def ben_announces(folder: Path, home: Path) -> Iterator[int]:
    with child(stay_as, BEN, announce_as, str(folder), str(home)) as ben:
        yield ben.receive()


@contextlib.contextmanager
def ben_listens(name: str, count: int = 1) -> Iterator[Child]:
    with child(stay_as, BEN, listen, name, count) as ben:
        assert ben.receive() == count
        yield ben


@pytest.fixture
def bens(place: Path) -> Path:
    folder = place / "bens"
    folder.mkdir()
    os.chown(folder, BEN, BEN)
    folder.chmod(0o700)
    return folder


@pytest.fixture
def mine(own_home: Path, place: Path) -> Path:
    (place / "ledger").mkdir(mode=0o700)
    return place / "ledger"


@attack(
    "lease the same GPUs as another user, in a directory of one's own",
    now="remains: `run`, `submit` and `doctor` name the user, and the command that makes a shared directory",
)
def test_separate_directories(mine: Path, bens: Path, own_home: Path, queue: QueueUnderTest) -> None:
    with ben_announces(bens, own_home) as pid:
        for said in (gpuyard("submit", "true"), gpuyard("run", "true")):
            (line,) = said.stderr.decode().splitlines() or [""]
            if said.args[3] == "run":
                assert line == "", "it is said once a day"
                continue
            assert f"{BEN} (pid {pid}) and you lease the same GPUs in different directories, {bens} and {mine}" in line
            assert "`sudo gpuyard leases init-shared /var/lib/gpuyard-leases`" in line
        (own_home / "neighbours-checked").unlink()
        assert b"different directories" in gpuyard("run", "true").stderr
        doctor = gpuyard("doctor")
        assert (doctor.returncode, b"different directories" in doctor.stdout) == (0, True)
        told = json.loads(gpuyard("doctor", "--json").stdout)["neighbours"]
        assert told == [{"uid": BEN, "user": str(BEN), "pid": pid, "directory": str(bens)}]
        shared = make_shared_directory(bens.parent / "shared")
        os.chown(bens, 0, 0)
    (own_home / "neighbours-checked").unlink()
    with ben_announces(shared, own_home):
        assert f"to share: `export GPUYARD_LOCK_DIR={shared}`" in gpuyard("run", "true").stderr.decode()
        (own_home / "neighbours-checked").unlink()
        assert gpuyard("run", "true", GPUYARD_LOCK_DIR=str(shared)).returncode == 1, "the queue uses another"
    queue.stop()
    (own_home / "neighbours-checked").unlink(missing_ok=True)
    with ben_announces(shared, own_home):
        assert gpuyard("run", "true", GPUYARD_LOCK_DIR=str(shared)).stderr == b"", "both use one directory"


@attack(
    "announce thousands of lease directories, with escapes in their names, and accept no connection",
    now="bounded: the kernel names the users, no process is asked, 8 MB of names are read and escaped",
)
def test_forged_announcements(mine: Path, own_home: Path) -> None:
    name = "gpuyard-leases/gpus/1-1/{}/" + NASTY
    with ben_listens(name, 900):
        for _ in range(3):
            (found,) = find_neighbours_of_real_gpus(mine)
            assert (found.uid, found.is_usable) == (BEN, False)
            assert not any(each.decode() in found.directory for each in FORBIDDEN)
        check_bytes(gpuyard("doctor", GPUYARD_SIMULATE="").stdout, "doctor")


def find_neighbours_of_real_gpus(folder: Path) -> list[Neighbour]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPUYARD_SIMULATE")
        return [each for each in find_neighbours(folder) if each.uid == BEN]


@attack(
    "announce another user's directory as one's own, so that a victim shares a directory of the attacker",
    now="harmless: only a directory of root is proposed, and only if it is the announced one",
)
def test_announce_a_directory_of_the_attacker(mine: Path, place: Path, own_home: Path) -> None:
    trap = make_shared_directory(place / "trap")
    os.chown(trap, BEN, BEN)
    with ben_announces(trap, own_home):
        (found,) = find_neighbours(mine)
        assert (found.uid, found.directory, found.is_usable) == (BEN, str(trap), False)
    roots = make_shared_directory(place / "roots")
    name = f"gpuyard-leases/gpus/1-1/1-0/{roots}"
    with ben_listens(name):
        (found,) = find_neighbours_of_real_gpus(mine)
        assert not found.is_usable
