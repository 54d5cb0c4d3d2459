"""Attacks by Git repositories: by their settings, which name programs, and by what stands in place of them."""

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuyard.client import git_tree as run_git
from gpuyard.client.code_snapshot import SnapshotLimits, take_snapshot
from gpuyard.client.git_tree import has_changes, list_tree
from gpuyard.client.submitted_code import code_of, read_commit, work_tree
from gpuyard.errors import EnvironmentFault
from tests.fakes.queue_command import run
from tests.git_tree import git, make_work_tree
from tests.hostile.catalogue import attack
from tests.hostile.users import BEN, act_as
from tests.integration.queue_fixture import QueueUnderTest, until

LIMITS = SnapshotLimits(most_mb=1.0, keep_free_mb=0.0)
COMMIT = "5ac812c8" * 5


def make_tree(root: Path) -> Path:
    attributes = "* filter=planted diff=planted merge=planted\n"
    return make_work_tree(root, {"train.py": "print('one')\n", ".gitattributes": attributes})


@pytest.fixture
def tree(place: Path) -> Path:
    return make_tree(place / "project")


def settings(mark: Path) -> str:
    """Return all settings of Git that name a program, here one that leaves a mark."""
    program = mark.parent / "planted"
    program.write_text(f"#!/bin/sh\ntouch {mark}\ncat\n")
    program.chmod(0o755)
    hooks = mark.parent / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "fsmonitor-watchman", "post-checkout", "pre-auto-gc", "reference-transaction"):
        (hooks / name).symlink_to(program)
    return f"""
[filter "planted"]
    clean = {program}
    smudge = {program}
    process = {program}
    required = true
[diff "planted"]
    textconv = {program}
    command = {program}
[merge "planted"]
    driver = {program}
[diff]
    external = {program}
[core]
    fsmonitor = {program}
    hooksPath = {hooks}
    pager = {program}
    editor = {program}
    sshCommand = {program}
    gitProxy = {program}
    askPass = {program}
    attributesFile = {mark.parent}/attributes
[pager]
    status = {program}
    ls-files = {program}
[alias]
    status = !{program}
    ls-files = !{program}
[credential]
    helper = !{program}
[gpg]
    program = {program}
[submodule]
    recurse = true
[status]
    submoduleSummary = true
[extensions]
    partialClone = origin
[remote "origin"]
    promisor = true
    url = ssh://localhost/project
    uploadpack = {program}
"""


def in_config(tree: Path, text: str) -> None:
    with open(tree / ".git" / "config", "a", encoding="utf-8") as file:
        file.write(text)


def in_an_include(tree: Path, text: str) -> None:
    (tree / ".git" / "more").write_text(text)
    in_config(tree, "[include]\n    path = more\n")


def in_a_conditional_include(tree: Path, text: str) -> None:
    (tree / ".git" / "more").write_text(text)
    in_config(tree, f'[includeIf "gitdir:{tree}/"]\n    path = more\n')


def in_the_work_trees_config(tree: Path, text: str) -> None:
    in_config(tree, "[core]\n    repositoryformatversion = 1\n[extensions]\n    worktreeConfig = true\n")
    (tree / ".git" / "config.worktree").write_text(text)


def in_a_submodule(tree: Path, text: str) -> None:
    source = make_tree(tree.parent / "source")
    git(tree, "submodule", "--quiet", "add", str(source), "inner")
    git(tree, "commit", "--quiet", "--message", "second")
    with open(tree / ".git" / "modules" / "inner" / "config", "a", encoding="utf-8") as file:
        file.write(text)
    os.utime(tree / "inner" / "train.py", (1, 1))


PLACES = (in_config, in_an_include, in_a_conditional_include, in_the_work_trees_config, in_a_submodule)


