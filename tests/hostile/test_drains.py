"""Attacks with files that look like drains: only root and the directory's owner can close a GPU for others."""

import os
import socket
from pathlib import Path

from gpuyard.ledger.drains_and_marks import add_drain
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.lock_file import DRAIN
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import anne_gets, gpuyard
from tests.hostile.users import BEN, act_as


def drain_both(folder: str) -> None:
    for device_id in ("G0", "G1", "SIM-0", "SIM-1"):
        add_drain(Path(folder), device_id, "mine", 0.0)


def make_oddities(folder: str) -> None:
    os.mkfifo(f"{folder}/1-0{DRAIN}")
    os.symlink("/etc/passwd", f"{folder}/1-1{DRAIN}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/1-2{DRAIN}")
    Path(f"{folder}/1-3{DRAIN}").write_bytes(b"[" * 60_000)


def remove(folder: str) -> list[str]:
    """Return the drains that this user could not remove."""
    left = []
    for name in os.listdir(folder):
        if name.endswith(DRAIN):
            try:
                os.unlink(f"{folder}/{name}")
            except PermissionError:
                left.append(name)
    return left


@attack("drain all GPUs of a shared directory", now="harmless: it holds for the attacker")
def test_drain_of_another_user(ledger: Path) -> None:
    act_as(BEN, drain_both, str(ledger))
    assert anne_gets(ledger) == ["G0", "G1"]
    assert gpuyard("run", "--gpus", "2", "true").returncode == 0
    assert b"drained" not in gpuyard("devices").stdout


@attack("put pipes, links and sockets where drains are read", now="harmless")
def test_drains_that_are_no_files(ledger: Path) -> None:
    act_as(BEN, make_oddities, str(ledger))
    assert anne_gets(ledger) == ["G0", "G1"]
    assert gpuyard("devices").returncode == 0


@attack("remove a drain of the directory's owner", now="refused")
def test_remove_a_drain(ledger: Path) -> None:
    Ledger(ledger).drain("G0", "broken")
    assert len(act_as(BEN, remove, str(ledger))) == 1
    assert anne_gets(ledger) is None
    assert anne_gets(ledger, 1) == ["G1"]
