"""A folder and all in it by descriptors: links are never followed."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.system.folder_tree import FolderTree, LeftAlone, remove_entries, remove_tree
from tests.fakes.deep_folders import deep_folders


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
        with pytest.raises(OSError, match="link/file") as caught:
            tree.status("link/file")
        assert caught.value.filename == str(folder / "link/file")
        with pytest.raises(OSError, match="link"), tree.open("link"):
            pass
        assert remove_entries(tree, ["link"]) == []
    assert (tmp_path / "outside" / "file").read_text() == "precious"


def test_a_link_to_a_tree_is_neither_used_nor_removed(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="link"):
        FolderTree(folder / "link")
    before = stat.S_IMODE((tmp_path / "outside").stat().st_mode)
    [problem] = remove_tree(folder / "link")
    assert problem.filename == str(folder / "link")
    assert stat.S_IMODE((tmp_path / "outside").stat().st_mode) == before
    assert (tmp_path / "outside" / "file").exists()


def test_a_folder_that_was_moved_is_still_used(folder: Path) -> None:
    with FolderTree(folder) as tree:
        folder.rename(folder.with_name("moved"))
        folder.mkdir()
        with tree.open("deep/er/file") as file:
            assert os.read(file, 100) == b"content"


def test_a_tree_is_removed_with_folders_that_are_closed_and_links_in_it(folder: Path, tmp_path: Path) -> None:
    (folder / "deep" / "er").chmod(0)
    (folder / "deep").chmod(0o500)
    assert remove_tree(folder) == []
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert (tmp_path / "outside" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_stays_and_all_else_is_removed(folder: Path) -> None:
    os.chown(folder / "deep" / "er", 4242, 4242)
    (folder / "last").write_text("content")
    [problem] = remove_tree(folder)
    assert isinstance(problem, LeftAlone)
    assert (problem.filename, problem.strerror) == (str(folder / "deep" / "er"), "belongs to user 4242")
    assert os.listdir(folder) == ["deep"]
    assert (folder / "deep" / "er" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_files_of_other_users_in_folders_of_ours_stay_if_asked(folder: Path, tmp_path: Path) -> None:
    os.chown(folder / "deep" / "er" / "file", 4242, 4242)
    with FolderTree(tmp_path) as tree:
        [problem] = remove_entries(tree, ["tree"], keeps_others=True)
    assert problem.filename == str(folder / "deep" / "er" / "file")
    assert remove_tree(folder) == []


_WALK_AND_REMOVE = """
import resource, sys
from pathlib import Path
from gpuyard.system.folder_tree import FolderTree, remove_tree
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
folder = Path(sys.argv[1])
with FolderTree(folder) as tree:
    paths = tree.paths()
    print(len(paths), all(tree.status(path) for path in paths))
print(remove_tree(folder))
"""


def test_nested_folders_need_few_descriptors_and_no_recursion(folder: Path, tmp_path: Path) -> None:
    with deep_folders(folder, depth=2100):  # the path is longer than the system takes
        walked = subprocess.run(
            [sys.executable, "-c", _WALK_AND_REMOVE, folder], capture_output=True, text=True, check=True
        )
    assert walked.stdout == f"{5 + 4200} True\n[]\n"
    assert os.listdir(tmp_path) == ["outside"]


def test_a_folder_that_is_moved_away_is_a_problem_and_the_walk_goes_on(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("")
    problems: list[OSError] = []
    seen = []
    with FolderTree(folder) as tree:
        for entry in tree.walk(problems.append):
            seen.append(entry.path)
            if entry.path == "a/b/file":
                (folder / "a" / "b").rename(tmp_path / "moved")
    assert [(each.filename, type(each)) for each in problems] == [(str(folder / "a" / "b"), FileNotFoundError)]
    assert sorted(seen) == ["a", "a/b/file", "deep", "deep/er", "deep/er/file", "link"]


def test_a_folder_that_is_removed_during_a_walk_does_not_end_it(folder: Path) -> None:
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "c" / "file").write_text("")
    problems: list[OSError] = []
    seen = []
    with FolderTree(folder) as tree:
        for entry in tree.walk(problems.append):
            seen.append(entry.path)
            if entry.path == "a/b/c/file":
                shutil.rmtree(folder / "a")
    assert problems == []
    assert {"deep", "deep/er", "deep/er/file", "link"} <= set(seen)
