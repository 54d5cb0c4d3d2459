"""Folders of this user alone: no other user can change what their path leads to."""

import grp
import os
import pwd
import stat
from pathlib import Path

import pytest

from gpuyard.system import private_files
from gpuyard.system.private_files import (
    PrivateFileError,
    check_entries,
    check_folder,
    make_folder,
    open_folder,
    open_own,
    read_trusted,
)

SOMEBODY = 4242
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "own"
    folder.mkdir(parents=True)
    return folder


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_missing_folder_is_created_for_its_owner_only_with_those_above_it(tmp_path: Path) -> None:
    assert check_folder(str(tmp_path / "a/b/c")) is None
    old = os.umask(0)
    try:
        make_folder(str(tmp_path / "a/b/c"))
    finally:
        os.umask(old)
    assert [mode_of(tmp_path / path) for path in ("a", "a/b", "a/b/c")] == [0o700, 0o700, 0o700]


def test_what_is_missing_is_not_created_by_opening_it_and_a_file_is_no_folder(own: Path) -> None:
    for path in (own / "missing", own / "missing" / "file"):
        with pytest.raises(FileNotFoundError):
            open_own(str(path), os.O_RDONLY)
    with pytest.raises(FileNotFoundError):
        open_folder(str(own / "missing"))
    assert os.listdir(own) == []
    (own / "file").touch()
    with pytest.raises(PrivateFileError, match="is not a folder"):
        check_folder(str(own / "file"))
    assert check_folder(str(own / "file" / "below")) is None


def test_permissions_of_others_are_kept_unless_the_folder_must_be_closed(own: Path) -> None:
    own.chmod(0o755)
    make_folder(str(own))
    assert mode_of(own) == 0o755
    make_folder(str(own), is_closed=True)
    assert mode_of(own) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_to_is_refused_with_advice(own: Path, mode: int) -> None:
    own.chmod(mode)
    with pytest.raises(PrivateFileError, match="other users can write to") as caught:
        check_folder(str(own), "name another in `folder`")
    assert caught.value.hint == f"if all in it is yours, `chmod go-w {own}`; or name another in `folder`"


def test_a_folder_above_that_others_can_write_to_is_refused_unless_it_is_sticky(own: Path) -> None:
    own.parent.chmod(0o777)
    with pytest.raises(
        PrivateFileError, match=f"other users can write to {own.parent}, and so replace {own}"
    ) as caught:
        check_folder(str(own))
    assert f"`chmod go-w {own.parent}`, or `chmod +t {own.parent}`" in (caught.value.hint or "")
    own.parent.chmod(0o1777)
    assert check_folder(str(own)) is not None


