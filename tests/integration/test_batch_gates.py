"""Runs of a batch start when the machine has headroom, and the sample log proves it.

Each test closes a gate and checks that it held launches back: a gate that never closes proves nothing.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.integration.queue_fixture import until
from tests.integration.sim_view_fixture import (  # noqa: F401 - fixtures are found where they are named
    CPU_HOG,
    GPU_HOG,
    QUIET_DAEMON,
    RAM_MB,
    Batch,
    Hog,
    make_batch,
    make_hogs,
    percent_of,
    put_sim_view,
)
from tests.scale import some

Hogs = Callable[..., Hog]
# The column of the sample log, and the threshold that it has to keep.
AT_MOST = {
    "max_cpu": ("cpu_smoothed_percent",),
    "max_gpu": ("gpu_smoothed_percent",),
    "max_gpu_mem_mb": ("gpu_memory_used_mb", "gpu_memory_judged_mb", "gpu_memory_charged_mb"),
}
AT_LEAST = {"min_free_mem_mb": ("memory_available_mb", "memory_judged_mb")}


def check_launches(batch: Batch, attempts: int, bounds: Mapping[str, Any]) -> None:
    """Check that each launch has a row, and that none crossed a threshold."""
    launches = batch.rows("launch")
    assert len(launches) == len(batch.entries("begins")) == attempts
    for row in launches:
        for bound, columns in AT_MOST.items():
            assert all(row[column] <= bounds[bound] for column in columns if bound in bounds), (bound, row)
        for bound, columns in AT_LEAST.items():
            assert all(row[column] >= bounds[bound] for column in columns if bound in bounds), (bound, row)


def held_rows(batch: Batch, text: str) -> list[dict[str, Any]]:
    return [row for row in batch.rows("sample") if text in (row["held_by"] or "")]


@pytest.mark.full
def test_with_all_thresholds_at_once_every_run_completes_and_no_launch_crosses_one(batch: Batch) -> None:
    bounds = {"max_cpu": percent_of(1.5), "min_free_mem_mb": round(0.5 * RAM_MB), "max_gpu": 60,
              "max_gpu_mem_mb": 8000}  # fmt: skip
    takes = ("--vram", "3000", "--load", "40", "--ram", "50", "--busy", "--seconds", "0.3")
    batch.queue.start(QUIET_DAEMON)
    batch.begin(
        8, [*takes, "--empty-every", "4", "--fail-every", "5"], concurrency=3, run_vram="3000M", retries=1, **bounds
    )
    summary = batch.finished()
    assert (summary.runs, summary.succeeded, summary.failed, summary.attempts) == (8, 8, 0, 10)
    assert (summary.pruned, summary.frames) == (2, 6 * 3)
    assert sorted(folder.name for folder in batch.pruned.glob("run-*")) == ["run-000000", "run-000004"]
    assert sorted(entry.seed for entry in batch.entries("ends")) == list(range(8))
    assert sorted(entry.seed for entry in batch.entries("fails")) == [0, 5]
    assert batch.most_at_once() <= 3
    check_launches(batch, 10, bounds)


SOME_RAM_MB = round(0.4 * RAM_MB)
GATES: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "cpu": (["--busy"], {"max_cpu": percent_of(0.5)}, f"% > {percent_of(0.5):.0f}%"),
    "memory": (
        [],
        {"run_ram": f"{SOME_RAM_MB}M", "min_free_mem_mb": round(1.25 * SOME_RAM_MB)},
        "reserved for runs) < ",
    ),
    "gpu": (["--load", "70"], {"max_gpu": 60, "run_vram": "100M", "device": "0"}, "% > 60%"),
    "gpu-memory": (
        ["--vram", "3000"],
        {"max_gpu_mem_mb": 8000, "run_vram": "3000M", "device": "0"},
        "GPU memory 9000 MB, including",
    ),
}


@pytest.mark.parametrize("gate", some(GATES, 0))
def test_a_gate_blocks_launches_while_the_batch_s_own_runs_use_the_resource(batch: Batch, gate: str) -> None:
    takes, bounds, text = GATES[gate]
    batch.queue.home.mkdir(mode=0o700)
    config = batch.queue.home / "config.toml"
    config.write_text("[queue.tags]\ndatagen = 1\n")  # until the first run has allocated its memory
    batch.queue.start(QUIET_DAEMON)
    batch.begin(4, [*takes, "--seconds", "0", *batch.gated()], concurrency=4, **bounds)
    until(lambda: batch.entries("takes"), "what the first run takes")
    config.write_text("")
    batch.until_held_by(gate)
    until(lambda: held_rows(batch, text), "a sample with the figure of the gate")
    batch.let_go()
    summary = batch.finished()
    assert summary.succeeded == 4
    assert summary.waits_s[gate] > 0
    check_launches(batch, 4, bounds)


def test_memory_expected_of_running_runs_counts_before_they_use_it(batch: Batch) -> None:
    batch.queue.start(QUIET_DAEMON)
    batch.begin(6, batch.gated(), concurrency=6, run_vram="3000M", max_gpu_mem_mb=8000)
    batch.until_begun(4)
    batch.let_go()
    assert batch.finished().succeeded == 6
    assert [row["gpu_memory_used_mb"] for row in batch.rows("launch")] == [0.0] * 6
    assert [batch.most_at_once(device) for device in ("0", "1")] == [2, 2]


def test_memory_expected_of_a_run_counts_beside_that_of_a_foreign_process(batch: Batch, hog: Hogs) -> None:
    foreign = hog(GPU_HOG, "SIM-0", 0, 6000)
    foreign.take()
    batch.queue.start(QUIET_DAEMON)
    bounds = {"run_vram": "3000M", "max_gpu_mem_mb": 8000, "device": "0"}
    batch.begin(2, ["--vram", "3000"], concurrency=2, **bounds)
    batch.until_held_by("gpu-memory")
    assert batch.rows("launch") == []
    foreign.end()
    assert batch.finished().succeeded == 2
    check_launches(batch, 2, bounds)


def test_the_second_run_on_a_gpu_starts_before_the_first_has_run_for_a_minute(batch: Batch) -> None:
    batch.queue.start(QUIET_DAEMON)
    batch.begin(2, ["--vram", "2000", *batch.gated()], concurrency=2, device="0", max_gpu_mem_mb=8000)
    batch.until_begun(2)
    first, second = batch.entries("begins")
    assert second.at - first.at < 50.0
    batch.let_go()
    assert batch.finished().succeeded == 2


# Load from outside


OUTSIDE: dict[str, tuple[list[tuple[object, ...]], list[str], dict[str, Any], str]] = {
    "gpu": ([(GPU_HOG, f"SIM-{n}", 95, 0) for n in range(2)], ["--load", "10"], {"max_gpu": 80, "run_vram": "100M"},
            "% > 80%"),
    "cpu": ([(CPU_HOG,)] * 2, [], {"max_cpu": percent_of(1.5)}, f"% > {percent_of(1.5):.0f}%"),
}  # fmt: skip


@pytest.mark.parametrize("gate", OUTSIDE)
def test_load_from_outside_delays_launches_only_while_it_lasts(batch: Batch, hog: Hogs, gate: str) -> None:
    """Load the machine once the batch is running."""
    loads, takes, bounds, text = OUTSIDE[gate]
    hogs = [hog(*load) for load in loads]
    batch.queue.start(QUIET_DAEMON)
    batch.begin(5, [*takes, *batch.gated(1)], concurrency=1, **bounds)
    until(lambda: batch.entries("ends"), "the end of the first run")
    for each in hogs:
        each.take()
    batch.let_go()
    batch.until_held_by(gate)
    closed_at, launched, samples = time.time(), len(batch.rows("launch")), batch.sample_count()
    until(lambda: batch.sample_count() >= samples + 2, "two more samples")
    assert batch.standing()["gate"] == gate
    assert text in batch.standing()["held_by"]
    assert len(batch.rows("launch")) == launched
    ended_at = time.time()
    for each in hogs:
        each.end()
    summary = batch.finished()
    assert not [entry for entry in batch.entries("begins") if closed_at <= entry.at <= ended_at]
    assert launched < summary.runs == summary.succeeded == len(batch.rows("launch"))
    assert summary.waits_s[gate] > 0
