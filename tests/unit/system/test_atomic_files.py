"""Files that are written atomically."""

import os
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault
from gpuyard.system.write_files import write_atomically, write_whole


def test_a_failed_write_keeps_the_previous_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_is_on_disk_before_it_has_its_name_and_needs_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    existed: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: existed.append(path.exists()))
    write_whole(path, b"all of it")
    assert existed == [False]
    monkeypatch.chdir(tmp_path)
    write_atomically("name", b"content", is_synced=False)
    assert (tmp_path / "name").read_bytes() == b"content"


def test_a_new_file_gets_its_mode_under_the_umask_or_exactly(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "default", b"")
        write_atomically(tmp_path / "private", b"", mode=0o600)
        write_atomically(tmp_path / "exact", b"", exact_mode=0o777)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"default": 0o640, "private": 0o600, "exact": 0o777}
