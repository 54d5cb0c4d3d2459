"""`amd-smi`, `rocm-smi` and `radeontop`: parsing their outputs."""

import json
from collections.abc import Callable

import pytest

from gpuyard.errors import ProbeGarbled
from gpuyard.model.machine_snapshot import Device, Process, Reading, Vendor
from gpuyard.probes.amd import amd_smi, radeontop, rocm_smi
from tests.unit.probes.samples_amd import (
    AMD_SMI_LIST,
    AMD_SMI_LIST_DPX,
    AMD_SMI_METRIC,
    AMD_SMI_METRIC_BARE,
    AMD_SMI_PROCESS,
    AMD_SMI_STATIC,
    RADEONTOP,
    RADEONTOP_NO_VRAM,
    RADEONTOP_OLD,
)
from tests.unit.probes.samples_rocm import ROCM_SMI_JSON, ROCM_SMI_JSON_OLD, ROCM_SMI_JSON_TWO_DIES

PARSERS: dict[str, Callable[[str], Reading]] = {
    "amd-smi": amd_smi.parse,
    "rocm-smi": rocm_smi.parse,
    "radeontop": radeontop.parse,
}


def test_amd_smi_metric_gives_the_figures_of_every_release_and_leaves_the_rest_unknown() -> None:
    first, second = amd_smi.parse(AMD_SMI_METRIC).devices
    assert first == Device(
        id="amd-0", vendor=Vendor.AMD, index=0, memory_total_mb=65520.0, memory_used_mb=1024.0,
        memory_free_mb=64496.0, utilization_percent=37.0, power_draw_w=205.0, temperature_c=61.0,
    )  # fmt: skip
    assert second == Device(id="amd-1", vendor=Vendor.AMD, index=1, memory_total_mb=65520.0, temperature_c=33.0)
    (device,) = amd_smi.parse(AMD_SMI_METRIC_BARE).devices
    assert (device.utilization_percent, device.power_draw_w, device.temperature_c) == (12.0, 44.0, 41.0)
    assert (device.memory_total_mb, device.memory_used_mb, device.memory_free_mb) == (16368.0, 512.0, 15856.0)


def test_amd_smi_list_and_static_give_ids_names_and_limits() -> None:
    listed, static = amd_smi.parse(AMD_SMI_LIST).devices, amd_smi.parse(AMD_SMI_STATIC).devices
    assert [device.id for device in listed] == ["GPU-a1b2c3d4e5f60718", "0000:26:00.0"]
    assert [device.id for device in static] == ["GPU-a1b2c3d4e5f60718", "0000:26:00.0"]
    assert [device.name for device in static] == ["Instinct Example", "Board Example"]
    assert [device.power_limit_w for device in static] == [250.0, 300.0]


def test_partitions_of_one_card_are_separate_devices() -> None:
    devices = amd_smi.parse(AMD_SMI_LIST_DPX).devices
    assert [device.id for device in devices] == ["GPU-a1b2c3d4e5f60718#0", "GPU-a1b2c3d4e5f60718#1"]
    assert [device.pci_bus_id for device in devices] == ["0000:05:00.0", "0000:05:00.1"]
    assert {device.parent for device in devices} == {None}


def test_amd_smi_process_gives_vram_per_process_and_tells_idle_from_unknown() -> None:
    busy, idle = amd_smi.parse(AMD_SMI_PROCESS).devices
    assert busy.processes == (Process(pid=4321, memory_mb=2048.0, name="/usr/bin/python3"),)
    assert idle.processes == ()
    (unknown,) = amd_smi.parse('[{"gpu": 0, "process_list": [{"process_info": "N/A"}]}]').devices
    assert unknown.processes is None
    (device,) = amd_smi.parse('[{"gpu": 0, "process_info": [{"pid": 5, "name": "N/A", "mem_usage": 1048576}]}]').devices
    assert device.processes == (Process(pid=5, memory_mb=1.0),)
    (device,) = amd_smi.parse('[{"gpu": 0, "process_list": []}]').devices
    assert device.processes == ()


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("amd-smi", '[{"gpu": 0, "clock": {"gfx_0": {"clk": {"value": 132, "unit": "MHz"}}}}]'),
        ("amd-smi", '[{"gpu": 0, "usage": {"shaders_busy": 5}}, {"gpu": 1}]'),
        ("amd-smi", "GPU: 0\n    POWER:\n        SOCKET_POWER: 132 W\n"), ("amd-smi", "GPU  POWER\n  0   32 W\n"),
        ("rocm-smi", '{"card0": {"Voltage (mV)": "718"}}'), ("rocm-smi", '{"card0": {}, "card1": 5}'),
        ("rocm-smi", "device,GPU use (%)\ncard0,7\n"), ("rocm-smi", "GPU[0]\t\t: GPU use (%): 7\n"),
    ],
)  # fmt: skip
def test_an_output_without_a_known_field_is_an_error_not_an_unknown_device(tool: str, text: str) -> None:
    with pytest.raises(ProbeGarbled):
        PARSERS[tool](text)


