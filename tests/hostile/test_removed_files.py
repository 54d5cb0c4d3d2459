"""Attacks that remove another user's files: leases, the lease directory, the queue's folder."""

import os
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import open_ledger
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import gpuyard
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest, until

# A card has 24 GB.
MOST_OF_A_CARD = "20G"


def make_shared(path: str) -> None:
    os.mkdir(path)
    os.chmod(path, 0o1777)


def remove_leases(path: str) -> int:
    leases = [name for name in os.listdir(path) if name.endswith(".lease")]
    for name in leases:
        os.unlink(f"{path}/{name}")
    return len(leases)


def rename(path: str) -> None:
    os.rename(path, f"{path}.away")


@attack(
    "as the owner of a shared lease directory, remove the leases of a victim's running jobs",
    now="bounded: the queue counts what it has started, and makes the leases again within seconds",
)
def test_the_owner_of_the_directory_removes_leases(place: Path, own_queue: QueueUnderTest) -> None:
    queue, ledger = own_queue, str(place / "ledger")
    act_as(BEN, make_shared, ledger)
    queue.start()
    gates = [queue.start_gated(name, vram=MOST_OF_A_CARD)[1] for name in ("first", "second")]
    assert act_as(BEN, remove_leases, ledger) == 2
    waiting = queue.submit("true", vram=MOST_OF_A_CARD)
    until(lambda: len(open_ledger().leases()) == 2 or queue.state(waiting) != "queued", "the leases, or a third job")
    assert queue.state(waiting) == "queued"
    for gate in gates:
        gate.write_text("go\n")
    queue.wait()


@attack("remove the leases of another user in a shared directory", now="refused")
def test_another_user_removes_leases(place: Path, own_queue: QueueUnderTest) -> None:
    queue, ledger = own_queue, str(place / "ledger")
    make_shared(ledger)
    queue.start()
    _, gate = queue.start_gated(vram=MOST_OF_A_CARD)
    with pytest.raises(PermissionError):
        act_as(BEN, remove_leases, ledger)
    assert len(open_ledger().leases()) == 1
    gate.write_text("go\n")
    queue.wait()


@attack("put another directory in the place of a shared lease directory", now="refused")
def test_another_user_replaces_the_directory(place: Path, queue: QueueUnderTest) -> None:
    queue.wait(queue.submit("true"))
    with pytest.raises(PermissionError):
        act_as(BEN, rename, str(place / "ledger"))


@attack(
    "rename the folder of a victim's queue, in a place such as /tmp, so that a second daemon starts",
    now="refused",
)
def test_another_user_renames_the_home(own_home: Path, queue: QueueUnderTest) -> None:
    queue.wait(queue.submit("true"))
    with pytest.raises(PermissionError):
        act_as(BEN, rename, str(own_home))
    assert queue.get("/status")["notices"] == []


def plant(names: list[str], source: str, target: str) -> None:
    """Take the names of a victim's leases: with a link to the lease, and with a file."""
    os.symlink(f"{source}/{names[0]}", f"{target}/{names[0]}")
    os.close(os.open(f"{target}/{names[1]}", os.O_CREAT | os.O_WRONLY, 0o644))


@attack(
    "take the names of a victim's leases in the directory to which the victim's queue moves",
    now="refused: the daemon does not start with that directory, and names the file",
)
def test_names_in_the_next_directory(place: Path, own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, ledger, following = own_queue, place / "ledger", place / "following"
    for folder in (ledger, following):
        make_shared(str(folder))
    queue.start()
    gates = [queue.start_gated(name, vram=MOST_OF_A_CARD)[1] for name in ("first", "second")]
    names = sorted(os.listdir(ledger))
    act_as(BEN, plant, names, str(ledger), str(following))
    queue.stop()
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(following))
    for name in names:
        refused = gpuyard("daemon", "start")
        assert refused.returncode == 1
        assert f"{name} is another user's file" in refused.stderr.decode()
        (following / name).unlink()
    queue.start()
    assert sorted(lease.id for lease in open_ledger().leases()) == [name.removesuffix(".lease") for name in names]
    for gate in gates:
        gate.write_text("go\n")
    queue.wait()
