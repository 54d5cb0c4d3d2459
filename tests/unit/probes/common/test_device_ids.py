import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.machine_snapshot import Device, Vendor
from gpuyard.probes.devices_and_processes import pci_bus_id, with_distinct_ids, without_number

ids = st.lists(st.sampled_from(["a", "b", "a#0", "a#1", "b#1"]), max_size=12)


def devices_called(names: list[str]) -> list[Device]:
    return [Device(id=name, vendor=Vendor.AMD, index=place) for place, name in enumerate(names)]


@given(ids)
def test_every_device_gets_a_unique_id_and_none_is_lost(names: list[str]) -> None:
    devices = with_distinct_ids(devices_called(names))
    assert len({device.id for device in devices}) == len(names)
    assert [device.index for device in devices] == list(range(len(names)))


def test_devices_with_the_same_id_are_numbered_in_order_including_the_first() -> None:
    distinct = with_distinct_ids(devices_called(["a", "b", "a", "a"]))
    assert [device.id for device in distinct] == ["a#0", "b", "a#1", "a#2"]
    assert [without_number(device.id) for device in distinct] == ["a", "b", "a", "a"]
    device = Device(id="a", vendor=Vendor.AMD)
    assert with_distinct_ids([device]) == (device,)


@pytest.mark.parametrize("raw", ["0000:3b:00.0", "00000000:3B:00.0", "3B:00.0", " 0000:3b:00.0 "])
def test_all_spellings_of_a_bus_id_are_normalised(raw: str) -> None:
    assert pci_bus_id(raw) == "0000:3b:00.0"


def test_a_domain_other_than_zero_is_kept() -> None:
    assert pci_bus_id("00010001:0A:00.0") == "10001:0a:00.0"


@pytest.mark.parametrize("raw", ["", "N/A", "3B", "0000:3b:00.9", None, 5])
def test_an_invalid_bus_id_is_unknown(raw: object) -> None:
    assert pci_bus_id(raw) is None
