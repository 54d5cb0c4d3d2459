"""Limits for a batch are proposed by a log of samples."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.machine_snapshot import Device, Host, Sample, Snapshot, Vendor
from gpuyard.probes.sample_log import SampleLog
from gpuyard.queue.batch_gates import COLUMNS
from gpuyard.ui.cli.recipes.datagen import ProposedLimit, propose_limits, read_sample_log


def values(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    return {limit.option: limit.value for limit in propose_limits(rows)}


def host(**figures: object) -> dict[str, Any]:
    return {"kind": "host", "id": "host", **figures}


def device(name: str, **figures: object) -> dict[str, Any]:
    return {"kind": "device", "id": name, **figures}


def sample(cpu: float, loads: dict[str, float]) -> Sample:
    devices = tuple(
        Device(
            id=name, index=at, vendor=Vendor.SIMULATED, name=name, memory_total_mb=24000.0, memory_used_mb=4000.5 * at
        )
        for at, name in enumerate(loads)
    )
    machine = Host(name="box", cpu_percent=cpu, memory_total_mb=32000.0, memory_available_mb=20000.5)
    return Sample(snapshot=Snapshot(taken_at=0.0, host=machine, devices=devices), cpu_percent=cpu, loads=loads)


@pytest.mark.parametrize("name", ["usage.csv", "usage.jsonl"])
def test_a_log_of_watch_gives_the_four_limits_rounded_so_that_its_samples_pass(tmp_path: Path, name: str) -> None:
    log = SampleLog(tmp_path / name)
    log.write(sample(61.2, {"A": 10.0, "B": 80.4}))
    assert values(read_sample_log(tmp_path / name)) == {
        "--max-cpu": 62,
        "--min-free-mem-mb": 20000,
        "--max-gpu": 81,
        "--max-gpu-mem-mb": 4001,
    }


def test_one_sample_in_twenty_is_left_out() -> None:
    busy = [host(utilization_smoothed_percent=99, memory_free_mb=1)]
    rows = [host(utilization_smoothed_percent=50, memory_free_mb=900)] * 19
    assert values(rows + busy)["--max-cpu"] == 50
    assert values(rows + busy)["--min-free-mem-mb"] == 900
    assert values(rows + busy * 2)["--max-cpu"] == 99
    assert values(rows + busy * 2)["--min-free-mem-mb"] == 1


def test_the_busiest_gpu_decides_also_beside_many_idle_ones() -> None:
    idle = [device(f"idle-{number}", utilization_smoothed_percent=0, memory_used_mb=5) for number in range(40)]
    rows = [*idle, device("busy", utilization_smoothed_percent=70, memory_used_mb=5)]
    limits = {limit.option: limit for limit in propose_limits(rows)}
    why = "smoothed use of GPU busy, the highest: 70.0% or less in 95% of 1 sample"
    assert limits["--max-gpu"] == ProposedLimit(option="--max-gpu", value=70, why=why)


def test_a_log_of_a_batch_is_read_too() -> None:
    row = dict.fromkeys(COLUMNS) | {
        "event": "sample", "device": "A", "cpu_smoothed_percent": 40.0, "cpu_judged_percent": 90.0,
        "memory_available_mb": 800.0, "gpu_smoothed_percent": 30.0, "gpu_memory_used_mb": 600.0,
    }  # fmt: skip
    assert list(values([row]).values()) == [40, 800, 30, 600]


def test_a_figure_that_the_log_does_not_have_gets_no_limit() -> None:
    limits = propose_limits([host(utilization_smoothed_percent="12.5", memory_free_mb="")])
    assert [(limit.option, limit.value) for limit in limits if limit.value is not None] == [("--max-cpu", 13)]
    assert limits[1].why == "no --min-free-mem-mb: its figure is not in the log"


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "{\n", "{}\n[]\n", "kind,memory_free_mb\nhost,much\n"])
def test_a_file_that_is_no_log_of_samples_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(UserError) as refused:
        propose_limits(read_sample_log(tmp_path / "log"))
    assert refused.value.hint == "give a file that `gpuyard watch --log FILE` has written"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"log': No such file"):
        read_sample_log(tmp_path / "log")
    (tmp_path / "log").write_text(json.dumps({"kind": "host"}))
    with pytest.raises(UserError, match="no samples"):
        propose_limits(read_sample_log(tmp_path / "log"))