@attack(
    "name programs in the settings of a repository that others work in: filters, hooks, a file system monitor, pagers, "
    "differs, transports, aliases; in its configuration, in included files, in that of a work tree or of a submodule",
    now="harmless: none is run",
)
@pytest.mark.parametrize("plant", PLACES)
def test_programs_in_settings(tree: Path, place: Path, plant: Callable[[Path, str], None]) -> None:
    mark = place / "mark"
    plant(tree, settings(mark))
    os.utime(tree / "train.py", (1, 1))  # so that its content is compared
    (place / "snapshots").mkdir()
    assert not has_changes(str(tree))
    assert "train.py" in list_tree(str(tree))[0]
    copy = take_snapshot(str(tree), str(place / "snapshots"), LIMITS)["folder"]
    assert Path(copy, "train.py").read_text() == "print('one')\n"
    assert not mark.exists()
    run_git_status(tree)
    assert mark.exists(), "git itself runs what was planted"


@attack(
    "the same, and let the victim submit with `--snapshot`",
    now="harmless: none is run, and the commit and its changes are recorded",
)
def test_submit_among_planted_settings(queue: QueueUnderTest, tree: Path, place: Path) -> None:
    mark = place / "mark"
    in_config(tree, settings(mark))
    os.utime(tree / "train.py", (1, 1))
    done = run("submit", "--gpus", "0", "--snapshot", "--cwd", str(tree), "--", "cat", "train.py")
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    until(lambda: queue.job(job)["code"]["dirty"] is False, "what git says")
    queue.wait(job)
    assert queue.log_of(job) == "print('one')\n"
    assert not mark.exists()


def run_git_status(tree: Path) -> None:
    subprocess.run(["git", "status"], cwd=tree, capture_output=True, check=False)


def make_planted_tree(root: Path, mark: Path) -> str:
    """Make a repository whose settings name programs, and return its commit."""
    make_tree(root)
    in_config(root, settings(mark))
    os.utime(root / "train.py", (1, 1))
    return (root / ".git" / "refs" / "heads" / "master").read_text().strip()


@attack(
    "put a repository that names programs in its settings into a tree of the victim, who takes a snapshot of it",
    now="harmless: none is run; the repository does not count, and its files are copied as those of any folder",
)
@pytest.mark.parametrize("outer", ["untracked", "submodule", "without git"])
def test_repository_within_the_victims_tree(queue: QueueUnderTest, tree: Path, place: Path, outer: str) -> None:
    (place / "bens").mkdir()
    for folder in (place / "bens", tree):
        folder.chmod(0o777)
    mark = place / "bens" / "mark"
    commit = act_as(BEN, make_planted_tree, tree / "inner", mark)
    if outer == "submodule":
        git(tree, "update-index", "--add", "--cacheinfo", f"160000,{commit},inner")
        git(tree, "commit", "--quiet", "--message", "second")
    if outer == "without git":
        (tree / ".git").rename(place / "aside")
    done = run("submit", "--gpus", "0", "--snapshot", "--cwd", str(tree), "--", "ls", "-A", "inner")
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    queue.wait(job)
    assert queue.log_of(job).split() == [".gitattributes", "train.py"]
    if outer != "without git":
        until(lambda: queue.job(job)["code"]["dirty"] is not None, "what git says")
    code = queue.job(job)["code"]
    assert code["commit"] == (None if outer == "without git" else git(tree, "rev-parse", "HEAD"))
    assert not mark.exists()
    act_as(BEN, run_git_status, tree / "inner")
    assert mark.exists(), "git itself runs what was planted"


