"""`gpuyard leases` as people and scripts use it."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Script

pytestmark = pytest.mark.usefixtures("two_gpus")

GPUYARD = [sys.executable, "-m", "gpuyard"]


def run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    everything = {**os.environ, **environment}
    return subprocess.run(
        [*GPUYARD, "leases", *arguments], capture_output=True, text=True, timeout=90, check=False, env=everything
    )


def report() -> dict[str, Any]:
    shape: dict[str, Any] = json.loads(run("--json").stdout)
    return shape


def wait_for(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(100):
        shape = report()
        if condition(shape):
            return shape
    pytest.fail(f"it never came to be: {shape}")


def test_a_fresh_machine_has_no_leases() -> None:
    assert run().stdout == "No leases.\n"
    shape = report()
    assert (shape["leases"], shape["waiting"], shape["foreign"]) == ([], [], [])


def test_holders_waiting_requests_and_foreign_processes_are_listed(script: Script) -> None:
    holder = script(label="nightly", vram="6G", specific_gpus=[0])
    assert holder.stdout is not None
    assert holder.stdout.readline() == "[0]\n"
    foreign_process = script(*GPUYARD, "sim-job", "--device", "1", "--vram", "8G", "--seconds", "600")
    assert foreign_process.stdout is not None
    assert "holding" in foreign_process.stdout.readline()
    waiter = script(label="big", num_gpus=2)
    shape = wait_for(lambda shape: bool(shape["waiting"]))
    (lease,) = shape["leases"]
    assert (lease["pid"], lease["label"], lease["uid"]) == (holder.pid, "nightly", os.getuid())
    assert lease["shares"] == [{"device_id": "SIM-0", "reserved_mb": 6144.0, "exclusive": False, "measured_mb": 0.0}]
    (waiting,) = shape["waiting"]
    assert (waiting["pid"], waiting["need"]["devices"]) == (waiter.pid, 2)
    assert {reason["device_id"]: reason["kind"] for reason in waiting["reasons"]} == {
        "SIM-0": "leased",
        "SIM-1": "no-room",
        None: "too-few",
    }
    (foreign,) = shape["foreign"]
    assert (foreign["device_id"], foreign["pid"], foreign["memory_mb"]) == ("SIM-1", foreign_process.pid, 8192.0)
    assert "sim-job" in foreign["command"]
    assert foreign["idle_s"] >= 0
    text = run(COLUMNS="200").stdout
    assert "nightly" in text
    assert f"pid {waiter.pid} (big)" in text
    assert "held by" in text
    assert "without a lease" in text


def test_the_memory_used_by_a_lease_s_processes_is_measured(script: Script) -> None:
    program = (
        "import sys\n"
        "from gpuyard import GPUScheduler\n"
        "from gpuyard.probes.simulated_devices import SimulatedUse\n"
        "with GPUScheduler(vram='4G', specific_gpus=[0]), SimulatedUse() as usage:\n"
        "    usage.allocate('SIM-0', 5000)\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    holder = script(sys.executable, "-c", program)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    shape = report()
    assert shape["leases"][0]["shares"][0]["measured_mb"] == 5000.0
    assert shape["foreign"] == []


def test_an_own_lease_can_be_ended_and_its_program_continues(script: Script) -> None:
    holder = script(num_gpus=2)
    assert holder.stdout is not None
    holder.stdout.readline()
    (lease,) = report()["leases"]
    assert run("release", lease["id"]).returncode == 0
    assert report()["leases"] == []
    assert holder.poll() is None
    holder.communicate("\n", timeout=90)
    assert holder.returncode == 0


def test_an_unknown_lease_is_an_error_that_lists_the_existing_ones(script: Script) -> None:
    holder = script()
    assert holder.stdout is not None
    holder.stdout.readline()
    (lease,) = report()["leases"]
    refused = run("release", "nothing")
    assert refused.returncode == 2
    assert lease["id"] in refused.stderr


def test_a_shared_directory_is_sticky_and_open_to_all(tmp_path: Path) -> None:
    shared = tmp_path / "lab"
    result = run("init-shared", str(shared))
    assert result.returncode == 0
    assert f"GPUYARD_LOCK_DIR={shared}" in result.stdout
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    assert json.loads(run("--json", GPUYARD_LOCK_DIR=str(shared)).stdout)["directory"] == str(shared)
    assert run("init-shared", str(shared), "--group", "no-such-group").returncode == 2


def test_a_directory_that_others_could_tamper_with_is_refused(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    result = run(GPUYARD_LOCK_DIR=str(loose))
    assert result.returncode == 1
    assert "chmod +t" in result.stderr
