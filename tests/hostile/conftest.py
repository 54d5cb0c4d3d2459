"""Folders in which two users meet."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.ledger.ledger import Ledger
from gpuyard.ledger.ledger_mutex import make_shared_directory
from gpuyard.system.processes import this_process
from tests.integration.queue_fixture import (
    end_leftovers,
    own_queue,  # noqa: F401 - fixtures are found where they are named
    queue,  # noqa: F401 - fixtures are found where they are named
)
from tests.unit.ledger import DEADLINE_S, nothing, start_fork_server


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    start_fork_server()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter and write to, as /tmp; pytest's tmp_path is closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="gpuyard-hostile-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def own_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the victim's queue (root's), in a place that all users may enter, with two simulated GPUs."""
    home = place / "home"
    monkeypatch.setenv("GPUYARD_HOME", str(home))
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(place / "ledger"))
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    yield home
    end_leftovers(home)


@pytest.fixture
def ledger(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger that root, Anne and Ben share; root's commands see two simulated GPUs."""
    folder = make_shared_directory(place / "ledger")
    Ledger(folder).claim(this_process(), nothing, DEADLINE_S)
    monkeypatch.setenv("GPUYARD_LOCK_DIR", str(folder))
    monkeypatch.setenv("GPUYARD_HOME", str(place / "home"))
    monkeypatch.setenv("GPUYARD_SIMULATE", "2x24GB")
    return folder
