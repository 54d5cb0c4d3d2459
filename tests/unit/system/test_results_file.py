"""Files that a user names for output: created with their folders, opened for appending, and nothing else."""

import os
from pathlib import Path

import pytest

from gpuyard.system.write_files import UnsafePathError, open_results, write_results


def append(path: Path | str, text: bytes) -> None:
    file = open_results(str(path))
    os.write(file, text)
    os.close(file)


def test_folders_are_created_and_the_file_is_appended_to(tmp_path: Path) -> None:
    for text in (b"one", b"two"):
        append(f"{tmp_path}//new/./deep/../run.txt", text)
    assert (tmp_path / "new" / "run.txt").read_bytes() == b"onetwo"
    assert sorted(os.listdir(tmp_path / "new")) == ["deep", "run.txt"]


def test_own_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real" / "link").symlink_to(f"{tmp_path}/folder/../target")
    append(tmp_path / "folder" / "link", b"x")
    assert (tmp_path / "target").read_bytes() == b"x"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        open_results(str(tmp_path / "loop"))


def test_an_open_pipe_and_the_null_device_are_written_to() -> None:
    reading, writing = os.pipe()
    write_results(f"/dev/fd/{writing}", b"all of it")
    os.close(writing)
    assert os.read(reading, 100) == b"all of it"
    os.close(reading)
    append(os.devnull, b"x")


@pytest.mark.parametrize("kind", ["pipe", "hard link", "folder", "file above"])
def test_what_is_no_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    elif kind == "hard link":
        (tmp_path / "other").write_text("precious")
        path.hardlink_to(tmp_path / "other")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("")
        path /= "below"
    with pytest.raises((UnsafePathError, IsADirectoryError, NotADirectoryError)):
        open_results(str(path))
    if kind == "pipe":
        os.close(reader)
