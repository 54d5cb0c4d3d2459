"""Snapshots of real trees: what is copied, what is linked, what is refused."""

import os
import stat
from pathlib import Path

import pytest

from gpuyard.client.code_snapshot import SnapshotLimits, take_snapshot
from gpuyard.client.submitted_code import code_of, read_commit, work_tree
from gpuyard.errors import EnvironmentFault, UserError
from tests.git_tree import git, make_work_tree

LIMITS = SnapshotLimits(most_mb=1.0, keep_free_mb=0.0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A Git work tree with tracked, new and ignored files."""
    ignored = "data/\n*.secret\n__pycache__\n"
    files = {"train.py": "print('one')\n", "package/model.py": "x = 1\n", ".gitignore": ignored}
    root = make_work_tree(tmp_path / "project", files)
    (root / "new.py").write_text("new\n")
    (root / "data").mkdir()
    (root / "data" / "set.bin").write_text("data")
    (root / "key.secret").write_text("s")
    (root / "package" / "__pycache__").mkdir()
    (root / "package" / "__pycache__" / "model.pyc").write_text("old")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "snapshots"
    path.mkdir(mode=0o700)
    return path


def snapshot(cwd: Path, folder: Path, limits: SnapshotLimits = LIMITS) -> Path:
    return Path(take_snapshot(str(cwd), str(folder), limits)["folder"])


def test_tracked_and_new_files_are_copies_and_ignored_ones_are_links(tree: Path, folder: Path) -> None:
    copy = snapshot(tree, folder)
    (tree / "train.py").write_text("print('two')\n")
    assert (copy / "train.py").read_text() == "print('one')\n"
    assert (copy / "new.py").read_text() == "new\n"
    assert not (copy / "package").is_symlink()
    assert os.readlink(copy / "data") == str(tree / "data")
    assert os.readlink(copy / "key.secret") == str(tree / "key.secret")
    assert not os.path.lexists(copy / ".git")
    assert not os.path.lexists(copy / "package" / "__pycache__")


def test_an_editor_that_writes_in_place_does_not_change_the_snapshot(tree: Path, folder: Path) -> None:
    copy = snapshot(tree, folder)
    with open(tree / "train.py", "r+", encoding="utf-8") as file:
        file.write("broken")
    assert (copy / "train.py").read_text() == "print('one')\n"
    assert not os.path.samefile(copy / "train.py", tree / "train.py")


def test_modes_and_times_are_kept_and_only_the_user_can_enter(tree: Path, folder: Path) -> None:
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    os.utime(tree / "run.sh", ns=(0, 1_000_000_000_123))
    copy = snapshot(tree, folder)
    found = (copy / "run.sh").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o755, 1_000_000_000_123)
    assert stat.S_IMODE(copy.stat().st_mode) == stat.S_IMODE(copy.parent.stat().st_mode) == 0o700


def test_links_are_never_followed_out_of_the_tree(tree: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tree / "out").symlink_to("../outside")
    (tree / "in").symlink_to("package/model.py")
    (tree / "absolute").symlink_to(tree / "train.py")
    copy = snapshot(tree, folder)
    assert os.readlink(copy / "out") == str(tmp_path / "outside")
    assert (copy / "in").resolve() == copy.resolve() / "package" / "model.py"
    assert (copy / "absolute").resolve() == copy.resolve() / "train.py"


def test_files_of_submodules_and_of_work_trees_within_are_copied(tree: Path, folder: Path, tmp_path: Path) -> None:
    other = make_work_tree(tmp_path / "library", {"lib.py": "lib\n"})
    git(tree, "submodule", "--quiet", "add", str(other), "library")
    (tree / "library" / "edited.py").write_text("edited\n")
    git(tree, "clone", "--quiet", str(other), "untracked")
    copy = snapshot(tree, folder)
    assert (copy / "library" / "lib.py").read_text() == "lib\n"
    assert (copy / "library" / "edited.py").read_text() == "edited\n"
    assert (copy / "untracked" / "lib.py").read_text() == "lib\n"


def test_a_link_to_a_work_tree_stays_a_link_also_to_its_own(tree: Path, folder: Path, tmp_path: Path) -> None:
    other = make_work_tree(tmp_path / "other", {"data.py": "y = 1\n"})
    (tree / "here").symlink_to(".")
    (tree / "other").symlink_to(other)
    copy = snapshot(tree, folder)
    assert os.readlink(copy / "here") == "."
    assert os.readlink(copy / "other") == str(other)


def test_a_file_that_was_deleted_and_not_committed_is_left_out(tree: Path, folder: Path) -> None:
    (tree / "train.py").unlink()
    assert not (snapshot(tree, folder) / "train.py").exists()


def test_a_submission_from_a_folder_of_the_tree_starts_in_the_same_place(tree: Path, folder: Path) -> None:
    (tree / "empty").mkdir()
    for inner in ("package", "empty"):
        found = take_snapshot(str(tree / inner), str(folder), LIMITS)
        assert found["cwd"] == f"{found['folder']}/{inner}"
        assert os.path.isdir(found["cwd"])
        assert found["root"] == str(tree)


def test_a_submission_from_an_ignored_folder_is_refused_and_leaves_nothing(tree: Path, folder: Path) -> None:
    with pytest.raises(UserError, match="Git ignores"):
        snapshot(tree / "data", folder)
    assert list(folder.iterdir()) == []


def test_a_folder_without_git_is_copied_whole_and_not_the_snapshots_in_it(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    folder = root / "state" / "snapshots"
    folder.mkdir(parents=True, mode=0o700)
    (root / "inner").mkdir()
    (root / "inner" / "a.py").write_text("a")
    (root / "__pycache__").mkdir()
    copy = snapshot(root, folder)
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()) == ["inner/a.py"]
    again = snapshot(root, folder)
    assert sorted(path.name for path in again.rglob("*.py")) == ["a.py"]


@pytest.mark.parametrize("is_git", [True, False])
def test_a_tree_too_large_is_refused_with_files(tree: Path, folder: Path, tmp_path: Path, *, is_git: bool) -> None:
    root = tree if is_git else tmp_path / "plain"
    root.mkdir(exist_ok=True)
    (root / "weights.pt").write_bytes(b"w" * (3 << 20))
    with pytest.raises(UserError, match=r"too large for a snapshot.* weights.pt \(3 MB\)") as caught:
        snapshot(root, folder)
    assert ".gitignore" in (caught.value.hint or "")
    assert list(folder.iterdir()) == []


def test_the_disk_of_the_queue_is_not_filled(tree: Path, folder: Path) -> None:
    with pytest.raises(EnvironmentFault, match="stays free"):
        snapshot(tree, folder, SnapshotLimits(most_mb=1.0, keep_free_mb=1e12))
    assert list(folder.iterdir()) == []


def test_without_git_on_the_path_the_error_says_so(tree: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(EnvironmentFault, match="no git on PATH"):
        snapshot(tree, folder)


def test_the_commit_is_read_from_branches_packed_refs_trees_and_detached_heads(tree: Path, tmp_path: Path) -> None:
    commit = git(tree, "rev-parse", "HEAD")
    assert read_commit(str(tree)) == commit
    git(tree, "pack-refs", "--all")
    assert read_commit(str(tree)) == commit
    git(tree, "worktree", "add", "--quiet", "-b", "side", str(tmp_path / "linked"))
    assert read_commit(str(tmp_path / "linked")) == commit
    git(tree, "checkout", "--quiet", "--detach")
    assert read_commit(str(tree)) == commit
    assert work_tree(str(tree / "package")) == str(tree)


def test_before_the_first_commit_and_outside_git_there_is_none(tmp_path: Path) -> None:
    assert code_of(["true"], str(tmp_path)) == {"root": None, "commit": None, "script": None, "digest": None}
    git(tmp_path, "init", "--quiet")
    assert read_commit(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (["python", "-u", "train.py", "--config", "other.py"], "train.py"),
        (["torchrun", "--nproc", "2", "train.py"], "train.py"),
        (["python", "-m", "package.model"], "package/model.py"), (["./tool", "train.txt"], "tool"),
        (["python", "missing.py"], None), (["/bin/true"], None), ([], None),
    ],
)  # fmt: skip
def test_the_script_of_a_command_is_found(tree: Path, command: list[str], script: str | None) -> None:
    (tree / "tool").write_text("#!/bin/sh\n")
    found = code_of(command, str(tree))
    assert found["script"] == (None if script is None else str(tree / script))
    assert (found["digest"] is None) == (script is None)
