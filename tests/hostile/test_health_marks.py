"""Attacks with files that look like health marks: only root and the directory's owner can close a GPU for others."""

import os
import socket
from pathlib import Path

from gpuyard.ledger.drains_and_marks import add_mark
from gpuyard.ledger.lock_file import MARK
from gpuyard.model.machine_snapshot import HealthFigures, HealthMark, IssueKind
from tests.hostile.catalogue import attack
from tests.hostile.ledger_attacks import anne_gets, gpuyard
from tests.hostile.users import BEN, act_as


def mark_both(folder: str) -> None:
    for device_id in ("G0", "G1", "SIM-0", "SIM-1"):
        add_mark(Path(folder), HealthMark(device_id=device_id, since=0.0, kind=IssueKind.XID, xid=79))


def accept(folder: str) -> None:
    add_mark(Path(folder), HealthMark(device_id="G0", since=1e12, accepted=HealthFigures()))


def make_oddities(folder: str) -> None:
    os.mkfifo(f"{folder}/1-0{MARK}")
    os.symlink("/etc/passwd", f"{folder}/1-1{MARK}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/1-2{MARK}")
    Path(f"{folder}/1-3{MARK}").write_bytes(b"[" * 60_000)


@attack(
    "mark all GPUs of a shared directory as faulty", now="harmless: it holds for the attacker",
)  # fmt: skip
def test_mark_of_another_user(ledger: Path) -> None:
    act_as(BEN, mark_both, str(ledger))
    assert anne_gets(ledger) == ["G0", "G1"]
    assert b"faulty" not in gpuyard("devices").stdout


@attack("put pipes, links and sockets where health marks are read", now="harmless")
def test_marks_that_are_no_files(ledger: Path) -> None:
    act_as(BEN, make_oddities, str(ledger))
    assert anne_gets(ledger) == ["G0", "G1"]
    assert gpuyard("devices").returncode == 0


@attack("clear a GPU that the directory's owner marked", now="harmless")
def test_clear_for_another_user(ledger: Path) -> None:
    add_mark(ledger, HealthMark(device_id="G0", since=1.0, kind=IssueKind.XID, xid=79))
    act_as(BEN, accept, str(ledger))
    assert anne_gets(ledger) is None
