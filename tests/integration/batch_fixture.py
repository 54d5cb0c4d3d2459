"""A batch for a test: the real command, and runs that wait for the test."""

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.queue_command import GPUYARD, run
from tests.integration.queue_fixture import end_leftovers, until

# Open all gates: the machine may be busy with other tests.
OPEN = ("--gpus", "0", "--max-cpu", "100", "--min-free-mem-mb", "0", "--steady", "0", "--stagger", "0")
DEADLINE_S = 90.0


@pytest.fixture
def queue(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.chdir(own_home.parent)
    yield
    end_leftovers(own_home)


def batch(count: int, *arguments: str, program: str) -> "subprocess.CompletedProcess[str]":
    return run("batch", "--count", str(count), *OPEN, *arguments, "--", "sh", "-c", program)


def summary_in(root: Path) -> Any:
    return json.loads((root / "summary.json").read_text())


GATED = "echo {seed} >> seeds; touch {output}/begun; until [ -e go-{index} ]; do sleep 0.02; done"


def await_run(folder: Path, index: int) -> None:
    """Wait until this gated run has begun."""
    until((folder / f"out/run-{index:06d}/begun").exists, f"the beginning of run {index}")


def let_go(folder: Path, *indexes: int) -> None:
    for index in indexes:
        await_run(folder, index)
        (folder / f"go-{index}").touch()


@contextlib.contextmanager
def begun(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Start a command in the foreground, but not on a terminal."""
    command = [*GPUYARD, *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
