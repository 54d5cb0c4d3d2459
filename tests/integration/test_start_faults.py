"""What keeps a daemon from starting is said in one line, with what to do; low limits of the shell do not keep it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.queue_command import GPUYARD, run


@pytest.fixture(autouse=True)
def _simulated(home: Path) -> None:
    """Each test has a folder of its own, and simulated devices."""


def said(stderr: str) -> str:
    assert 'File "' not in stderr, "a traceback"
    assert "bug" not in stderr
    assert "disk space" not in stderr
    return stderr


def test_simulated_devices_that_are_described_in_a_wrong_way() -> None:
    result = run("queue", env={**os.environ, "GPUYARD_SIMULATE": "bogus"})
    assert result.returncode == 1
    assert "'bogus' does not describe simulated devices (write it as 2x24GB, " in said(result.stderr)


def test_a_home_whose_name_is_not_utf8(home: Path) -> None:
    result = run("queue", env={**os.environ, "GPUYARD_HOME": f"{home.parent}/h\udcff"})
    assert result.returncode == 1
    assert "is not UTF-8" in said(result.stderr)
    assert "set GPUYARD_HOME to another directory" in result.stderr


@pytest.mark.parametrize("name", ["lease-directories", "daemon.log", "queue.db", "queue.record", "journal"])
def test_a_folder_where_a_file_should_be(home: Path, name: str) -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    (home / name).mkdir()
    result = run("queue")
    assert result.returncode == 1
    assert name in said(result.stderr)


@pytest.mark.linux("limits on address space")
@pytest.mark.parametrize(
    ("limit", "commands"),
    [
        ("-n 30", [["queue"]]),
        ("-n 80", [["submit", "--gpus", "0", "--", "true"], ["wait", "all", "--timeout", "60s"]]),
        ("-v 300000", [["submit", "--gpus", "0", "--", "true"], ["wait", "all", "--timeout", "60s"]]),
    ],
    ids=["30-files", "80-files", "300-MB"],
)
def test_a_low_limit_does_not_keep_it_from_starting(home: Path, limit: str, commands: list[list[str]]) -> None:
    """Also with an inherited descriptor above the limit."""
    lines = " && ".join(shlex.join([*GPUYARD, *each]) for each in [*commands, ["daemon", "stop"]])
    script = f"ulimit {limit} && {lines}"
    code = "import os, sys; os.dup2(2, 90, True); os.execv('/bin/bash', ['bash', '-c', sys.argv[1]])"
    result = subprocess.run(
        [sys.executable, "-c", code, script], capture_output=True, text=True, timeout=120, check=False,
        close_fds=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr + (home / "daemon.log").read_text()
