"""`rocm-smi -a` as text: a line per figure, and a table of processes."""

import pytest

from gpuyard.core.snapshot import Device, Process, Vendor
from gpuyard.errors import ProbeGarbled
from gpuyard.probes.amd import rocm_smi
from tests.unit.probes.samples_rocm import ROCM_SMI_LINES, ROCM_SMI_LINES_PROCESSES


def test_each_line_is_a_figure_of_its_card() -> None:
    first, second = rocm_smi.parse(ROCM_SMI_LINES).devices
    assert first == Device(
        id="GPU-01a2b3c4d5e6f708",
        vendor=Vendor.AMD,
        index=0,
        name="Navi 00 [Example]",
        pci_bus_id="0000:0b:00.0",
        memory_total_mb=16368.0,
        memory_used_mb=1.0,
        memory_free_mb=16367.0,
        utilization_percent=7.0,
        power_draw_w=31.5,
        power_limit_w=264.0,
        temperature_c=40.0,
        processes=(),
    )
    assert second == Device(
        id="0000:2f:00.0",
        vendor=Vendor.AMD,
        index=1,
        name="Example Accelerator",
        pci_bus_id="0000:2f:00.0",
        utilization_percent=0.0,
        power_limit_w=560.0,
        temperature_c=51.0,
        processes=(),
    )


def test_the_process_table_is_parsed_for_a_single_card() -> None:
    (card,) = rocm_smi.parse(ROCM_SMI_LINES_PROCESSES).devices
    assert card.processes == (Process(pid=1168514, memory_mb=1024.0, name="my main thread"),)


def test_the_table_of_an_older_release_has_fewer_columns() -> None:
    text = ROCM_SMI_LINES_PROCESSES.replace("\tCU OCCUPANCY", "").replace("\tUNKNOWN", "").expandtabs(1)
    (card,) = rocm_smi.parse(text).devices
    assert card.processes == (Process(pid=1168514, memory_mb=1024.0, name="my main thread"),)


def test_with_two_cards_the_processes_are_unknown() -> None:
    devices = rocm_smi.parse(f"GPU[1] : GPU use (%): 5\n{ROCM_SMI_LINES_PROCESSES}").devices
    assert [device.processes for device in devices] == [None, None]


def test_the_oldest_releases_have_one_temperature_and_units_after_values() -> None:
    (card,) = rocm_smi.parse("GPU[0] \t\t: Temperature: 78.0c\nGPU[0] \t\t: GPU use: 3%\n").devices
    assert (card.temperature_c, card.utilization_percent) == (78.0, 3.0)


@pytest.mark.parametrize(
    "text",
    [
        "GPU[0]\t\t: get_power_cap, Not supported on the given system\n",
        "GPU[0]\t\t: Voltage (mV): 718\n",
        "ERROR: GPU[0]\t\t: Temperature (Sensor edge) (C): 40.0 is odd\n",
    ],
)
def test_lines_without_a_known_figure_are_refused(text: str) -> None:
    with pytest.raises(ProbeGarbled):
        rocm_smi.parse(text)
