"""A bare `GPUScheduler()` works on every card that is free: its default thresholds bend to what the cards can show."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuyard import GPUScheduler, find_free_gpus
from gpuyard.errors import UserError, WaitedTooLong
from gpuyard.probes.simulated_devices import SimulatedUse
from tests.fakes.nvml import FakeDevice, FakeMemory, FakeNvml, FakeProcess, FakeState, build_fake_nvml

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
# Far longer than a program takes: one that waits for a GPU has a limit of its own.
DEADLINE_S = 90.0
# Prints what a bare call gets, and what is free by the helper and by a limit that was given.
BARE = (
    "import sys\n"
    "from gpuyard import GPUScheduler, find_free_gpus\n"
    "print(find_free_gpus(), find_free_gpus(power_threshold_w=80), flush=True)\n"
    "with GPUScheduler(max_wait_time=0.5) as gpu_ids: print(gpu_ids)\n"
)


def run(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip


def test_the_line_of_the_readme_gets_a_gpu_of_16_gb() -> None:
    [line] = re.findall(r"`(with GPUScheduler\(.*?\) as gpu_ids:)`", (ROOT / "README.md").read_text())
    done = run(f"from gpuyard import GPUScheduler\n{line} print(gpu_ids)", GPUYARD_SIMULATE="1x16GB")
    assert (done.stdout, done.stderr, done.returncode) == ("[0]\n", "", 0)


def test_the_signature_keeps_the_defaults_of_existing_scripts() -> None:
    for callable_ in (GPUScheduler, find_free_gpus):
        names = ("memory_free_threshold_gb", "power_threshold_w", "utilization_threshold_percent")
        parameters = inspect.signature(callable_).parameters
        assert [parameters[name].default for name in names] == [20, 80, 1]
        assert "memory_free_threshold_gb: float = 20," in str(inspect.signature(callable_))


@pytest.mark.parametrize(("machine", "count", "expected"), [
    ("1x8GB", 1, [0]), ("1x20GB", 1, [0]), ("1x8GB,1x16GB", 1, [1]), ("1x16GB,1x48GB", 1, [1]),
    ("1x16GB,1x48GB", 2, [0, 1]),
])  # fmt: skip
def test_the_default_memory_is_what_the_largest_free_gpus_can_show(
    machine: str, count: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", machine)
    with GPUScheduler(num_gpus=count, max_wait_time=0.5) as gpu_ids:
        assert gpu_ids == expected
    assert find_free_gpus() == expected[-1:]
    assert find_free_gpus(specific_gpus=0) == [0]


def test_the_default_memory_allows_for_a_desktop_and_for_nothing_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x16GB")
    with SimulatedUse() as usage:
        usage.allocate("SIM-0", 1000)
        assert find_free_gpus() == [0]
        usage.allocate("SIM-0", 1000)
        assert find_free_gpus() == []
        with pytest.raises(WaitedTooLong, match="14 GB free, 15 GB needed"):
            GPUScheduler(max_wait_time=0).acquire()


def test_memory_that_a_caller_gave_is_kept_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x16GB")
    assert find_free_gpus(20) == []
    with pytest.raises(UserError, match="no GPU has 20 GB; the largest has 16 GB") as refused:
        GPUScheduler(20).acquire()
    assert "memory_free_threshold_gb=" in str(refused.value.hint)


@pytest.mark.needs("cc")
@pytest.mark.parametrize(("load", "processes", "expected"), [
    (0, (), "[0] []\n[0]\n"),
    (0, (FakeProcess(pid=os.getpid(), memory=500 * MIB),), "[] []\n"),
    (30, (), "[] []\n"),
])  # fmt: skip
def test_a_card_that_draws_more_than_80_w_when_idle_is_free(
    load: int, processes: tuple[FakeProcess, ...], expected: str, tmp_path: Path
) -> None:
    nvml = FakeNvml(library=build_fake_nvml(tmp_path), state_file=tmp_path / "state")
    memory = FakeMemory(total=143_771 * MIB, reserved=614 * MIB, used=sum(each.memory or 0 for each in processes))
    card = FakeDevice(
        uuid="GPU-00000001-aaaa-bbbb-cccc-000000000000", pci="00000000:01:00.0", memory=memory, utilization=load,
        power_mw=118_000, processes=processes,
    )  # fmt: skip
    nvml.write(FakeState(devices=(card,)))
    done = run(BARE, **nvml.environment())
    assert (done.stdout, done.returncode) == (expected, 0 if len(expected) > len("[] []\n") else 1), done.stderr
    assert done.returncode == 0 or f"{'GPU 30% > 1%' if load else 'power 118 W > 80 W'}" in done.stderr
