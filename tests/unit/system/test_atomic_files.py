"""Folders that recipes keep things in."""

import fcntl
import os
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.system.atomic_files import locked, write_whole


def test_a_file_is_there_as_a_whole_or_as_it_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "record.json"
    write_whole(path, b"the first")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", is_full)
        with pytest.raises(EnvironmentFault, match=r"record\.json cannot be written: No space left on device"):
            write_whole(path, b"the second")
    assert path.read_bytes() == b"the first"
    write_whole(path, b"the third")
    assert path.read_bytes() == b"the third"
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    there: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: there.append(path.exists()))
    write_whole(path, b"all of it")
    assert there == [False]


def test_a_folder_is_changed_by_one_at_a_time(tmp_path: Path) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    with locked(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
