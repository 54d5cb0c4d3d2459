"""Which devices a program sees, and how they are numbered in this process."""

from pathlib import Path

import pytest

from gpuyard import visible_devices as visibility
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.visible_devices import named_visible, process_numbers, visible_devices, visible_variables

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
             "ZE_AFFINITY_MASK")  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables_and_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    visibility._driver_order.cache_clear()
    monkeypatch.setattr(visibility, "_ASK_DRIVER", "raise SystemExit(1)")
    monkeypatch.setattr(visibility, "_TOPOLOGY", tmp_path / "nodes")


def device(vendor: Vendor, device_id: str, index: int | None = 0, **facts: str) -> Device:
    return Device(id=device_id, vendor=vendor, index=index, **facts)  # type: ignore[arg-type]


def machine(*devices: Device) -> Snapshot:
    return Snapshot(taken_at=None, host=Host(), devices=devices)


SIMULATED = machine(*(device(Vendor.SIMULATED, f"SIM-{index}", index) for index in range(3)))
NVIDIA = [device(Vendor.NVIDIA, f"GPU-{letter}{letter}", index) for index, letter in enumerate("abcd")]


def cuda(chosen: list[Device], snapshot: Snapshot, *, by_uuid: bool = False) -> str:
    variables = visible_variables(chosen, snapshot, by_uuid=by_uuid)
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert variables.keys() == {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    return variables["CUDA_VISIBLE_DEVICES"]


def test_a_cuda_program_sees_integers_in_the_order_of_its_lease() -> None:
    assert cuda([NVIDIA[3], NVIDIA[1]], machine(*NVIDIA)) == "3,1"
    # With by uuid whole cards are named by uuid.
    assert cuda([NVIDIA[3], NVIDIA[1]], machine(*NVIDIA), by_uuid=True) == "GPU-dd,GPU-bb"
    ill = device(Vendor.NVIDIA, "GPU-aa", 0, fault="GPU is lost")
    assert cuda([NVIDIA[2]], machine(ill, *NVIDIA[1:])) == "2", "an unhealthy card counts"
    assert cuda([NVIDIA[2]], machine(NVIDIA[0], NVIDIA[2])) == "1", "a card that this user may not open does not count"
    # A card that the driver no longer lists does not count.
    gone = device(Vendor.NVIDIA, "GPU-gone", 1, fault="nvml no longer lists it")
    assert [cuda([card], machine(*NVIDIA, gone)) for card in NVIDIA] == ["0", "1", "2", "3"]


def test_an_inherited_variable_does_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert cuda([NVIDIA[3]], machine(*NVIDIA)) == "3"


def test_mig_instances_are_named_by_uuid_and_their_card_comes_after_the_whole_cards() -> None:
    part = device(Vendor.NVIDIA, "MIG-11", 0, parent="GPU-aa")
    snapshot = machine(NVIDIA[0], part, *NVIDIA[1:])
    assert cuda([part], snapshot) == "MIG-11"
    assert cuda([NVIDIA[1]], snapshot) == "0"
    assert cuda([NVIDIA[1], part], snapshot) == "GPU-bb,MIG-11"


@pytest.mark.parametrize("device_id", ["0000:3b:00.0", "GPU-aa#1"])
@pytest.mark.parametrize("by_uuid", [False, True])
def test_a_device_without_an_nvidia_uuid_is_named_by_number(device_id: str, by_uuid: bool) -> None:
    odd = device(Vendor.NVIDIA, device_id, 4)
    assert cuda([odd], machine(*NVIDIA, odd), by_uuid=by_uuid) == "4"


def test_devices_of_other_vendors_have_variables_of_their_own() -> None:
    chosen = [device(Vendor.AMD, "GPU-11", 1), device(Vendor.AMD, "amd-3", 3)]
    assert visible_variables(chosen, machine(*chosen)) == {
        "ROCR_VISIBLE_DEVICES": "GPU-11,3",
        "HIP_VISIBLE_DEVICES": "0,1",
    }
    card = device(Vendor.INTEL, "0000:03:00.0", 1)
    assert visible_variables([card], machine(card)) == {"ZE_AFFINITY_MASK": "1"}, "an Intel device is named by number"
    # A program without devices sees none.
    assert visible_variables([], SIMULATED) == {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize(("index", "named"), [(2, "2"), (None, "1")])
def test_a_card_without_a_rocm_id_is_named_by_number_never_by_pci_address(index: int | None, named: str) -> None:
    first = device(Vendor.AMD, "GPU-11", 0)
    nameless = device(Vendor.AMD, "0000:43:00.0", index, pci_bus_id="0000:43:00.0")
    assert visible_variables([nameless], machine(first, nameless)) == {
        "ROCR_VISIBLE_DEVICES": named,
        "HIP_VISIBLE_DEVICES": "0",
    }


def write_node(folder: Path, number: int, gpu_id: int | None, location: int = 0) -> None:
    (folder / str(number)).mkdir(parents=True)
    if gpu_id is not None:
        (folder / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    (folder / str(number) / "properties").write_text(f"simd_count 256\nlocation_id {location}\ndomain 0\n")


def test_the_number_is_the_position_in_the_kernels_topology(tmp_path: Path) -> None:
    """The order of tools differs. Node 0 is a CPU, node 2 a GPU that this user may not use."""
    nodes = tmp_path / "nodes"
    write_node(nodes, 0, 0)
    write_node(nodes, 1, 61, 0x4300)
    write_node(nodes, 2, None, 0x0300)
    write_node(nodes, 10, 63, 0x2300)
    cards = [
        device(Vendor.AMD, bus, index, pci_bus_id=bus) for index, bus in enumerate(["0000:23:00.0", "0000:43:00.0"])
    ]
    shown = [visible_variables([card], machine(*cards))["ROCR_VISIBLE_DEVICES"] for card in cards]
    assert shown == ["1", "0"]


@pytest.mark.parametrize(("rocr", "hip", "numbers"), [
    (None, None, {"GPU-11": 0, "GPU-22": 1, "amd-2": 2}),
    ("2,GPU-11", None, {"amd-2": 0, "GPU-11": 1}),
    ("2,GPU-11", "1", {"GPU-11": 0}),
    (None, "2", {"amd-2": 0}),
    ("1", "1", {}),
])  # fmt: skip
def test_hip_numbers_only_the_devices_that_rocr_left_visible(
    rocr: str | None, hip: str | None, numbers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ROCR_VISIBLE_DEVICES", rocr), ("HIP_VISIBLE_DEVICES", hip)):
        if value is not None:
            monkeypatch.setenv(name, value)
    snapshot = machine(*(device(Vendor.AMD, each, index) for index, each in enumerate(["GPU-11", "GPU-22", "amd-2"])))
    assert process_numbers(snapshot) == numbers
    assert {each.id for each in visible_devices(snapshot)} == set(numbers)


@pytest.mark.parametrize(("place", "shown"), [
    (0, {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    (1, {"ROCR_VISIBLE_DEVICES": "GPU-11", "HIP_VISIBLE_DEVICES": "0", "GPU_DEVICE_ORDINAL": "0"}),
    (2, {"ZE_AFFINITY_MASK": "0"}),
    (None, {}),
])  # fmt: skip
def test_other_vendors_are_hidden(place: int | None, shown: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [device(Vendor.NVIDIA, "GPU-aa"), device(Vendor.AMD, "GPU-11"), device(Vendor.INTEL, "0000:03:00.0")]
    chosen = [] if place is None else [cards[place]]
    variables = visible_variables(chosen, machine(*cards))
    hidden = {"CUDA_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1",
              "GPU_DEVICE_ORDINAL": "-1", "ZE_AFFINITY_MASK": "9999"}  # fmt: skip
    assert variables == {**hidden, **shown}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert visible_devices(machine(*cards)) == chosen


@pytest.mark.parametrize(("visible", "numbers"), [
    (None, {"SIM-0": 0, "SIM-1": 1, "SIM-2": 2}),
    ("", {}),
    ("-1", {}),
    ("2,0", {"SIM-2": 0, "SIM-0": 1}),
    ("SIM-1", {"SIM-1": 0}),
    (" 1 , SIM-0 ", {"SIM-1": 0, "SIM-0": 1}),
    ("1,9,0", {"SIM-1": 0}),
])  # fmt: skip
def test_devices_have_the_numbers_that_cuda_uses_in_this_process(
    visible: str | None, numbers: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert {each.id for each in named_visible(visible, SIMULATED)} == set(numbers)
    assert process_numbers(SIMULATED) == numbers
    assert {each.id for each in visible_devices(SIMULATED)} == set(numbers)


def test_integers_count_as_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = machine(device(Vendor.NVIDIA, "GPU-aa", 0, fault="GPU is lost"), *NVIDIA[1:])
    assert [each.id for each in named_visible("2", snapshot)] == ["GPU-cc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [each.id for each in visible_devices(snapshot)] == ["GPU-cc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    visibility._driver_order.cache_clear()
    monkeypatch.setattr(visibility, "_ASK_DRIVER", "print('cc'); print('aa')")
    assert process_numbers(machine(*NVIDIA)) == {"GPU-cc": 0, "GPU-aa": 1}, "the numbers of the driver take precedence"


def test_cuda_variables_neither_number_nor_hide_devices_of_other_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    radeon = device(Vendor.AMD, "GPU-11")
    assert visible_devices(machine(radeon, *SIMULATED.devices)) == [radeon, SIMULATED.devices[0]]
