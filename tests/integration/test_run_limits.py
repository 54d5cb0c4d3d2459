"""`gpuyard run` when the system refuses another process or file: it says so, and no lease is left."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.foreground import ForegroundProgram, run_program
from gpuyard.errors import EnvironmentFault
from tests.hostile.users import act_as
from tests.unit.ledger import as_root

# A user of this test alone: the system counts the processes of a user.
USER = 1_000_000 + os.getpid()


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gpuyard-run-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def run_limited(place: str, kind: int, most: int) -> int:
    """Run a program with a limit, and return its exit status. Of files, none more than now may be open."""
    lease = Path(place, "lease")
    descriptor = os.open(lease, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    most = descriptor + 1 if kind == resource.RLIMIT_NOFILE else most
    resource.setrlimit(kind, (most, most))
    program = ForegroundProgram(path="/bin/sh", arguments=("sh", "-c", f": > {place}/ran; exit 3"), environment={})
    return run_program(program, lease, descriptor)


@as_root
@pytest.mark.parametrize("most", [1, 2, 3])  # refuses the keeper, the starter, the program
def test_a_program_that_the_system_refuses_is_reported_with_a_remedy(place: Path, most: int) -> None:
    with pytest.raises(EnvironmentFault, match="sh was not started: Resource temporarily unavailable") as refused:
        act_as(USER, run_limited, str(place), resource.RLIMIT_NPROC, most)
    assert "ulimit -u" in str(refused.value.hint)
    assert list(place.iterdir()) == []


@as_root
def test_a_program_that_the_system_just_allows_runs(place: Path) -> None:
    assert act_as(USER, run_limited, str(place), resource.RLIMIT_NPROC, 4) == 3
    assert (place / "ran").exists()


@as_root
def test_too_few_descriptors_are_reported_with_a_remedy(place: Path) -> None:
    with pytest.raises(EnvironmentFault, match="sh was not started: Too many open files") as refused:
        act_as(USER, run_limited, str(place), resource.RLIMIT_NOFILE, 0)
    assert "ulimit -n" in str(refused.value.hint)
    assert list(place.iterdir()) == []
