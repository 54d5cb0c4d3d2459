"""Attempts that cannot be suspended: the reason is known before anything is tried."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.model.job import Attempt, Started
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.scripting.park_tensors import ParkListener
from gpuyard.system.parking_protocol import path_of
from tests.fakes.cuda import build_fake_cuda
from tests.integration.queue_fixture import until
from tests.integration.suspend_fixture import next_result

CARD = Device(id="GPU-1", vendor=Vendor.NVIDIA)
PART = Device(id="MIG-1", vendor=Vendor.NVIDIA, parent="GPU-1")
OTHERS = [Device(id=f"{vendor}-1", vendor=vendor) for vendor in (Vendor.AMD, Vendor.INTEL, Vendor.APPLE)]


@pytest.fixture
def suspender(tmp_path: Path) -> Iterator[LocalSuspender]:
    suspender = LocalSuspender(tmp_path / "suspending", str(tmp_path))
    yield suspender
    suspender.close()


def attempt_on(*devices: Device) -> Attempt:
    ids = tuple(device.id for device in devices)
    return Attempt(job_id=1, number=1, phase=Started(at=0.0, keeper_pid=1), boot_id=None, devices=ids)


def refusal(suspender: LocalSuspender, *devices: Device, visible: tuple[Device, ...] | None = None) -> str | None:
    """Ask repeatedly until the driver has answered (the call does not block), and return the reason."""
    snapshot = Snapshot(taken_at=0.0, host=Host(), devices=devices if visible is None else visible)
    reasons: list[str | None] = []

    def has_answered() -> bool:
        reasons.append(suspender.refusal(attempt_on(*devices), snapshot))
        return reasons[-1] != "the NVIDIA driver does not answer"

    until(has_answered, "the driver's answer")
    return reasons[-1]


def use_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, old_driver: bool = False) -> None:
    build_fake_cuda(folder, old_driver)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


@pytest.mark.needs("cc")
def test_an_nvidia_card_with_a_recent_driver_can_be_suspended(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(tmp_path, monkeypatch)
    assert refusal(suspender, CARD) is None


@pytest.mark.needs("cc")
def test_an_old_driver_prevents_suspending_and_is_asked_once(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(tmp_path, monkeypatch, old_driver=True)
    assert "570" in str(refusal(suspender, CARD))
    use_driver(tmp_path, monkeypatch)
    assert "570" in str(refusal(suspender, CARD))


def test_a_missing_driver_library_is_the_reason(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("this is no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "libcuda.so.1" in str(refusal(suspender, CARD))


@pytest.mark.parametrize("device", OTHERS, ids=lambda device: device.vendor)
def test_devices_of_other_vendors_cannot_be_suspended(suspender: LocalSuspender, device: Device) -> None:
    assert "no NVIDIA device" in str(refusal(suspender, device))


def test_a_mig_instance_cannot_be_suspended(suspender: LocalSuspender) -> None:
    assert "MIG" in str(refusal(suspender, PART, visible=(CARD, PART)))


@pytest.mark.parametrize("device", [OTHERS[0], PART], ids=["amd", "mig"])
def test_where_the_driver_cannot_suspend_a_program_that_parks_its_memory_can_be(
    suspender: LocalSuspender, device: Device, tmp_path: Path
) -> None:
    assert str(refusal(suspender, device)).endswith("park its memory itself, with gpuyard.torch.parkable")
    listener = ParkListener(path_of(str(tmp_path), "1.1", os.getpid(), 1), lambda: 1, lambda: None)
    assert refusal(suspender, device) is None
    assert refusal(suspender, device, visible=()) == f"{device.id} is not visible now"
    listener.close()
    assert refusal(suspender, device) is not None


def test_a_job_without_devices_cannot_be_suspended(suspender: LocalSuspender) -> None:
    assert refusal(suspender) == "it uses no device"


@pytest.mark.needs("cc")
def test_one_unsuitable_device_prevents_suspending(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(tmp_path, monkeypatch)
    assert "no NVIDIA device" in str(refusal(suspender, CARD, OTHERS[0]))


def test_a_helper_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    suspender = LocalSuspender(tmp_path / "file" / "suspending", str(tmp_path))
    suspender.suspend(attempt_on(CARD))
    moved = next_result(suspender)
    assert (moved.job_id, moved.is_done, moved.is_ruined) == (1, False, False)
    assert "no process can be started" in moved.text
    suspender.close()


def test_a_driver_that_disappeared_is_reported(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("this is no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    suspender.suspend(attempt_on(CARD))
    moved = next_result(suspender)
    assert not moved.is_done
    assert "libcuda.so.1 cannot be loaded" in moved.text