@attack(
    "put a program `git` into the work tree of a user whose PATH has a relative folder",
    now="harmless: relative folders on PATH are passed over",
)
@pytest.mark.parametrize("folder", ["", ".", "bin"])
def test_git_in_the_work_tree(tree: Path, place: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    mark = place / "mark"
    program = tree / folder / "git"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.chdir(tree)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    assert has_changes(str(tree))  # the program itself
    assert "train.py" in list_tree(str(tree))[0]
    assert not mark.exists()


@attack(
    "put a pipe in place of a file that git reads: `.gitignore`, the HEAD of a repository within",
    now="bounded: git is killed after 30 s, and the command says so",
)
@pytest.mark.parametrize("name", ["within/.gitignore", "within/.git/HEAD"])
def test_pipes_that_git_reads(tree: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(run_git, "_WITHIN_S", 0.5)
    path = tree / name
    path.parent.mkdir(parents=True)
    if "HEAD" in name:
        (path.parent / "objects").mkdir()
        (path.parent / "refs").mkdir()
    os.mkfifo(path)
    with pytest.raises(EnvironmentFault, match=r"git did not end within 0\.5 s"):
        list_tree(str(tree))


def make_repository(folder: str, mode: int = 0o755) -> None:
    os.makedirs(f"{folder}/objects")
    Path(folder, "HEAD").write_text(COMMIT)
    Path(folder, "config").write_text("")
    os.chmod(folder, mode)


def link_to_repository(path: str) -> None:
    make_repository(f"{path}-elsewhere")
    os.symlink(f"{path}-elsewhere", path)


def point_to_repository(path: str) -> None:
    make_repository(f"{path}-elsewhere")
    Path(path).write_text(f"gitdir: {path}-elsewhere\n")


def bind_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


def head_is_a_pipe(path: str) -> None:
    os.makedirs(f"{path}/objects")
    os.mkfifo(f"{path}/HEAD")


IN_PLACE_OF_A_REPOSITORY = (
    make_repository,
    link_to_repository,
    point_to_repository,
    os.mkfifo,
    bind_socket,
    head_is_a_pipe,
)


@attack(
    "put a repository, a link to one, a file that names one, a pipe or a socket as `.git` into a folder above the "
    "victim's, or a pipe as its HEAD",
    now="ignored: as if it was not there",
)
@pytest.mark.parametrize("plant", IN_PLACE_OF_A_REPOSITORY)
def test_git_folder_of_another_user(
    queue: QueueUnderTest, place: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[str], None]
) -> None:
    act_as(BEN, plant, str(place / ".git"))
    own = place / "own"
    own.mkdir()
    (own / "train.py").write_text("print('one')\n")
    monkeypatch.chdir(own)
    assert work_tree(str(own)) is None
    done = run("submit", "--gpus", "0", "--snapshot", "--", "cat", "train.py")
    assert done.returncode == 0, done.stderr
    job = int(done.stdout)
    assert queue.wait(job)["succeeded"] == 1
    assert run("show", str(job)).returncode == 0
    assert queue.job(job)["code"]["commit"] is None


@attack(
    "change HEAD of a repository to a pipe, a link or a file of another user's",
    now="ignored: no commit is recorded",
)
@pytest.mark.parametrize("name", ["HEAD", "commondir", "packed-refs", "refs/heads/planted"])
def test_files_in_a_repository(tree: Path, place: Path, name: str) -> None:
    path = tree / ".git" / name
    if name != "HEAD":
        (tree / ".git" / "HEAD").write_text("ref: refs/heads/planted\n")
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert read_commit(str(tree)) is None
    path.unlink()
    forged = place / "forged"
    act_as(BEN, write, str(forged), f"{COMMIT} refs/heads/planted\n" if name == "packed-refs" else COMMIT)
    os.symlink(forged, path)
    assert read_commit(str(tree)) is None
    path.unlink()
    os.rename(forged, path)
    assert read_commit(str(tree)) is None
    assert path.stat().st_uid == BEN


@attack(
    "make a repository in /tmp that belongs to a group of the victim",
    now="ignored: in a folder of all users only the user's own and root's repositories count",
)
def test_git_folder_of_a_group(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    act_as(BEN, make_repository, str(place / ".git"))
    monkeypatch.setattr(os, "getgroups", lambda: [BEN])
    assert code_of(["true"], str(place))["commit"] is None
    place.chmod(0o775)  # a folder of the group: its members work in one repository
    assert code_of(["true"], str(place))["commit"] == COMMIT


def write(path: str, content: str) -> None:
    Path(path).write_text(content)
