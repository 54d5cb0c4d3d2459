"""Run the NVML probe in its own process, over the fake library.

The process gets a list of states. It writes each state and reads once, so that a test sees what changes between two
reads of one probe, without waiting.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.nvml import FakeDevice, FakeNvml, FakeState

PROGRAM = """
import json, os, sys
from pathlib import Path

import msgspec
import pynvml

from gpuyard.model.machine_snapshot import Reading
from gpuyard.errors import ProbeError
from gpuyard.probes.nvidia import nvml

task = json.load(sys.stdin)
if task["set_up_each_time"]:
    nvml.SETUP_AGAIN_AFTER_S = -1.0
probe = nvml.Nvml(Path(task["root"]))
outcomes = []
known = ()
for number, text in enumerate(task["states"]):
    if number == task["close_before"]:
        pynvml.nvmlShutdown()
    if str(number) in task["append"]:
        path, more = task["append"][str(number)]
        with open(path, "a") as file:
            file.write(more)
    state_file = Path(os.environ["FAKE_NVML_STATE"])
    state_file.with_suffix(".new").write_text(text)
    state_file.with_suffix(".new").replace(state_file)
    try:
        if task["memory_from"] is None or number < task["memory_from"]:
            reading = probe.read(5.0)
        else:
            reading = Reading(devices=tuple(probe.read_memory(known)))
        known = known or reading.devices
        outcomes.append(msgspec.to_builtins(reading))
    except ProbeError as error:
        outcomes.append({"error": type(error).__name__, "says": str(error), "hint": error.hint})
print(json.dumps(outcomes))
"""


class Reader:
    """Runs the probe in its own process, with one read per state."""

    def __init__(self, fake: FakeNvml, root: Path) -> None:
        self.fake = fake
        self.root = root

    def read_each(self, *states: FakeState, **options: Any) -> list[dict[str, Any]]:
        return run_program(self.fake.environment(), self.root, states, **options)

    def devices(self, *devices: FakeDevice) -> list[dict[str, Any]]:
        outcome = self.read_each(FakeState(devices=devices))[0]
        found: list[dict[str, Any]] = outcome["devices"]
        return found


def run_program(
    variables: dict[str, str],
    root: Path,
    states: tuple[FakeState, ...],
    *,
    set_up_each_time: bool = False,
    close_before: int | None = None,
    memory_from: int | None = None,
    append: Mapping[int, tuple[str, str]] | None = None,
) -> list[dict[str, Any]]:
    """Return the result of each read. `close_before`: the number of the read before which the library is closed;
    `memory_from`: the number of the first read that reads only the memory of the devices of the first one;
    `append`: what is appended to a file before the read of this number, as path and text."""
    task = {
        "root": str(root),
        "states": [state.text() for state in states],
        "set_up_each_time": set_up_each_time,
        "close_before": close_before,
        "memory_from": memory_from,
        "append": append or {},
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(task),
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=90,
    )
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(outcomes) == len(states)
    return outcomes


def by_id(outcome: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found = {device["id"]: device for device in outcome["devices"]}
    assert len(found) == len(outcome["devices"]), "two devices have the same id"
    return found


def processes_of(device: dict[str, Any]) -> list[tuple[int, float | None]]:
    return [(process["pid"], process["memory_mb"]) for process in device["processes"]]


def healthy_ids(outcome: dict[str, Any]) -> set[str]:
    return {key for key, device in by_id(outcome).items() if device["fault"] is None}
