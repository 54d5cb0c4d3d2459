"""Processes that `amd-smi` lists with the same figure on every card."""

import json
from typing import Any

from gpuyard.model.machine_snapshot import Process
from gpuyard.probes.amd import amd_smi
from gpuyard.probes.local_machine import replay


def processes_of(text: str) -> list[tuple[Process, ...] | None]:
    return [device.processes for device in amd_smi.parse(text).devices]


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
