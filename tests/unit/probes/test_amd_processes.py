"""The processes that `amd-smi` lists: below a monitor, and with the same figure on every card."""

import json
from typing import Any

import pytest

from gpuyard.core.snapshot import Process
from gpuyard.probes.amd import amd_smi
from gpuyard.probes.replay_output import replay
from tests.unit.probes.samples_amd import (
    AMD_SMI_MONITOR_CSV,
    AMD_SMI_MONITOR_PROCESS,
    AMD_SMI_MONITOR_PROCESS_NEW,
    AMD_SMI_MONITOR_PROCESS_WATCHED,
)


def processes_of(text: str) -> list[tuple[Process, ...] | None]:
    return [device.processes for device in amd_smi.parse(text).devices]


def test_the_process_list_below_a_monitor_is_parsed_as_processes() -> None:
    (device,) = amd_smi.parse(AMD_SMI_MONITOR_PROCESS).devices
    assert (device.power_draw_w, device.utilization_percent, device.temperature_c) == (293.0, 96.0, 49.0)
    assert (device.memory_used_mb, device.memory_total_mb) == (4096.0, 196608.0)
    assert device.processes == (Process(pid=7127, memory_mb=2048.0),)


def test_later_releases_list_processes_by_card_and_none_for_an_idle_card() -> None:
    first, second, third = processes_of(AMD_SMI_MONITOR_PROCESS_NEW)
    assert first == (
        Process(pid=15222, memory_mb=1536.0, name="my long name B"),
        Process(pid=15223, memory_mb=512.0, name="B"),
    )
    assert second == ()
    assert third is None


def test_the_last_of_several_process_lists_counts() -> None:
    assert processes_of(AMD_SMI_MONITOR_PROCESS_WATCHED) == [(Process(pid=12, memory_mb=3.0, name="b"),)]


def test_processes_are_listed_even_without_figures_of_their_cards() -> None:
    text = AMD_SMI_MONITOR_PROCESS_NEW.partition("PROCESS INFO:")
    (first, second) = amd_smi.parse(f"GPU  XCP\n  0    0\n  1    0\n\n{text[1]}{text[2]}").devices
    assert first.processes is not None
    assert [process.pid for process in first.processes] == [15222, 15223]
    assert (second.index, second.processes) == (1, ())


@pytest.mark.parametrize("kept", ["my long name B", "15222", "1.5", "1.6 G"])
def test_the_processes_of_a_card_with_a_truncated_row_are_unknown(kept: str) -> None:
    end = AMD_SMI_MONITOR_PROCESS_NEW.rindex(kept) + len(kept)
    assert processes_of(AMD_SMI_MONITOR_PROCESS_NEW[:end])[0] is None


def test_the_csv_of_a_monitor_contains_processes() -> None:
    first, second = processes_of(AMD_SMI_MONITOR_CSV)
    assert first == (Process(pid=77, memory_mb=1.0, name="python3"),)
    assert second is None


def test_a_csv_distinguishes_an_idle_card_from_a_truncated_row() -> None:
    cards = "timestamp,gpu,power_usage\n5,0,10\n5,1,20\n5,2,30\n\n"
    header = "timestamp,gpu,process_info,pid,name,vram_mem\n"
    rows = '5,0,No running processes detected,N/A,N/A,N/A\n5,1,N/A,9,"a, b",2097152\n5,2,N/A,10'
    assert processes_of(cards + header + rows) == [(), (Process(pid=9, memory_mb=2.0, name="a, b"),), None]
    assert processes_of(cards + header + rows + "\n5") == [None, None, None]


def process(pid: int, vram: int) -> dict[str, Any]:
    usage = {"gtt_mem": {"value": 8268000, "unit": "B"}, "vram_mem": {"value": vram, "unit": "B"}}
    return {"process_info": {"name": "train", "pid": pid, "memory_usage": usage, "mem_usage": "N/A"}}


def test_the_memory_of_a_process_with_the_same_figure_on_every_card_is_unknown() -> None:
    """Seen with ROCm 7.2: each card lists all processes, with what they hold on all cards together."""
    lists = [{"gpu": gpu, "process_list": [process(1, 118111600640), process(2, 1048576)]} for gpu in (0, 1)]
    unknown = (Process(pid=1, name="train"), Process(pid=2, name="train"))
    assert processes_of(json.dumps(lists)) == [unknown, unknown]


def test_a_process_with_different_figures_per_card_keeps_them() -> None:
    lists = [{"gpu": gpu, "process_list": [process(1, (gpu + 1) * 1048576), process(gpu + 5, 7)]} for gpu in (0, 1)]
    first, second = processes_of(json.dumps(lists))
    assert first is not None
    assert second is not None
    assert [held.memory_mb for held in (*first, *second)] == [1.0, 0.0, 2.0, 0.0]


def test_a_process_figure_above_the_total_of_its_only_card_becomes_unknown() -> None:
    card = {
        "gpu": 0,
        "mem_usage": {"total_vram": 32624, "used_vram": 20000},
        "process_list": [process(1, 118111600640)],
    }
    (device,) = replay("amd-smi", json.dumps([card]).encode()).devices
    assert device.processes == (Process(pid=1, name="train"),)
