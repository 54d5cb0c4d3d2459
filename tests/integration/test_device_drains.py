"""`gpuyard devices drain` and `[devices] banned` hold at once, for waiting jobs and scripts, and survive restarts."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest, until

SCRIPT = (
    "from gpuyard import GPUScheduler\n"
    "with GPUScheduler(specific_gpus=[0], vram='2G', progress=lambda line: print(line, flush=True)):\n"
    "    print('has it', flush=True)\n"
)


def open_gate(gate: Path) -> None:
    gate.write_text("go\n")


@contextlib.contextmanager
def waiting_script(*command: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"'{text}' never came: {seen}")


def test_a_drain_holds_for_a_job_that_waited_and_over_a_restart(queue: QueueUnderTest) -> None:
    running, gate = queue.start_gated(device="0", vram="20G")
    waited = queue.submit("true", device="0", vram="20G")
    drained = run_here("devices", "drain", "0", "--reason", "ECC errors")
    assert "GPU 0 is drained by" in drained.stdout, drained.stderr
    assert "1 lease on it continues" in drained.stdout
    assert queue.state(running) == "running"
    open_gate(gate)
    queue.wait(running)
    queue.restart()
    beside = queue.submit("true", vram="20G")
    queue.wait(beside)
    assert queue.job(beside)["gpu_labels"] == ["1"]
    assert queue.state(waited) == "queued"
    assert "drained by" in queue.why(waited)
    assert "ECC errors" in queue.why(waited)
    (drain,) = [device["drain"] for device in queue.get("/devices")["devices"] if device["drain"]]
    assert (drain["device_id"], drain["reason"]) == ("SIM-0", "ECC errors")
    for shown in (run_here("queue"), run_here("devices"), run_here("doctor"), run_here("daemon", "status")):
        assert ": ECC errors" in shown.stdout
    only_there = run_here("submit", "--device", "0", "--", "true")
    assert "it waits: too few GPUs that suit it take new work: GPU 0 is drained by" in only_there.stderr
    assert "ECC errors (`gpuyard devices undrain 0`)" in only_there.stderr
    assert json.loads(run_here("unpause", "--device", "0", "--json").stdout) == {"undrained": ["SIM-0"]}
    queue.wait(waited)
    assert queue.job(waited)["gpu_labels"] == ["0"]


@pytest.mark.parametrize(
    "command",
    [(sys.executable, "-c", SCRIPT), (sys.executable, "-m", "gpuyard", "run", "--device", "0", "--", "echo", "has it")],
    ids=["GPUScheduler", "run"],
)
def test_a_drain_holds_for_a_script_that_waits(queue: QueueUnderTest, command: tuple[str, ...]) -> None:
    _, gate = queue.start_gated(device="0", vram="24G")
    with waiting_script(*command) as script:
        lines_until(script, "held by" if "run" in command else "free")
        assert run_here("pause", "--device", "0", "--reason", "hot").returncode == 0
        open_gate(gate)
        assert "has it" not in lines_until(script, ": hot")
        assert run_here("devices", "undrain", "0").returncode == 0
        lines_until(script, "has it")


def test_a_ban_in_the_configuration_holds_for_a_job_that_waited(queue: QueueUnderTest) -> None:
    running, gate = queue.start_gated(device="0", vram="20G")
    waited = queue.submit("true", device="0", vram="20G")
    beside, other_gate = queue.start_gated("other", device="1", vram="20G")
    anywhere = queue.submit("true", vram="20G")
    config = queue.home / "config.toml"
    config.write_text("[devices]\nbanned = [0]\n", encoding="utf-8")
    open_gate(gate)
    queue.wait(running)
    until(lambda: "banned in the configuration" in queue.why(waited), "the reason")
    assert queue.state(anywhere) == "queued"
    open_gate(other_gate)
    queue.wait(f"{beside} {anywhere}")
    assert queue.job(anywhere)["gpu_labels"] == ["1"]
    assert queue.state(waited) == "queued"
    os.unlink(config)
    queue.wait(waited)
    assert queue.job(waited)["gpu_labels"] == ["0"]


def test_an_unknown_gpu_is_an_error_that_names_the_known_ones(queue: QueueUnderTest) -> None:
    failed = run_here("devices", "drain", "7")
    assert (failed.returncode, "there is no GPU '7'" in failed.stderr) == (2, True)
    assert "0 (SIM-0), 1 (SIM-1)" in failed.stderr
    assert queue.post("/devices/drain", devices=[1])["devices"] == ["SIM-1"]
    assert [drain["device_id"] for drain in queue.post("/devices/undrain", devices=["SIM-1"])["drains"]] == []