def test_a_card_without_figures_is_a_device_with_unknown_values() -> None:
    for text in ('[{"gpu": 0, "usage": "N/A"}]', '[{"gpu": 0, "power": {"socket_power": 65535}}]'):
        assert amd_smi.parse(text).devices == (Device(id="amd-0", vendor=Vendor.AMD, index=0),)
    assert rocm_smi.parse('{"card0": {"GPU use (%)": "N/A"}}').devices == (
        Device(id="amd-0", vendor=Vendor.AMD, index=0),
    )


def test_merging_completes_devices_by_number_and_adds_none() -> None:
    merged = amd_smi.merge(*map(amd_smi.parse, (AMD_SMI_METRIC, AMD_SMI_LIST, AMD_SMI_STATIC, AMD_SMI_PROCESS)))
    first, second = merged.devices
    assert (first.id, first.name, first.power_draw_w) == ("GPU-a1b2c3d4e5f60718", "Instinct Example", 205.0)
    assert (first.pci_bus_id, first.power_limit_w, first.memory_used_mb) == ("0000:05:00.0", 250.0, 1024.0)
    assert first.processes == (Process(pid=4321, memory_mb=2048.0, name="/usr/bin/python3"),)
    assert (second.id, second.processes, second.power_draw_w) == ("0000:26:00.0", (), None)
    merged = amd_smi.merge(amd_smi.parse(AMD_SMI_METRIC_BARE), amd_smi.parse(AMD_SMI_LIST))
    assert [device.id for device in merged.devices] == ["GPU-a1b2c3d4e5f60718"]


def test_rocm_smi_json_after_a_warning_is_parsed() -> None:
    (device,) = rocm_smi.parse(ROCM_SMI_JSON).devices
    assert device == Device(
        id="GPU-01a2b3c4d5e6f708", vendor=Vendor.AMD, index=0, name="Navi 00 [Example]", pci_bus_id="0000:0b:00.0",
        memory_total_mb=16368.0, memory_used_mb=1.0, memory_free_mb=16367.0, utilization_percent=7.0,
        power_draw_w=31.5, power_limit_w=264.0, temperature_c=40.0,
        processes=(Process(pid=4242, memory_mb=512.0, name="python3"),),
    )  # fmt: skip
    assert rocm_smi.parse('{"system": {"Driver version": "6.7.0"}}') == Reading()
    assert rocm_smi.parse("WARNING: No AMD GPUs specified\n") == Reading()


def test_rocm_smi_of_two_dies_of_odd_names_and_of_old_releases_is_read() -> None:
    first, second = rocm_smi.parse(ROCM_SMI_JSON_TWO_DIES).devices
    assert (first.index, first.power_draw_w, first.temperature_c) == (0, 90.0, None)
    assert (second.index, second.power_draw_w, second.temperature_c) == (1, None, 51.0)
    assert first.id != second.id
    assert (first.processes, second.processes) == (None, None)
    system = {"PID7": "a, b, 1, 1048576, 0, 0", "PID8": "idle, 0, 0, 0, 0", "PID9": "short"}
    (device,) = rocm_smi.parse(json.dumps({"card0": {}, "system": system})).devices
    assert device.processes == (Process(pid=7, memory_mb=1.0, name="a, b"), Process(pid=9, name="short"))
    (device,) = rocm_smi.parse(ROCM_SMI_JSON_OLD).devices
    assert (device.temperature_c, device.power_draw_w, device.power_limit_w) == (27.0, 155.0, 225.0)
    (older,) = rocm_smi.parse('{"card0": {"Temperature (Sensor #1)": "27.0 c", "GPU use": "3%"}}').devices
    assert (older.temperature_c, older.utilization_percent) == (27.0, 3.0)


def test_radeontop_gives_the_load_and_the_memory_that_was_read() -> None:
    (device,) = radeontop.parse(RADEONTOP).devices
    assert device == Device(
        id="0000:0a:00.0", vendor=Vendor.AMD, pci_bus_id="0000:0a:00.0", memory_total_mb=8192.0,
        memory_used_mb=2048.0, memory_free_mb=6144.0, utilization_percent=12.5,
    )  # fmt: skip
    (device,) = radeontop.parse(RADEONTOP_OLD).devices
    assert (device.id, device.memory_used_mb, device.memory_total_mb) == ("amd-0", 20.0, None)
    (device,) = radeontop.parse(RADEONTOP_NO_VRAM).devices
    assert (device.id, device.utilization_percent, device.memory_used_mb) == ("0000:c3:00.0", 99.17, None)
    (device,) = radeontop.parse("1.5: bus 01, gpu 5.00%, vram 0.00% 0.00mb\n").devices
    assert (device.memory_used_mb, device.memory_total_mb) == (None, None)
    (device,) = radeontop.parse("1.0: bus 01, gpu 5.00%\n2.0: bus 01, gpu 6.00%\n").devices
    assert device.utilization_percent == 6.0


@pytest.mark.parametrize("length", range(20, len(AMD_SMI_METRIC) - 2, 97))
def test_a_truncated_json_output_is_not_taken_for_fewer_cards(length: int) -> None:
    with pytest.raises(ProbeGarbled):
        amd_smi.parse(AMD_SMI_METRIC[:length])
