"""Drains in the ledger's directory: which hold, who may end them, and that files of others are harmless."""

import os
import socket
from pathlib import Path

import msgspec
import pytest

from gpuyard.errors import UserError
from gpuyard.ledger.drains_and_marks import LONGEST_REASON
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import make_shared_directory
from gpuyard.ledger.lock_file import DRAIN
from tests.unit.ledger import as_root

ANNE, BEN = 12001, 12002


def drained(folder: Path) -> list[tuple[str, int, str]]:
    return [(drain.device_id, drain.uid, drain.reason) for drain in Ledger(folder).contents().drains]


def write_as(uid: int, folder: Path, device_id: str, name: str = "x") -> None:
    path = folder / f"{name}{DRAIN}"
    path.write_bytes(msgspec.json.encode({"device_id": device_id, "since": 1.0}))
    os.chown(path, uid, -1)


def test_a_drain_holds_until_it_is_ended_and_is_seen_by_ledgers_opened_before(tmp_path: Path) -> None:
    before = Ledger(tmp_path)
    assert before.contents().drains == ()
    Ledger(tmp_path).drain("G0", "ECC errors")
    [drain] = before.contents().drains
    assert (drain.device_id, drain.uid, drain.reason, before.read_drains()) == (
        "G0", os.getuid(), "ECC errors", (drain,),
    )  # fmt: skip
    assert [each.device_id for each in before.drains] == ["G0"]
    Ledger(tmp_path).undrain("G0")
    assert before.contents().drains == before.drains == before.read_drains() == ()
    assert os.listdir(tmp_path) == []


def test_what_is_not_drained_cannot_be_undrained_and_a_second_drain_keeps_the_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(UserError, match="G0 is not drained"):
        ledger.undrain("G0")
    with pytest.raises(UserError, match="the reason has 201 characters"):
        ledger.drain("G0", "x" * (LONGEST_REASON + 1))
    assert drained(tmp_path) == []
    first, second = ledger.drain("G0", "hot"), ledger.drain("G0", "replaced on Monday")
    assert (second.since, second.reason) == (first.since, "replaced on Monday")
    assert drained(tmp_path) == [("G0", os.getuid(), "replaced on Monday")]


@as_root
def test_in_a_shared_directory_a_drain_of_its_owner_or_of_root_holds_for_all(tmp_path: Path) -> None:
    folder = make_shared_directory(tmp_path / "shared")
    os.chown(folder, ANNE, -1)
    write_as(ANNE, folder, "G0", "1")
    write_as(BEN, folder, "G1", "2")
    write_as(0, folder, "G2", "3")
    assert sorted(drained(folder)) == [("G0", ANNE, ""), ("G2", 0, "")]
    with pytest.raises(UserError, match="G0 is drained by 12001, for all users"):
        Ledger(folder).undrain("G0")
    assert make_shared_directory(folder) == folder  # drains are no other files


def test_what_is_no_drain_is_ignored(tmp_path: Path) -> None:
    (tmp_path / f"a{DRAIN}").write_bytes(b"\xff{")
    os.mkfifo(tmp_path / f"b{DRAIN}")
    (tmp_path / f"c{DRAIN}").symlink_to(tmp_path / f"a{DRAIN}")
    (tmp_path / f"d{DRAIN}").mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / f"f{DRAIN}"))
    (tmp_path / f"e{DRAIN}").write_bytes(b'{"device_id": "G1", "since": 9e99, "reason": "a\\u001bb"}')
    (drain,) = Ledger(tmp_path).contents().drains
    assert (drain.device_id, "\x1b" in drain.reason) == ("G1", False)
