import os
from collections.abc import Container
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.ledger import ledger as ledger_module
from gpuyard.ledger import lock_file
from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.lock_file import HeldFile, LedgerScan, LockFile, read_held
from tests.unit.ledger import DEADLINE_S, ME, as_root, take

OTHER_UID = 61002


def files_of(uid: int, folder: Path, count: int) -> list[Path]:
    """Make dead files of a user."""
    paths = [folder / f"{uid}-{number:03}.lease" for number in range(count)]
    for number, path in enumerate(paths):
        path.touch()
        os.chown(path, uid, uid)
        assert path.stat().st_uid == uid, number
    return paths


def opened(scan: LedgerScan, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Scan, and return the names of the files that were opened."""
    names: list[str] = []

    def note(folder: str, name: str, unread: Container[int]) -> tuple[int | None, HeldFile | None]:
        names.append(name)
        return read_held(folder, name, unread)

    with monkeypatch.context() as patch:
        patch.setattr("gpuyard.ledger.lock_file.read_held", note)
        list(scan.held_files())
    return names


@pytest.fixture
def other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process seem to be a user who owns neither the directory nor its files."""
    monkeypatch.setattr(os, "geteuid", lambda: 61003)


@as_root
@pytest.mark.usefixtures("other_user")
def test_dead_files_of_others_are_opened_once_and_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = files_of(OTHER_UID, tmp_path, 3)
    (tmp_path / "link.lease").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.ticket")
    scan = LedgerScan(tmp_path)
    assert len(opened(scan, monkeypatch)) == 5
    assert opened(scan, monkeypatch) == []
    assert scan.dead == []
    scan.remove_dead()
    assert all(path.exists() for path in paths)
    (tmp_path / "made anew").touch()
    (tmp_path / "made anew").rename(paths[0])
    assert opened(scan, monkeypatch) == [paths[0].name]
    (tmp_path / "new.lease").touch()
    assert opened(scan, monkeypatch) == ["new.lease"]


@as_root
@pytest.mark.parametrize("uid", [0, OTHER_UID])
def test_root_and_the_owner_remove_dead_files_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    files_of(OTHER_UID + 1, tmp_path, 3)
    os.chown(tmp_path, OTHER_UID, OTHER_UID)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    scan = LedgerScan(tmp_path)
    assert list(scan.held_files()) == []
    assert len(scan.dead) == 3
    scan.remove_dead()
    assert list(tmp_path.iterdir()) == []


@as_root
def test_only_the_newest_files_of_another_user_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "MAX_FILES_PER_USER", 4)
    monkeypatch.setattr(ledger_module, "MAX_FILES_PER_USER", 4)
    flood = files_of(OTHER_UID, tmp_path, 10)
    own = [LockFile(tmp_path / f"own-{number}.lease", b"") for number in range(6)]
    anne = files_of(61001, tmp_path, 2)
    scan = LedgerScan(tmp_path)
    assert sorted(opened(scan, monkeypatch)) == sorted(
        [*(path.name for path in (*flood[-4:], *anne)), *(file.name for file in own)]
    )
    assert scan.unread == {OTHER_UID: 6}
    [ignored] = [each for each in Ledger(tmp_path).contents().bad if each.uid == OTHER_UID]
    assert "a group of 6 files of" in str(ignored)
    assert "only the newest 4 files and 8 MB of a user are read" in str(ignored)
    for file in own:
        file.release()


def test_no_more_leases_are_granted_than_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_LEASES_PER_USER", 2)
    ledger = Ledger(tmp_path)
    held = [ledger.claim(ME, take(f"G{number}"), DEADLINE_S) for number in range(2)]
    with pytest.raises(EnvironmentFault, match="you hold 2 leases"):
        ledger.claim(ME, take("G2"), DEADLINE_S)
    for each in held:
        assert each is not None
        each.release()
