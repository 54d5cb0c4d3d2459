"""A folder and all in it by descriptors: links are never followed."""

import os
import stat
from pathlib import Path

import pytest

from gpuyard.system.folder_tree import FolderTree, remove_own_tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files, and with a link to a folder outside."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    path = tmp_path / "tree"
    (path / "deep" / "er").mkdir(parents=True)
    (path / "deep" / "er" / "file").write_text("content")
    (path / "link").symlink_to(tmp_path / "outside")
    return path


def test_all_paths_are_listed_a_folder_before_its_entries(folder: Path) -> None:
    with FolderTree(folder) as tree:
        paths = tree.paths()
        assert sorted(paths) == [".", "deep", "deep/er", "deep/er/file", "link"]
        assert paths.index("deep") < paths.index("deep/er") < paths.index("deep/er/file")
        assert tree.name("deep/er") == str(folder / "deep/er")


def test_a_link_is_an_entry_and_no_way_to_others(folder: Path, tmp_path: Path) -> None:
    with FolderTree(folder) as tree:
        assert stat.S_ISLNK(tree.status("link").st_mode)
        assert tree.link("link") == str(tmp_path / "outside")
        for use in (tree.status, tree.remove):
            with pytest.raises(OSError, match="link/file") as caught:
                use("link/file")
            assert caught.value.filename == str(folder / "link/file")
        with pytest.raises(OSError, match="link"), tree.open("link"):
            pass
        tree.remove("link")
    assert (tmp_path / "outside" / "file").read_text() == "precious"


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    with pytest.raises(OSError, match="link"):
        FolderTree(folder / "link")


def test_a_folder_that_was_moved_is_still_used_but_not_at_its_path(folder: Path) -> None:
    with FolderTree(folder) as tree:
        assert tree.is_at(folder)
        folder.rename(folder.with_name("moved"))
        folder.mkdir()
        assert not tree.is_at(folder)
        with tree.open("deep/er/file") as file:
            assert os.read(file, 100) == b"content"


def test_a_tree_is_removed_with_folders_that_are_closed_and_links_in_it(folder: Path, tmp_path: Path) -> None:
    (folder / "deep" / "er").chmod(0)
    (folder / "deep").chmod(0o500)
    remove_own_tree(folder)
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (tmp_path / "outside" / "file").exists()


def test_a_link_to_a_tree_is_not_removed(folder: Path, tmp_path: Path) -> None:
    before = stat.S_IMODE((tmp_path / "outside").stat().st_mode)
    with pytest.raises(OSError, match="link"):
        remove_own_tree(folder / "link")
    assert stat.S_IMODE((tmp_path / "outside").stat().st_mode) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_tree_of_another_user_is_not_removed(folder: Path) -> None:
    os.chown(folder / "deep", 4242, 4242)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        remove_own_tree(folder)
    assert (folder / "deep" / "er" / "file").exists()
