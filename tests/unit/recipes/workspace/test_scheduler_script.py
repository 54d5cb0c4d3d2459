"""`scheduler.sh` finds its workspace from any directory and under any name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard.recipes.workspace.workspace_files import init, scheduler_script
from tests.executables import write_executable

# Prints its arguments, each terminated by NUL, with the workspace's real path.
TELLER = """#!/bin/sh
[ "$1 $2" = "workspace --workspace" ] || exit 9
printf '%s\\0' "$(cd "$3" && pwd -P && echo x)"
shift 3
[ $# -eq 0 ] || printf '%s\\0' "$@"
"""
HOSTILE = ["plain", "a b", "it's", '"q"', "$(touch x)", "`touch x`", "-dash", "größe", "two\nlines", "end\n", "a*?[b]"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return a PATH with a stand-in named gpuyard."""
    folder = tmp_path / "bin"
    folder.mkdir()
    write_executable(folder / "gpuyard", TELLER)
    return f"{folder}:{os.defpath}"


def call_of(command: list[str], cwd: Path, path: str) -> tuple[str, list[str]]:
    """Run the script. Return the workspace and the arguments that gpuyard was called with."""
    done = subprocess.run(command, cwd=cwd, env={"PATH": path}, stdout=subprocess.PIPE, check=True)
    workspace, *arguments = done.stdout.decode().split("\0")[:-1]
    return workspace.removesuffix("\nx"), arguments


@pytest.mark.parametrize("name", HOSTILE)
def test_the_script_works_from_any_working_directory(tmp_path: Path, path: str, name: str) -> None:
    folder = init(tmp_path / name, force=False).folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for command, cwd in (
        ([f"{folder}/scheduler.sh"], elsewhere),
        (["./scheduler.sh"], folder),
        ([f"./{name}/scheduler.sh"], tmp_path),
        ([f"../{name}/scheduler.sh"], elsewhere),
        (["sh", "scheduler.sh"], folder),
        (["sh", "--", f"{name}/scheduler.sh"], tmp_path),
    ):
        assert call_of([*command, "status"], cwd, path) == (str(folder), ["status"])
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_link_to_the_script_uses_the_workspace_of_the_script(tmp_path: Path, path: str, name: str) -> None:
    folder = init(tmp_path / "deep" / name, force=False).folder
    links = tmp_path / "links"
    links.mkdir()
    (links / "far").symlink_to(folder / "scheduler.sh")
    (links / "near").symlink_to(f"../deep/{name}/scheduler.sh")
    (links / "twice").symlink_to("near")
    for link in ("far", "near", "twice"):
        assert call_of([f"links/{link}", "status"], tmp_path, path) == (str(folder), ["status"])


def test_a_link_inside_another_workspace_uses_that_workspace(tmp_path: Path, path: str) -> None:
    first, second = (init(tmp_path / name, force=False).folder for name in ("first", "second"))
    (second / "scheduler.sh").unlink()
    (second / "scheduler.sh").symlink_to(first / "scheduler.sh")
    assert call_of(["second/scheduler.sh", "status"], tmp_path, path) == (str(second), ["status"])


def test_arguments_are_passed_unchanged_and_without_any_the_script_calls_help(tmp_path: Path, path: str) -> None:
    folder = init(tmp_path / "ws", force=False).folder
    arguments = ["start", "a b.yml,$(x).yml", "1,0", "", "--rerun", "-x", "two\nlines", "*"]
    assert call_of(["./scheduler.sh", *arguments], folder, path)[1] == arguments
    assert call_of(["./scheduler.sh"], folder, path)[1] == ["help"]


def test_without_gpuyard_on_path_the_python_that_created_the_script_is_used(tmp_path: Path) -> None:
    package = tmp_path / "gpuyard"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:])")
    python = tmp_path / "it's a $(python)"
    write_executable(python, f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    script = tmp_path / "scheduler.sh"
    script.write_text(scheduler_script(str(python)))
    done = subprocess.run(
        ["sh", script, "status"], env={"PATH": os.defpath}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['workspace', '--workspace', '{tmp_path}/', 'status']\n"


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
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


def test_without_gpuyard_and_python_the_script_prints_a_hint(tmp_path: Path) -> None:
    script = tmp_path / "scheduler.sh"
    script.write_text(scheduler_script(str(tmp_path / "gone")))
    done = subprocess.run(
        ["sh", script, "status"], env={"PATH": os.defpath}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert "gpuyard is not on PATH" in done.stderr
    assert "pip install gpuyard" in done.stderr
