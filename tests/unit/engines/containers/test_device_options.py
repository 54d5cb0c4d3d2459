"""Exactly the devices of a job are mapped into its container."""

from pathlib import Path

import pytest

from gpuyard.engines import containers as module
from gpuyard.engines.containers import device_options
from gpuyard.errors import UserError
from gpuyard.model.machine_snapshot import Device, Vendor

NVIDIA = [Device(id="GPU-aa", vendor=Vendor.NVIDIA, index=2), Device(id="GPU-bb", vendor=Vendor.NVIDIA, index=0)]
MIG = Device(id="MIG-cc", vendor=Vendor.NVIDIA, index=0, parent="GPU-bb")
AMD = Device(id="GPU-dd", vendor=Vendor.AMD, index=0, pci_bus_id="0000:03:00.0")
INTEL = Device(id="intel-ee", vendor=Vendor.INTEL, index=0, pci_bus_id="0000:04:00.0")
SIMULATED = Device(id="SIM-0", vendor=Vendor.SIMULATED, index=0)
IMITATED = Device(id="SIM-nvidia-0", vendor=Vendor.NVIDIA, index=0)
NOTHING = ("--env", "NVIDIA_VISIBLE_DEVICES=void")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without CDI, with an AMD and an Intel card."""
    monkeypatch.setattr(module, "_CDI_FOLDERS", (tmp_path / "cdi", tmp_path / "run"))
    monkeypatch.setattr(module, "_PCI_DEVICES", tmp_path / "pci")
    for bus_id, names in (("0000:03:00.0", ("card0", "renderD128")), ("0000:04:00.0", ("renderD129", "card1"))):
        for name in names:
            (tmp_path / "pci" / bus_id / "drm" / name).mkdir(parents=True)
    (tmp_path / "cdi").mkdir()
    return tmp_path


def test_podman_is_given_the_cdi_names_that_the_machine_has(machine: Path) -> None:
    spec = machine / "cdi" / "nvidia.yaml"
    spec.write_text("kind: nvidia.com/gpu\ndevices:\n- name: GPU-aa\n- name: \"0\"\n- name: '2'\n- name: all\n")
    assert device_options("podman", NVIDIA) == (
        *NOTHING, "--device", "nvidia.com/gpu=GPU-aa", "--device", "nvidia.com/gpu=0",
    )  # fmt: skip
    spec.write_text('{"kind": "nvidia.com/gpu", "devices": [{"name": "MIG-cc"}]}')
    assert device_options("podman", [MIG]) == (*NOTHING, "--device", "nvidia.com/gpu=MIG-cc")
    (machine / "cdi" / "other.yaml").write_text("kind: vendor.com/net\ndevices:\n- name: GPU-aa\n")
    with pytest.raises(UserError, match="GPU-aa") as error:
        device_options("podman", NVIDIA)
    assert "nvidia-ctk cdi generate" in str(error.value.hint)


def test_a_part_of_a_card_is_never_named_by_the_index_of_its_card(machine: Path) -> None:
    (machine / "cdi" / "nvidia.yaml").write_text('kind: nvidia.com/gpu\ndevices:\n- name: "0"\n')
    with pytest.raises(UserError, match="MIG-cc"):
        device_options("podman", [MIG])


@pytest.mark.parametrize("tool", ["podman", "docker"])
def test_amd_and_intel_cards_are_device_files(tool: str) -> None:
    assert device_options(tool, [AMD]) == (
        *NOTHING, "--device", "/dev/kfd", "--device", "/dev/dri/renderD128",
    )  # fmt: skip
    assert device_options(tool, [INTEL]) == (*NOTHING, "--device", "/dev/dri/renderD129")


def test_a_card_without_device_files_is_an_error(machine: Path) -> None:
    with pytest.raises(UserError, match="device files of the GPU GPU-dd"):
        device_options("podman", [Device(id="GPU-dd", vendor=Vendor.AMD, pci_bus_id="0000:09:00.0")])


@pytest.mark.parametrize("tool", ["podman", "docker"])
@pytest.mark.parametrize("devices", [[], [SIMULATED], [IMITATED]], ids=["none", "simulated", "imitated"])
def test_a_job_without_real_devices_gets_none_even_if_the_image_asks_for_all(tool: str, devices: list[Device]) -> None:
    assert device_options(tool, devices) == NOTHING


def test_apptainer_maps_the_devices_of_a_vendor_and_docker_is_given_uuids() -> None:
    assert device_options("apptainer", NVIDIA) == ("--nv",)
    assert device_options("apptainer", [AMD]) == ("--rocm",)
    assert device_options("apptainer", [SIMULATED]) == ()
    assert device_options("docker", NVIDIA) == ("--gpus", '"device=GPU-aa,GPU-bb"')
