"""Which devices a request may get on a machine with several vendors, and the names by which users choose them."""

import pytest
from msgspec.structs import replace

from gpuyard.errors import UserError
from gpuyard.model.job_spec import place_of
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.policy.device_names import banned_ids, check_possible, choose_vendor, find_devices

GB = 1024.0


def card(vendor: Vendor, index: int, size_gb: float | None = 24, *, is_integrated: bool = False) -> Device:
    total = None if size_gb is None else size_gb * GB
    device_id = f"{vendor}-card-{index}"
    return Device(id=device_id, vendor=vendor, index=index, memory_total_mb=total, is_integrated=is_integrated)


def machine(*devices: Device) -> Snapshot:
    return Snapshot(taken_at=0.0, host=Host(), devices=devices)


GREEN = card(Vendor.NVIDIA, 0)
RED = card(Vendor.AMD, 0, 16)
GRAPHICS = card(Vendor.AMD, 1, 64, is_integrated=True)
XE = card(Vendor.INTEL, 0, None, is_integrated=True)
DESKTOP = machine(GREEN, RED, GRAPHICS)


def chosen(
    need: Need, snapshot: Snapshot, *, preferred: Vendor | None = None, among: tuple[Device, ...] | None = None
) -> list[str]:
    candidates = snapshot.usable_devices() if among is None else among
    _, found = choose_vendor(need, candidates, snapshot, preferred=preferred, names_devices=among is not None)
    return [snapshot.labels[device.id] for device in found]


@pytest.mark.parametrize(("snapshot", "need", "preferred", "labels"), [
    (DESKTOP, Need(), None, ["nvidia:0"]),
    (machine(card(Vendor.NVIDIA, 0, 8), RED, GRAPHICS), Need(), None, ["amd:0"]),
    (DESKTOP, Need(vendor=Vendor.AMD), None, ["amd:0"]),
    (DESKTOP, Need(), Vendor.AMD, ["amd:0"]),
    (DESKTOP, Need(vendor=Vendor.NVIDIA), Vendor.AMD, ["nvidia:0"]),
    (DESKTOP, Need(vendor=Vendor.INTEL), None, []),
    (DESKTOP, Need(), Vendor.INTEL, []),
    (machine(GREEN, XE), Need(), None, ["nvidia:0"]),
    (machine(GREEN, XE), Need(vendor=Vendor.INTEL), None, ["intel:0"]),
    (machine(GREEN, XE), Need(), Vendor.INTEL, ["intel:0"]),
    # A fault of the largest card neither moves jobs to another vendor nor to the processor's graphics.
    (machine(replace(GREEN, fault="it is lost"), RED, GRAPHICS), Need(), None, []),
    # One vendor: its cards, else what there is.
    (machine(RED, GRAPHICS), Need(), None, ["0"]),
    (machine(XE), Need(), None, ["0"]),
    (machine(GREEN, card(Vendor.NVIDIA, 1, None)), Need(), None, ["0", "1"]),
])  # fmt: skip
def test_a_request_gets_one_vendor(snapshot: Snapshot, need: Need, preferred: Vendor | None, labels: list[str]) -> None:
    assert chosen(need, snapshot, preferred=preferred) == labels


def test_devices_that_are_named_may_be_integrated_and_are_of_one_vendor() -> None:
    assert chosen(Need(), DESKTOP, among=(GRAPHICS,)) == ["amd:1"]
    assert chosen(Need(), DESKTOP, preferred=Vendor.NVIDIA, among=(RED, GRAPHICS)) == ["amd:0", "amd:1"]
    with pytest.raises(UserError, match="nvidia:0, amd:0 are GPUs of 2 vendors"):
        chosen(Need(), DESKTOP, among=(GREEN, RED))


@pytest.mark.parametrize("snapshot", [machine(GREEN), machine(XE), machine(GREEN, card(Vendor.NVIDIA, 1, 80))])
def test_on_a_machine_with_one_vendor_a_need_stays_as_it_is(snapshot: Snapshot) -> None:
    for need in (Need(), Need(vendor=Vendor.NVIDIA), Need(model="H200")):
        for preferred in (None, snapshot.devices[0].vendor):
            assert choose_vendor(need, snapshot.usable_devices(), snapshot, preferred=preferred)[0] == need


def test_only_a_configured_and_allowed_vendor_is_the_default() -> None:
    need, found = choose_vendor(Need(), [GREEN], machine(GREEN), preferred=Vendor.AMD)
    with pytest.raises(UserError, match=r"(?m)1 amd GPU needed, but only 0 can be used$"):
        check_possible(need, found, machine(GREEN))
    need, found = choose_vendor(Need(banned=(GREEN.id,)), [RED, GRAPHICS], DESKTOP)
    assert (need.vendor, need.only_discrete, found) == (Vendor.AMD, True, [RED]), "a banned vendor is not the default"


def test_an_impossible_request_names_the_devices_of_each_vendor() -> None:
    need, found = choose_vendor(Need(devices=3), DESKTOP.usable_devices(), DESKTOP)
    counts = r"this machine has 1 amd, 1 amd \(integrated\), 1 nvidia"
    with pytest.raises(UserError, match=f"3 nvidia GPUs needed, but only 1 can be used; {counts}"):
        check_possible(need, found, DESKTOP)
    large = Need(vendor=Vendor.AMD, memory=FixedMemory(20 * GB))
    with pytest.raises(UserError, match=f"no amd GPU has 20 GB; the largest has 16 GB; {counts}"):
        check_possible(large, [RED], DESKTOP)
    with pytest.raises(UserError, match=r"(?m)^2 GPUs needed, but only 1 can be used$"):
        check_possible(Need(devices=2), [GREEN], machine(GREEN))


def test_an_index_of_several_vendors_is_refused_unless_the_vendor_is_known() -> None:
    assert find_devices(["nvidia:0", "amd:1", 1], DESKTOP) == (GREEN.id, GRAPHICS.id, GRAPHICS.id)
    assert find_devices([0], DESKTOP, Vendor.AMD) == (RED.id,)
    assert find_devices(["0"], machine(GREEN)) == (GREEN.id,)
    with pytest.raises(UserError, match="'0' is a GPU of 2 vendors") as refused:
        find_devices(["0"], DESKTOP)
    assert refused.value.hint == "write nvidia:0 or amd:0"
    with pytest.raises(UserError, match="there is no GPU 'intel:0'") as refused:
        find_devices(["intel:0"], DESKTOP)
    assert refused.value.hint is not None
    assert "amd:1 (amd-card-1)" in refused.value.hint
    assert banned_ids(["amd:0"], [], DESKTOP) == (RED.id,), "a ban by label is for one vendor and one by index for each"
    assert banned_ids([0], [], DESKTOP) == (GREEN.id, RED.id)


@pytest.mark.parametrize(("labels", "place"), [
    ([], "cpu"),
    (["0"], "gpu0"),
    (["0", "3"], "gpu0_3"),
    ([None], "gpux"),
    (["0:1"], "gpu0-1"),
    (["amd:0", "amd:1"], "gpu-amd-0_amd-1"),
])  # fmt: skip
def test_the_place_of_a_task_is_a_valid_part_of_a_tmux_session_name(labels: list[str | None], place: str) -> None:
    assert place_of(labels) == place
