"""Suspending a program that parks its GPU memory itself, on devices whose driver cannot suspend programs: its context
stays there."""

from pathlib import Path

import pytest

from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, OutcomeKind
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.probes.simulated_devices import SimulatedDevices
from tests.fakes import gated_job, parking_job
from tests.integration.driver_fixture import Card, card, libraries, users_in
from tests.integration.engine_fixture import engine, folder, log_of, outcomes, wait_for
from tests.integration.suspend_fixture import (
    begun,
    is_stopped,
    nothing_is_left,
    resumed,
    script,
    suspended,
    suspender,
    wait_for_line,
)
from tests.integration.test_park_driver import PARKING_USER

__all__ = ["card", "engine", "folder", "libraries", "nothing_is_left", "suspender"]

SIZE_MB = 8192.0


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> str:
    """A simulated AMD card. Its id."""
    monkeypatch.setenv("GPUYARD_SIMULATE", "amd:1x24GB")
    return "SIM-amd-0"


def used_mb() -> float | None:
    return SimulatedDevices(vendor=Vendor.AMD).read(1).devices[0].memory_used_mb


def parking(engine: LocalEngine, folder: Path, gate: Path, device_id: str, *options: str) -> Attempt:
    command = (*parking_job.COMMAND, "--vram", str(SIZE_MB), *options, str(gate))
    attempt = begun(engine, 1, *command, devices=(device_id,))
    wait_for_line(folder, 1, "holding")
    return attempt


@pytest.mark.usefixtures("unmeasured")
def test_a_program_that_finds_no_memory_stays_parked(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, tmp_path: Path, amd: str
) -> None:
    attempt = parking(engine, folder, tmp_path / "gate", amd)
    assert suspended(suspender, attempt).is_done
    (tmp_path / "gate.full").touch()
    moved = resumed(suspender, attempt, SIZE_MB)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert moved.text == "the program did not take its memory back: CUDA out of memory"
    assert used_mb() == parking_job.CONTEXT_MB
    (tmp_path / "gate.full").unlink()
    assert resumed(suspender, attempt, SIZE_MB).is_done
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


@pytest.mark.usefixtures("unmeasured")
def test_a_program_that_does_not_park_goes_on(engine: LocalEngine, folder: Path, tmp_path: Path, amd: str) -> None:
    impatient = LocalSuspender(folder / "suspending", str(folder), parks_within_s=0.2)
    attempt = parking(engine, folder, tmp_path / "gate", amd, "--stuck")
    moved = suspended(impatient, attempt)
    assert (moved.is_done, moved.is_ruined) == (False, False)
    assert moved.text.startswith(
        "SIM-amd-0 is no NVIDIA device, and only NVIDIA's driver can suspend programs; the program did not park its"
        " memory: no end of a step within 0.2 s"
    )
    assert used_mb() == SIZE_MB
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
    impatient.close()


@pytest.mark.usefixtures("unmeasured")
def test_a_program_that_has_not_registered_is_neither_stopped_nor_reported_as_resumed(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, tmp_path: Path, amd: str
) -> None:
    command = (*gated_job.COMMAND, "--vram", "1000", str(tmp_path / "gate"))
    attempt = begun(engine, 1, *command, devices=(amd,))
    wait_for(lambda: used_mb() == 1000, "its memory")
    moved = suspended(suspender, attempt)
    assert not moved.is_done
    assert moved.text.endswith("it has not called gpuyard.torch.parkable")
    assert not resumed(suspender, attempt, 1000).is_done
    (tmp_path / "gate").touch()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED


@pytest.mark.needs("cc")
@pytest.mark.parametrize("device_id", ["MIG-1", "0000:03:00.0"], ids=["mig", "amd beside an NVIDIA card"])
def test_the_driver_is_not_asked_about_a_device_on_which_it_cannot_suspend(
    engine: LocalEngine, folder: Path, suspender: LocalSuspender, card: Card, device_id: str
) -> None:
    attempt = script(engine, 1, PARKING_USER, devices=(device_id,))
    (user,) = users_in(folder, 1, 1)
    moved = suspended(suspender, attempt)
    assert (moved.is_done, moved.text, moved.parked_mb) == (True, "", SIZE_MB)
    wait_for(lambda: is_stopped(user), "a stopped program")
    assert card.states([user]) == ["running"], "the driver has neither locked nor moved it"
    assert resumed(suspender, attempt, SIZE_MB).is_done
    wait_for(lambda: "returned" in log_of(folder, 1), "its return")
    card.finish()
    assert outcomes(engine)[1].kind is OutcomeKind.SUCCEEDED
