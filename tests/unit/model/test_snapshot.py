"""Needs survive the JSON of tickets and of the queue's database."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.lease import FixedMemory, MemoryNeed, Need, PartOfDevice, UncertainMemory, UnknownMemory, WholeDevice
from gpuyard.model.machine_snapshot import Device, Host, Problem, Snapshot, Vendor, find_new_problems, snapshot_as_dict

CARD = Device(id="GPU-a", vendor=Vendor.NVIDIA, index=0)


def snapshot(*devices: Device, problems: tuple[Problem, ...] = ()) -> Snapshot:
    return Snapshot(taken_at=1763176632.5, host=Host(name="box"), devices=devices, problems=problems)


def test_which_devices_are_usable_and_which_problems_new() -> None:
    ill = Device(id="GPU-b", vendor=Vendor.NVIDIA, fault="GPU is lost")
    assert snapshot(CARD, ill).usable_devices() == (CARD,), "work is placed on healthy devices only"
    part = Device(id="MIG-1", vendor=Vendor.NVIDIA, parent="GPU-a")
    assert snapshot(CARD, part).usable_devices() == (part,), "a card that is split is used through its parts"
    assert snapshot(CARD).device("GPU-a") == CARD
    assert snapshot(CARD).device("GPU-x") is None, "a device is found by its id"
    old = Problem(source="nvml", kind="timeout", message="no answer")
    new = Problem(source="nvml", kind="crashed", message="ended")
    assert find_new_problems((), (old,)) == (old,)
    assert find_new_problems((old,), (old, new)) == (new,), "a problem is news once"


def test_the_json_shape_is_the_documented_one() -> None:
    problem = Problem(source="amd-smi", kind="denied", message="no", hint="as root", vendor=Vendor.AMD)
    shape = snapshot_as_dict(snapshot(CARD, problems=(problem,)))
    assert shape["taken_at"] == "2025-11-15T03:17:12.500Z"
    assert shape["host"]["name"] == "box"
    assert shape["host"]["cpu_percent"] is None
    assert shape["devices"] == [
        {
            "id": "GPU-a", "index": 0, "vendor": "nvidia", "name": None, "parent": None, "pci_bus_id": None,
            "memory_total_mb": None, "memory_used_mb": None, "memory_used_at_least_mb": None,
            "memory_free_mb": None, "utilization_percent": None, "power_draw_w": None, "power_limit_w": None,
            "energy_j": None, "temperature_c": None, "processes": None, "fault": None, "is_integrated": False,
            "health": None, "healthy": True, "label": "0",
        }
    ]  # fmt: skip
    assert shape["problems"] == [
        {"source": "amd-smi", "kind": "denied", "message": "no", "hint": "as root", "vendor": "amd"}
    ]


sizes = st.floats(0.0, 1e6)
memory_needs = st.one_of(
    st.builds(FixedMemory, sizes),
    st.builds(UncertainMemory, sizes, sizes, sizes),
    st.builds(PartOfDevice, st.floats(0.01, 1.0)),
    st.builds(WholeDevice, st.none() | sizes),
    st.just(UnknownMemory()),
)


@given(st.builds(Need, devices=st.integers(0, 8), memory=memory_needs))
def test_a_need_is_read_back_as_written(need: Need) -> None:
    assert msgspec.json.decode(msgspec.json.encode(need), type=Need) == need
    assert msgspec.convert(msgspec.to_builtins(need), Need) == need


@pytest.mark.parametrize(
    ("memory", "is_exclusive", "required_mb"),
    [
        (FixedMemory(8.0), False, 8.0), (UncertainMemory(8.0, 4.0, 3.0), False, 8.0),
        (PartOfDevice(0.5), False, None), (WholeDevice(), True, None), (WholeDevice(8.0), True, 8.0),
        (UnknownMemory(), True, None),
    ],
)  # fmt: skip
def test_each_kind_says_how_much_must_be_free(
    memory: MemoryNeed, is_exclusive: bool, required_mb: float | None
) -> None:
    need = Need(memory=memory)
    assert (need.is_exclusive, need.required_mb) == (is_exclusive, required_mb)
