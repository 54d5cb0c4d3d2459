"""What a program sees of the devices, and how CUDA counts them in this process."""

import pytest

from gpuyard.core.model import Device, Vendor
from gpuyard.visibility import cuda_numbers, visible_devices, visible_variables

SIMULATED = [Device(id=f"SIM-{index}", vendor=Vendor.SIMULATED, index=index) for index in range(3)]
IDS = [device.id for device in SIMULATED]


def device(vendor: Vendor, device_id: str, index: int | None = 0) -> Device:
    return Device(id=device_id, vendor=vendor, index=index)


def test_a_cuda_program_sees_its_devices_by_their_ids_whatever_their_order() -> None:
    chosen = [device(Vendor.NVIDIA, "GPU-aa", 3), device(Vendor.NVIDIA, "MIG-bb", None)]
    assert visible_variables(chosen) == {"CUDA_VISIBLE_DEVICES": "GPU-aa,MIG-bb", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize("device_id", ["0000:3b:00.0", "GPU-aa#1"])
def test_an_id_that_is_not_the_vendors_own_goes_by_number(device_id: str) -> None:
    assert visible_variables([device(Vendor.NVIDIA, device_id, 2)])["CUDA_VISIBLE_DEVICES"] == "2"
    assert visible_variables([device(Vendor.AMD, device_id, 2)])["ROCR_VISIBLE_DEVICES"] == "2"


def test_a_rocm_program_sees_its_devices_whatever_hip_was_told_before() -> None:
    chosen = [device(Vendor.AMD, "GPU-11", 1), device(Vendor.AMD, "amd-3", 3)]
    assert visible_variables(chosen) == {"ROCR_VISIBLE_DEVICES": "GPU-11,3", "HIP_VISIBLE_DEVICES": "0,1"}


def test_an_intel_device_goes_by_its_number() -> None:
    assert visible_variables([device(Vendor.INTEL, "0000:03:00.0", 1)]) == {"ZE_AFFINITY_MASK": "1"}


def test_devices_of_two_vendors_are_each_shown_in_their_vendors_way() -> None:
    variables = visible_variables([device(Vendor.NVIDIA, "GPU-aa"), device(Vendor.AMD, "GPU-11")])
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["ROCR_VISIBLE_DEVICES"]) == ("GPU-aa", "GPU-11")


def test_a_program_without_devices_sees_none() -> None:
    assert visible_variables([]) == {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(("visible", "numbers"), [
    (None, [0, 1, 2]),
    ("", [None, None, None]),
    ("-1", [None, None, None]),
    ("2,0", [1, None, 0]),
    ("SIM-1", [None, 0, None]),
    (" 1 , SIM-0 ", [1, 0, None]),
    ("1,9,0", [None, 0, None]),
])  # fmt: skip
def test_numbers_are_those_that_cuda_gives_in_this_process(
    visible: str | None, numbers: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_numbers(IDS, SIMULATED) == numbers
    seen = [one.id for one, number in zip(SIMULATED, numbers, strict=True) if number is not None]
    assert [one.id for one in visible_devices(SIMULATED)] == seen


def test_cuda_neither_counts_nor_hides_devices_that_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    radeon = device(Vendor.AMD, "GPU-11")
    assert visible_devices([radeon, *SIMULATED]) == [radeon, SIMULATED[0]]
