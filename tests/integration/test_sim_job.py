"""`gpuyard sim-job` as a stand-in for real programs: memory that grows late, work with a checksum."""

import subprocess
import sys

import pytest

from gpuyard.probes.simulated_devices import SimulatedDevices


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevices:
    monkeypatch.setenv("GPUYARD_SIMULATE", "1x24GB")
    return SimulatedDevices()


def sim_job(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gpuyard", "sim-job", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)


def test_the_checksum_covers_all_of_the_work() -> None:
    first, again, more = sim_job("--work", "3"), sim_job("--work", "3"), sim_job("--work", "4")
    assert first.returncode == 0
    assert first.stdout.splitlines()[1].startswith("3 units, checksum ")
    assert first.stdout == again.stdout
    assert first.stdout.splitlines()[1].split()[-1] != more.stdout.splitlines()[1].split()[-1]


@pytest.mark.parametrize("options", [("--seconds", "60"), ("--work", "6000")])
def test_memory_that_grows_late_runs_out_late(options: tuple[str, str]) -> None:
    done = sim_job("--vram", "8G", "--then", "10G@50ms", "--then", "10G@0.1s", *options)
    assert done.returncode == 1
    assert done.stdout == "SIM-0: holding 8 GB\n"
    assert "Tried to allocate 10.00 GiB" in done.stderr
    assert "6.00 GiB is free" in done.stderr


def test_memory_growth_after_the_end_is_ignored() -> None:
    assert sim_job("--vram", "8G", "--then", "20G@1h", "--seconds", "0.05").returncode == 0


@pytest.mark.parametrize("growth", ["2G", "2G@", "@3s"])
def test_an_incomplete_growth_is_rejected_with_an_example(growth: str) -> None:
    done = sim_job("--then", growth)
    assert done.returncode == 2
    assert f"'{growth}'" in done.stderr
    assert "2G@3s" in done.stderr
