"""Suspending a program that parks its GPU memory itself. The GPU is simulated, and the driver moves the rest."""

import os
import signal
from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.ask_to_park import RegisteredProcesses, find_registered
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.probes.simulated_devices import SimulatedDevices
from gpuyard.system.parking_protocol import registered
from tests.fakes import parking_job
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
SIZE_MB = 8192.0


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    return SimulatedDevices()


def used_mb(devices: SimulatedDevices) -> float | None:
    return devices.read(1).devices[0].memory_used_mb


def parking(engine: LocalEngine, folder: Path, gate: Path, *options: str) -> Attempt:
    attempt = begun(engine, 1, *parking_job.COMMAND, "--vram", str(SIZE_MB), *options, str(gate), devices=("SIM-0",))
    wait_for_line(folder, 1, "holding")
    return attempt


def program_of(folder: Path) -> RegisteredProcesses:
    return RegisteredProcesses(registered(str(folder), "1.1"), parks_within_s=0.1)


def moves(folder: Path) -> list[str]:
    return [line for line in log_of(folder, 1).splitlines() if line != "holding"]


def test_a_registered_program_parks_its_memory_and_takes_it_back(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, devices: SimulatedDevices, tmp_path: Path
) -> None:
    attempt = parking(engine, folder, tmp_path / "gate")
    assert suspender.can_park(attempt)
    for _ in range(2):
        moved = suspended(suspender, attempt)
        assert moved.is_done
        assert moved.parked_mb == SIZE_MB - parking_job.CONTEXT_MB
        assert moved.held_mb == {"SIM-0": SIZE_MB}, "all of it has to be free before it is resumed"
        wait_for(lambda: used_mb(devices) == 0, "the driver, which moves the rest")
        assert resumed(suspender, attempt, SIZE_MB).is_done
        assert used_mb(devices) == SIZE_MB
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert moves(folder) == ["parked", "returned"] * 2 + ["done"]
    assert not suspender.can_park(attempt), "the registration ends with the program"


def test_the_driver_suspends_a_program_that_does_not_reach_the_end_of_its_step(
    engine: LocalEngine, folder: Path, devices: SimulatedDevices, tmp_path: Path
) -> None:
    impatient = LocalSuspender(folder / "suspending", str(folder), parks_within_s=0.2)
    attempt = parking(engine, folder, tmp_path / "gate", "--stuck")
    moved = suspended(impatient, attempt)
    assert (moved.is_done, moved.parked_mb, moved.held_mb) == (True, None, {"SIM-0": SIZE_MB})
    assert moved.text.startswith("no end of a step within 0.2 s")
    assert used_mb(devices) == 0
    assert resumed(impatient, attempt, SIZE_MB).is_done
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert moves(folder) == ["done"]
    impatient.close()


def test_a_program_that_cannot_take_its_memory_back_stays_suspended_and_returns_later(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, devices: SimulatedDevices, tmp_path: Path
) -> None:
    attempt = parking(engine, folder, tmp_path / "gate")
    assert suspended(suspender, attempt).is_done
    (tmp_path / "gate.full").touch()
    moved = resumed(suspender, attempt, SIZE_MB)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert moved.text == "the program did not take its memory back: CUDA out of memory"
    wait_for(lambda: used_mb(devices) == 0, "the driver, which moves the rest")
    (tmp_path / "gate.full").unlink()
    assert resumed(suspender, attempt, SIZE_MB).is_done
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


def test_a_second_helper_finishes_when_the_first_is_killed(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, devices: SimulatedDevices, tmp_path: Path
) -> None:
    attempt = parking(engine, folder, tmp_path / "gate")
    (tmp_path / "gate.unsaid").touch()
    suspender.suspend(attempt)
    wait_for_line(folder, 1, "parked")
    os.kill(helper_pid(), signal.SIGKILL)
    (tmp_path / "gate.unsaid").unlink()
    assert next_result(suspender).is_done
    wait_for(lambda: used_mb(devices) in (0, parking_job.CONTEXT_MB), "the memory")
    assert resumed(suspender, attempt, SIZE_MB).is_done
    assert used_mb(devices) == SIZE_MB
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


def test_a_request_whose_connection_is_closed_is_withdrawn(
    engine: LocalEngine, folder: Path, devices: SimulatedDevices, tmp_path: Path
) -> None:
    parking(engine, folder, tmp_path / "gate", "--stuck")
    program = program_of(folder)
    assert program.park() is None
    assert program.bring_back() is None, "it had not parked"
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert moves(folder) == ["done"]


def test_processes_that_do_not_wait_for_each_other_park_each_at_its_own_next_point(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, devices: SimulatedDevices, tmp_path: Path
) -> None:
    """They start one after the other, and count their points from there."""
    shell = '"$@" & until ls "$GPUYARD_QUEUE/suspending" 2>&- | grep -q park; do :; done; "$@" & wait'
    command = ("/bin/sh", "-c", shell, "sh", *parking_job.COMMAND, "--vram", str(SIZE_MB), str(tmp_path / "gate"))
    attempt = begun(engine, 1, *command, devices=("SIM-0",))
    wait_for(lambda: len(registered(str(folder), "1.1")) == 2, "two registrations")
    assert suspender.can_park(attempt)
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.text, moved.parked_mb) == (True, "", 2 * (SIZE_MB - parking_job.CONTEXT_MB))
    assert resumed(suspender, attempt, 2 * SIZE_MB).is_done
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    assert sorted(moves(folder)) == ["done"] * 2 + ["parked"] * 2 + ["returned"] * 2


def test_the_socket_of_a_killed_program_is_removed_and_asked_for_nothing(
    engine: LocalEngine, folder: Path, tmp_path: Path
) -> None:
    attempt = parking(engine, folder, tmp_path / "gate")
    program, (registration,) = program_of(folder), registered(str(folder), "1.1")
    engine.signal(attempt, signal.SIGKILL)
    outcomes(engine)
    assert registered(str(folder), "1.1") == []
    assert find_registered(str(folder), "1.1", [], 1.0) is None
    assert program.park() is None
    assert program.refusal == f"process {registration.pid} has ended"
    assert program.bring_back() is None, "nothing is left to come back"
    LocalSuspender(folder / "suspending", str(folder)).close()
    assert not Path(registration.path).exists()
