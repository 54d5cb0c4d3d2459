"""Attacks by users who can write to the folder in which a backup is made, or from which it is restored."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from gpuyard.store.backup import back_up, checked_backup
from gpuyard.store.database import open_database
from gpuyard.system.private_files import PrivateFileError
from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as

PRECIOUS = "my own file\n"


@pytest.fixture
def database(place: Path) -> Path:
    home = place / "home"
    home.mkdir(mode=0o700)
    opened, _ = open_database(home / "queue.db")
    opened.close()
    return home / "queue.db"


@pytest.fixture
def common(place: Path) -> Path:
    """A folder in which all users may write, as /tmp, but without a sticky bit."""
    folder = place / "common"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def read(path: str) -> str:
    return Path(path).read_text(encoding="latin-1")


@attack(
    "put a link to a file of the victim where the victim writes a backup",
    now="refused: with `--force` the link is replaced, and the file stays",
)
def test_backup_through_a_link(database: Path, common: Path, place: Path) -> None:
    precious, target = place / "precious", common / "queue.backup"
    precious.write_text(PRECIOUS)
    act_as(BEN, os.symlink, str(precious), str(target))
    with pytest.raises(UserError, match="exists"):
        back_up(database, target)
    back_up(database, target, overwrite=True)
    assert precious.read_text() == PRECIOUS
    assert not target.is_symlink()
    assert list(common.iterdir()) == [target]


@attack("read a backup in a folder of all users, made under umask 0", now="refused")
def test_read_a_backup(database: Path, common: Path) -> None:
    before = os.umask(0)
    try:
        back_up(database, common / "queue.backup")
    finally:
        os.umask(before)
    assert stat.S_IMODE((common / "queue.backup").stat().st_mode) == 0o600
    with pytest.raises(PermissionError):
        act_as(BEN, read, str(common / "queue.backup"))


@attack(
    "replace the victim's backup by one with other commands, or make it writable for the attacker",
    now="refused",
)
def test_restore_a_planted_backup(database: Path, common: Path, place: Path) -> None:
    back_up(database, place / "good")
    (place / "good").chmod(0o644)
    act_as(BEN, shutil.copyfile, str(place / "good"), str(common / "queue.backup"))
    (place / "loose").write_bytes((place / "good").read_bytes())
    (place / "loose").chmod(0o666)
    for source in (common / "queue.backup", place / "loose"):
        with pytest.raises(PrivateFileError), checked_backup(source, database.parent):
            pass
    assert list(database.parent.glob(".*")) == []