def test_links_of_ours_are_followed_but_not_in_a_circle(own: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("above/../above")
    (tmp_path / "absolute").symlink_to(tmp_path / "link" / "own")
    found = check_folder(str(tmp_path / "absolute"))
    assert found is not None
    assert os.path.samestat(found, own.stat())
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(PrivateFileError, match="too many symbolic links"):
        check_folder(str(tmp_path / "a"))


def test_a_folder_above_the_links_target_is_checked(own: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(own)
    own.parent.chmod(0o777)
    with pytest.raises(PrivateFileError, match="and so replace"):
        check_folder(str(tmp_path / "link"))


def test_a_relative_path_counts_from_the_working_directory(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.parent)
    assert check_folder("own") is not None
    own.parent.chmod(0o777)
    with pytest.raises(PrivateFileError):
        check_folder("own")


@as_root
@pytest.mark.parametrize("which", ["the folder", "above it", "a link"])
def test_what_belongs_to_another_user_is_refused(own: Path, tmp_path: Path, which: str) -> None:
    path = tmp_path / "link" if which == "a link" else own
    (tmp_path / "link").symlink_to(own)
    given = {"the folder": own, "above it": own.parent, "a link": path}[which]
    os.chown(given, SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(PrivateFileError, match=f"belongs to the user {SOMEBODY}"):
        check_folder(str(path))


@as_root
def test_entries_of_another_user_are_named(own: Path) -> None:
    (own / "ours").touch()
    check_entries(str(own))
    (own / "link").symlink_to("ours")
    os.chown(own / "link", SOMEBODY, SOMEBODY, follow_symlinks=False)
    with pytest.raises(PrivateFileError, match=f"{own}/link belongs to the user {SOMEBODY}"):
        check_entries(str(own))


class TestGroups:
    """A group-writable folder, as a umask of 002 makes it, where every user has a group of their own."""

    @pytest.fixture(autouse=True)
    def _group_writable(self, own: Path) -> None:
        own.parent.chmod(0o2775)
        own.chmod(0o775)

    def private(self, monkeypatch: pytest.MonkeyPatch, own: Path, *, group: str = "anne", members: list[str]) -> None:
        user = pwd.struct_passwd(("anne", "x", os.geteuid(), own.stat().st_gid, "", "/", "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
        monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((group, "x", gid, members)))

    @pytest.mark.parametrize("members", [[], ["anne"]])
    def test_a_private_group_is_the_user(self, monkeypatch: pytest.MonkeyPatch, own: Path, members: list[str]) -> None:
        self.private(monkeypatch, own, members=members)
        assert check_folder(str(own)) is not None

    def test_a_group_with_other_members_is_refused(self, monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
        self.private(monkeypatch, own, members=["anne", "ben"])
        with pytest.raises(PrivateFileError, match=f"other users can write to {own.parent}"):
            check_folder(str(own))

    def test_a_group_of_another_name_is_refused(self, monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
        self.private(monkeypatch, own, group="users", members=[])
        with pytest.raises(PrivateFileError):
            check_folder(str(own))

    def test_an_unknown_group_is_refused(self, monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
        def unknown(_: int) -> None:
            raise KeyError

        monkeypatch.setattr(grp, "getgrgid", unknown)
        with pytest.raises(PrivateFileError):
            check_folder(str(own))

    def test_an_access_control_list_is_refused(self, monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
        self.private(monkeypatch, own, members=[])
        monkeypatch.setattr(os, "getxattr", lambda *_, **__: b"", raising=False)
        with pytest.raises(PrivateFileError):
            check_folder(str(own))


@as_root
def test_in_a_container_unknown_owners_are_accepted_above(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(own.parent, SOMEBODY, SOMEBODY)
    monkeypatch.setattr(private_files, "_is_unmapped", lambda uid: uid == SOMEBODY)
    assert check_folder(str(own)) is not None
    os.chown(own, SOMEBODY, SOMEBODY)
    with pytest.raises(PrivateFileError, match="belongs to"):
        check_folder(str(own))


class TestTrustedFiles:
    """Files that are read and obeyed: this user or root wrote them."""

    def test_a_file_is_read_also_through_a_link_of_ours(self, own: Path, tmp_path: Path) -> None:
        (own / "config.toml").write_bytes(b"x")
        (tmp_path / "link.toml").symlink_to(own / "config.toml")
        assert read_trusted(str(tmp_path / "link.toml")) == b"x"

    def test_a_missing_file_is_reported_as_such(self, own: Path, tmp_path: Path) -> None:
        (own / "dangling").symlink_to(tmp_path / "missing")
        for name in ("missing", "dangling"):
            with pytest.raises(FileNotFoundError):
                read_trusted(str(own / name))

    def test_a_file_that_others_can_write_to_is_refused_with_advice(self, own: Path) -> None:
        (own / "config.toml").touch()
        (own / "config.toml").chmod(0o666)
        with pytest.raises(PrivateFileError, match="other users can write to") as caught:
            read_trusted(str(own / "config.toml"))
        assert f"`chmod go-w {own}/config.toml`" in (caught.value.hint or "")

    @as_root
    def test_a_file_of_another_user_is_refused(self, own: Path) -> None:
        (own / "config.toml").touch()
        os.chown(own / "config.toml", SOMEBODY, SOMEBODY)
        with pytest.raises(PrivateFileError, match="belongs to the user"):
            read_trusted(str(own / "config.toml"))

    def test_a_pipe_is_read_without_waiting(self, own: Path) -> None:
        os.mkfifo(own / "config.toml")
        assert read_trusted(str(own / "config.toml")) == b""
