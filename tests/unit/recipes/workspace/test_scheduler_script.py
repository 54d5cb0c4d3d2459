"""`scheduler.sh` finds its workspace from any directory and under any name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.recipes.workspace.create_workspace import init
from gpuyard.recipes.workspace.templates import scheduler_script

# Tells its arguments, each ended by a zero, with the workspace's real path.
TELLER = """#!/bin/sh
[ "$1 $2" = "workspace --workspace" ] || exit 9
printf '%s\\0' "$(cd "$3" && pwd -P && echo x)"
shift 3
[ $# -eq 0 ] || printf '%s\\0' "$@"
"""
HOSTILE = ["plain", "a b", "it's", '"q"', "$(touch x)", "`touch x`", "-dash", "größe", "two\nlines", "end\n", "a*?[b]"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which a stand-in is called gpuyard."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gpuyard").write_text(TELLER)
    (folder / "gpuyard").chmod(0o755)
    return f"{folder}:{os.defpath}"


def told(words: list[str], cwd: Path, path: str) -> tuple[str, list[str]]:
    """The workspace it was for, and the arguments."""
    done = subprocess.run(words, cwd=cwd, env={"PATH": path}, stdout=subprocess.PIPE, check=True)
    workspace, *arguments = done.stdout.decode().split("\0")[:-1]
    return workspace.removesuffix("\nx"), arguments


@pytest.mark.parametrize("name", HOSTILE)
def test_it_works_from_any_working_directory(tmp_path: Path, path: str, name: str) -> None:
    folder = init(tmp_path / name, force=False).folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for words, cwd in (
        ([f"{folder}/scheduler.sh"], elsewhere),
        (["./scheduler.sh"], folder),
        ([f"./{name}/scheduler.sh"], tmp_path),
        ([f"../{name}/scheduler.sh"], elsewhere),
        (["sh", "scheduler.sh"], folder),
        (["sh", "--", f"{name}/scheduler.sh"], tmp_path),
    ):
        assert told([*words, "status"], cwd, path) == (str(folder), ["status"])
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_link_to_it_leads_to_its_workspace(tmp_path: Path, path: str, name: str) -> None:
    folder = init(tmp_path / "deep" / name, force=False).folder
    links = tmp_path / "links"
    links.mkdir()
    (links / "far").symlink_to(folder / "scheduler.sh")
    (links / "near").symlink_to(f"../deep/{name}/scheduler.sh")
    (links / "twice").symlink_to("near")
    for link in ("far", "near", "twice"):
        assert told([f"links/{link}", "status"], tmp_path, path) == (str(folder), ["status"])


def test_a_link_in_a_workspace_stands_for_that_workspace(tmp_path: Path, path: str) -> None:
    first, second = (init(tmp_path / name, force=False).folder for name in ("first", "second"))
    (second / "scheduler.sh").unlink()
    (second / "scheduler.sh").symlink_to(first / "scheduler.sh")
    assert told(["second/scheduler.sh", "status"], tmp_path, path) == (str(second), ["status"])


def test_arguments_arrive_as_they_are(tmp_path: Path, path: str) -> None:
    folder = init(tmp_path / "ws", force=False).folder
    arguments = ["start", "a b.yml,$(x).yml", "1,0", "", "--rerun", "-x", "two\nlines", "*"]
    assert told(["./scheduler.sh", *arguments], folder, path)[1] == arguments


def test_alone_it_asks_for_help(tmp_path: Path, path: str) -> None:
    folder = init(tmp_path / "ws", force=False).folder
    assert told(["./scheduler.sh"], folder, path)[1] == ["help"]


def test_without_gpuyard_on_path_the_python_that_made_it_is_used(tmp_path: Path) -> None:
    package = tmp_path / "gpuyard"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    python = tmp_path / "it's a $(python)"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "scheduler.sh"
    script.write_text(scheduler_script(str(python)))
    done = subprocess.run(
        ["sh", script, "status"], env={"PATH": os.defpath}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['workspace', '--workspace', '{tmp_path}/', 'status']\n"


def test_files_in_the_working_directory_do_not_get_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "gpuyard.py").write_text("raise SystemExit('taken from the working directory')")
    (tmp_path / "scheduler.sh").write_text(scheduler_script(sys.executable))
    done = subprocess.run(
        ["sh", "./scheduler.sh", "--help"],
        cwd=tmp_path,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "taken from" not in done.stdout + done.stderr


def test_with_neither_it_says_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "scheduler.sh"
    script.write_text(scheduler_script(str(tmp_path / "gone")))
    done = subprocess.run(
        ["sh", script, "status"], env={"PATH": os.defpath}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert "gpuyard is not on PATH" in done.stderr
    assert "pip install gpuyard" in done.stderr
