"""The box that `amd-smi` prints without arguments since ROCm 7."""

import pytest

from gpuyard.core.snapshot import Device, Process, Vendor
from gpuyard.probes.amd import amd_smi
from tests.unit.probes.samples_amd import AMD_SMI_BOX


def test_the_box_is_parsed() -> None:
    first, second = amd_smi.parse(AMD_SMI_BOX).devices
    assert first == Device(
        id="0000:2f:00.0",
        vendor=Vendor.AMD,
        index=0,
        name="Example Card X1 OAM",
        pci_bus_id="0000:2f:00.0",
        memory_total_mb=16368.0,
        memory_used_mb=512.0,
        memory_free_mb=15856.0,
        utilization_percent=97.0,
        power_draw_w=280.0,
        power_limit_w=327.0,
        temperature_c=93.0,
        processes=(Process(pid=15222, memory_mb=1536.0, name="my long name"), Process(pid=15223)),
    )
    assert second == Device(id="0000:c6:00.0", vendor=Vendor.AMD, index=1, pci_bus_id="0000:c6:00.0", processes=())


def test_power_without_a_cap_is_the_draw() -> None:
    device = amd_smi.parse(AMD_SMI_BOX.replace(" 280/327 W", "      14 W")).devices[0]
    assert (device.power_draw_w, device.power_limit_w) == (14.0, None)


def test_the_processes_of_a_box_are_unknown_if_their_list_is_cut_off() -> None:
    listed, idle = AMD_SMI_BOX[: AMD_SMI_BOX.index("|    0      15223")], AMD_SMI_BOX.index("|    0      15222")
    assert [device.processes for device in amd_smi.parse(listed).devices] == [None, None]
    none = f"{AMD_SMI_BOX[:idle]}|  No running processes found   |\n+-----+\n"
    assert [device.processes for device in amd_smi.parse(none).devices] == [(), ()]


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("...adeon AI PRO R9700S", "Radeon AI PRO R9700S"),
        ("...nstinct MI300A] (0)", "Instinct MI300A] (0)"),
        ("...Instinct MI300X OAM", "Instinct MI300X OAM"),
        ("...RO W7900 Dual Slots", "PRO W7900 Dual Slots"),
        ("...omething Else X1 OAM", "Else X1 OAM"),
        ("...X 7900 Something OAM", "X 7900 Something OAM"),
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X VF"),
        ("adeon X1", "adeon X1"),
    ],
)
def test_a_name_cut_at_its_beginning_is_completed_or_shortened_to_whole_words(printed: str, name: str) -> None:
    assert amd_smi.parse(AMD_SMI_BOX.replace("...Example Card X1 OAM", printed)).devices[0].name == name
