"""Where an attempt cannot be suspended, and whether that is told before anything is tried."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuyard.core.job.job import Attempt
from gpuyard.core.snapshot import Device, Host, Snapshot, Vendor
from gpuyard.engines.suspend.suspender import LocalSuspender
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
    return Attempt(job_id=1, number=1, keeper_pid=1, boot_id=None, started_at=0.0, devices=ids)


def refusal(suspender: LocalSuspender, *devices: Device, seen: tuple[Device, ...] | None = None) -> str | None:
    """Once the driver has answered, which is not waited for."""
    snapshot = Snapshot(taken_at=0.0, host=Host(), devices=devices if seen is None else seen)
    said: list[str | None] = []

    def has_answered() -> bool:
        said.append(suspender.refusal(attempt_on(*devices), snapshot))
        return said[-1] != "the NVIDIA driver does not answer"

    until(has_answered, "the driver's answer")
    return said[-1]


def use_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, old_driver: bool = False) -> None:
    build_fake_cuda(folder, old_driver)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))


@pytest.mark.needs("cc")
def test_an_nvidia_card_with_a_driver_that_can_is_no_hindrance(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(tmp_path, monkeypatch)
    assert refusal(suspender, CARD) is None


@pytest.mark.needs("cc")
def test_an_old_driver_is_a_hindrance_and_is_asked_once(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(tmp_path, monkeypatch, old_driver=True)
    assert "570" in str(refusal(suspender, CARD))
    use_driver(tmp_path, monkeypatch)
    assert "570" in str(refusal(suspender, CARD))


def test_a_machine_without_the_library_says_so(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("this is no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert "libcuda.so.1" in str(refusal(suspender, CARD))


@pytest.mark.parametrize("device", OTHERS, ids=lambda device: device.vendor)
def test_another_vendors_device_is_a_hindrance(suspender: LocalSuspender, device: Device) -> None:
    assert "no NVIDIA device" in str(refusal(suspender, device))


def test_a_part_of_a_card_is_a_hindrance(suspender: LocalSuspender) -> None:
    assert "MIG" in str(refusal(suspender, PART, seen=(CARD, PART)))


def test_a_device_that_is_not_seen_is_a_hindrance(suspender: LocalSuspender) -> None:
    assert refusal(suspender, CARD, seen=()) == "GPU-1 is not visible now"


def test_a_job_without_devices_has_nothing_to_move(suspender: LocalSuspender) -> None:
    assert refusal(suspender) == "it uses no device"


def test_a_simulated_device_is_no_hindrance(suspender: LocalSuspender) -> None:
    assert refusal(suspender, Device(id="SIM-0", vendor=Vendor.SIMULATED)) is None


@pytest.mark.needs("cc")
def test_one_device_of_several_is_enough_of_a_hindrance(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_driver(tmp_path, monkeypatch)
    assert "no NVIDIA device" in str(refusal(suspender, CARD, OTHERS[0]))


def test_where_no_helper_can_be_started_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    suspender = LocalSuspender(tmp_path / "file" / "suspending", str(tmp_path))
    suspender.suspend(attempt_on(CARD))
    moved = next_result(suspender)
    assert (moved.job_id, moved.is_done, moved.is_ruined) == (1, False, False)
    assert "no process can be started" in moved.text
    suspender.close()


def test_a_driver_that_is_missing_by_now_is_told(
    suspender: LocalSuspender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").write_text("this is no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    suspender.suspend(attempt_on(CARD))
    moved = next_result(suspender)
    assert not moved.is_done
    assert "libcuda.so.1 cannot be loaded" in moved.text
