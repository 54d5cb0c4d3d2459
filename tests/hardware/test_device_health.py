"""On a machine with an NVIDIA card: what is known about its health agrees with `nvidia-smi -q`."""

import re
import shutil
import subprocess

import pytest

from gpuyard.model.machine_snapshot import HealthFigures, Throttle
from gpuyard.policy.device_health import device_issues
from gpuyard.probes.local_machine import local_machine
from gpuyard.probes.nvidia.nvidia_smi import NvidiaSmi
from gpuyard.probes.nvidia.nvml import Nvml

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

TEXTS = {
    Throttle.SW_THERMAL: "SW Thermal Slowdown",
    Throttle.HW_THERMAL: "HW Thermal Slowdown",
    Throttle.POWER_BRAKE: "HW Power Brake Slowdown",
    Throttle.HW_SLOWDOWN: "HW Slowdown",
}
_TRIES = 5


def printed(index: int) -> str:
    command = ["nvidia-smi", "-q", "-i", str(index)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def active(text: str) -> set[Throttle]:
    return {each for each, name in TEXTS.items() if re.search(rf"^\s+{name}\s+: Active$", text, re.MULTILINE)}


def uncorrected(text: str) -> int | None:
    """Return the sum of the uncorrectable errors since the driver was loaded, or None if ECC is off."""
    volatile = re.search(r"^\s+Volatile\n(.*?)^\s+Aggregate", text, re.MULTILINE | re.DOTALL)
    counts = re.findall(r"Uncorrectable[\w ]*\s+: (\d+)", volatile[1]) if volatile else []
    return sum(map(int, counts)) if counts else None


def test_throttle_reasons_and_ecc_errors_are_those_that_nvidia_smi_prints() -> None:
    for device in Nvml().read(10).devices:
        if device.parent is not None:
            continue
        assert device.health is not None
        assert device.index is not None
        text = printed(device.index)
        assert device.health.ecc_uncorrected == uncorrected(text)
        assert device.health.remap_pending in (None, bool(re.search(r"^\s+Pending\s+: Yes$", text, re.MULTILINE)))
        # Throttling may begin or end between the two readings.
        for _ in range(_TRIES):
            health = next(each.health for each in Nvml().read(10).devices if each.id == device.id)
            if health is not None and set(health.throttle or ()) == active(printed(device.index)):
                break
        else:
            pytest.fail(f"{device.id}: throttle reasons differ from those of nvidia-smi in {_TRIES} readings")


def test_nvml_and_the_xml_of_nvidia_smi_agree_on_health() -> None:
    by_nvml, by_smi = Nvml().read(10).devices, NvidiaSmi().read(30).devices
    for nvml, smi in zip(by_nvml, by_smi, strict=True):
        if nvml.parent is None:
            assert nvml.health is not None
            assert smi.health is not None
            figures = ("ecc_uncorrected", "remap_pending", "remap_failed", "link_width_max")
            assert [getattr(nvml.health, each) for each in figures] == [getattr(smi.health, each) for each in figures]


def test_a_healthy_card_has_no_issue_and_its_events_can_be_waited_for() -> None:
    probe = Nvml()
    probe.read(10)
    devices = probe.read(10).devices
    assert all((device.health or HealthFigures()).xids == () for device in devices)
    snapshot = local_machine().snapshot()
    faults = [issue.text for issues in device_issues(snapshot, ()).values() for issue in issues if issue.is_fault]
    assert faults == []
