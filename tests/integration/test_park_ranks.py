"""Suspending processes that wait for each other in each step, and park their GPU memory together or not at all. The GPU
is simulated, and the driver moves the rest."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.probes.simulated_devices import SimulatedDevices
from tests.fakes import parking_ranks
from tests.integration.engine_fixture import engine, folder, log_of, outcomes, wait_for
from tests.integration.suspend_fixture import (
    begun,
    helper_pid,
    next_result,
    nothing_is_left,
    resumed,
    suspended,
    suspender,
    wait_for_line,
)

__all__ = ["engine", "folder", "nothing_is_left", "suspender"]

pytestmark = pytest.mark.usefixtures("unmeasured")
SIZE_MB = 4096.0
PARKED_MB = 2 * (SIZE_MB - parking_ranks.CONTEXT_MB)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")


@pytest.fixture
def impatient(folder: Path) -> Iterator[LocalSuspender]:
    suspender = LocalSuspender(folder / "suspending", str(folder), parks_within_s=2.0)
    yield suspender
    suspender.close()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def used_mb() -> float | None:
    return SimulatedDevices().read(1).devices[0].memory_used_mb


def ranks(engine: LocalEngine, folder: Path, gate: Path, *options: str) -> Attempt:
    command = (*parking_ranks.COMMAND, "--vram", str(SIZE_MB), *options, str(gate))
    attempt = begun(engine, 1, *command, devices=("SIM-0",))
    for rank in range(2):
        wait_for_line(folder, 1, f"{rank} works")
    return attempt


def moves(folder: Path) -> list[str]:
    """The moves of each rank in order, first those of rank 0."""
    lines = [line for line in log_of(folder, 1).splitlines() if not line.endswith("works")]
    return sorted(lines, key=lambda line: line[0])


def has_ended_well(engine: LocalEngine, gate: Path) -> bool:
    gate.touch()
    return outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


def test_ranks_that_wait_for_each_other_park_after_the_same_step(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, gate: Path
) -> None:
    attempt = ranks(engine, folder, gate)
    assert suspender.can_park(attempt)
    for _ in range(3):
        moved = suspended(suspender, attempt)
        assert (moved.is_done, moved.text, moved.parked_mb) == (True, "", PARKED_MB)
        assert moved.held_mb == {"SIM-0": 2 * SIZE_MB}
        wait_for(lambda: used_mb() == 0, "the driver, which moves the rest")
        assert resumed(suspender, attempt, 2 * SIZE_MB).is_done
        assert used_mb() == 2 * SIZE_MB
    assert has_ended_well(engine, gate)
    both = [[f"{rank} parked", f"{rank} returned"] * 3 + [f"{rank} done"] for rank in range(2)]
    assert moves(folder) == [*both[0], *both[1]]


def test_a_rank_that_has_parked_goes_on_when_the_helper_is_killed_before_all_have(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, gate: Path
) -> None:
    attempt = ranks(engine, folder, gate)
    gate.with_suffix(".unsaid").touch()
    suspender.suspend(attempt)
    for rank in range(2):
        wait_for_line(folder, 1, f"{rank} parked")
    os.kill(helper_pid(), signal.SIGKILL)
    wait_for_line(folder, 1, "0 returned")
    gate.with_suffix(".unsaid").unlink()
    moved = next_result(suspender)
    assert (moved.is_done, moved.parked_mb) == (True, PARKED_MB), "the second helper"
    assert resumed(suspender, attempt, 2 * SIZE_MB).is_done
    assert used_mb() == 2 * SIZE_MB
    assert has_ended_well(engine, gate)


def test_a_rank_that_is_back_parks_again_when_the_helper_is_killed_before_all_are(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, gate: Path
) -> None:
    attempt = ranks(engine, folder, gate)
    assert suspended(suspender, attempt).is_done
    wait_for(lambda: used_mb() == 0, "the driver, which moves the rest")
    gate.with_suffix(".unsaid").touch()
    suspender.resume(attempt, {"SIM-0": 2 * SIZE_MB})
    for rank in range(2):
        wait_for_line(folder, 1, f"{rank} returned")
    os.kill(helper_pid(), signal.SIGKILL)
    wait_for(lambda: log_of(folder, 1).count("0 parked") == 2, "rank 0, which parks again")
    gate.with_suffix(".unsaid").unlink()
    assert next_result(suspender).is_done, "the second helper"
    assert used_mb() == 2 * SIZE_MB
    assert has_ended_well(engine, gate)


CANNOT_PARK = {
    "--unregistered": "1 of its 2 processes have called gpuyard.torch.parkable and ended a step",
    "--late=9": " steps apart, so they do not count the same steps",
    "--late=2": "no end of a step within 2 s",
}


@pytest.mark.parametrize("option", CANNOT_PARK)
def test_the_driver_moves_ranks_that_cannot_park_together_and_the_result_says_why(
    engine: LocalEngine, folder: Path, impatient: LocalSuspender, gate: Path, option: str
) -> None:
    attempt = ranks(engine, folder, gate, option)
    assert impatient.can_park(attempt) is (option != "--unregistered")
    moved = suspended(impatient, attempt)
    assert (moved.is_done, moved.parked_mb) == (True, None)
    assert CANNOT_PARK[option] in moved.text
    assert used_mb() == 0
    assert resumed(impatient, attempt, 2 * SIZE_MB).is_done
    assert has_ended_well(engine, gate)
