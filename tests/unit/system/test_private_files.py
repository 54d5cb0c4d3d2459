"""Private files in folders where other users may have placed links, pipes or files."""

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gpuyard.system.private_files import PrivateFileError, open_in_shared

Opener = Callable[[str], int]
SOMEBODY = 4242


@pytest.fixture(params=[partial(open_in_shared, is_own=True), open_in_shared], ids=["open_private", "open_in_shared"])
def opener(request: pytest.FixtureRequest) -> Iterator[Opener]:
    opened: list[int] = []

    def open_and_note(path: str) -> int:
        opened.append(request.param(path))
        return opened[-1]

    yield open_and_note
    for descriptor in opened:
        os.close(descriptor)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_and_its_folder_are_created_for_their_owner_only_or_appended_to(opener: Opener, tmp_path: Path) -> None:
    path = tmp_path / "not/there/train_logs/exp1.log"
    os.write(opener(str(path)), b"text")
    assert path.read_text() == "text"
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    path = tmp_path / "exp1.log"
    path.write_text("before ")
    os.write(opener(str(path)), b"after")
    assert path.read_text() == "before after"
    assert not os.get_inheritable(opener(str(tmp_path / "log")))


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_symbolic_link_is_not_followed(opener: Opener, tmp_path: Path, is_broken: bool) -> None:
    victim = tmp_path / "victim"
    if not is_broken:
        victim.write_text("precious")
    (tmp_path / "exp1.log").symlink_to(victim)
    with pytest.raises(PrivateFileError, match=r"exp1\.log cannot be written: it is a symbolic link"):
        opener(str(tmp_path / "exp1.log"))
    assert victim.exists() is not is_broken


def test_a_hard_link_to_another_file_is_refused(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "exp1.log").hardlink_to(tmp_path / "victim")
    with pytest.raises(PrivateFileError, match="hard link"):
        opener(str(tmp_path / "exp1.log"))


def test_a_pipe_is_refused_without_waiting(opener: Opener, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "exp1.log")
    with pytest.raises(PrivateFileError, match=r"exp1\.log cannot be written"):
        opener(str(tmp_path / "exp1.log"))
    reader = os.open(tmp_path / "exp1.log", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PrivateFileError, match="it is not a regular file"):
        opener(str(tmp_path / "exp1.log"))
    os.close(reader)


def test_a_folder_or_a_file_in_place_of_one_is_refused(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "exp1.log").mkdir()
    with pytest.raises(PrivateFileError, match=r"exp1\.log cannot be written: Is a directory"):
        opener(str(tmp_path / "exp1.log"))
    (tmp_path / "train_logs").write_text("")
    with pytest.raises(PrivateFileError, match="train_logs cannot be written: Not a directory"):
        opener(str(tmp_path / "train_logs/exp1.log"))
    (tmp_path / "file").write_text("")
    with pytest.raises(PrivateFileError, match="file cannot be created: File exists"):
        opener(str(tmp_path / "file/train_logs/exp1.log"))


def test_a_private_folder_must_not_be_a_link_but_a_shared_folder_may_be(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train_logs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrivateFileError, match="train_logs cannot be written: it is a symbolic link"):
        open_in_shared(str(tmp_path / "train_logs/exp1.log"), is_own=True)
    os.close(open_in_shared(str(tmp_path / "train_logs/exp1.log")))
    assert (tmp_path / "elsewhere/exp1.log").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_file_is_refused(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "exp1.log").write_text("theirs")
    os.chown(tmp_path / "exp1.log", SOMEBODY, SOMEBODY)
    with pytest.raises(PrivateFileError, match="it belongs to another user"):
        opener(str(tmp_path / "exp1.log"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_folder_is_refused_for_private_files_only(tmp_path: Path) -> None:
    (tmp_path / "train_logs").mkdir()
    os.chown(tmp_path / "train_logs", SOMEBODY, SOMEBODY)
    with pytest.raises(PrivateFileError, match="train_logs belongs to another user"):
        open_in_shared(str(tmp_path / "train_logs/exp1.log"), is_own=True)
    os.close(open_in_shared(str(tmp_path / "train_logs/exp1.log")))
