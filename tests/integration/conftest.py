"""Shared fixtures of the integration tests: scripts that lease GPUs, a queue, an engine."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.scripting.gpu_info import BANNED_GPU_NAMES, BANNED_GPUS
from tests.integration.engine_fixture import engine, folder, pipe  # noqa: F401 - fixtures are found where they are named
from tests.integration.queue_fixture import (
    end_leftovers,
    own_queue,  # noqa: F401 - fixtures are found where they are named
    queue,  # noqa: F401 - fixtures are found where they are named
)
from tests.integration.web_fixture import web  # noqa: F401 - fixtures are found where they are named
from tests.integration.workspace_fixture import make_tmux, make_workspace, make_workspaces  # noqa: F401 - fixtures

HOLD = (
    "import sys\n"
    "from gpuyard import GPUScheduler\n"
    "with GPUScheduler(**eval(sys.argv[1])) as gpu_ids:\n"
    "    print(gpu_ids, flush=True)\n"
    "    sys.stdin.readline()\n"
)

Script = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def home(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a queue with two simulated GPUs. Ends a daemon that the test left there."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    yield own_home
    end_leftovers(own_home)


@pytest.fixture
def script(request: pytest.FixtureRequest) -> Script:
    """Start a command, or a script that leases GPUs, prints them, and holds them until it reads a line."""

    def start(*command: str, **options: object) -> "subprocess.Popen[str]":
        arguments = [*command] if command else [sys.executable, "-c", HOLD, repr(options)]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        request.addfinalizer(process.communicate)
        request.addfinalizer(process.kill)
        return process

    return start


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two simulated GPUs, all visible. Bans made by the test are removed after it."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    BANNED_GPUS.clear()
    BANNED_GPU_NAMES.clear()
