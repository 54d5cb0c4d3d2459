"""On a machine with one NVIDIA card and PyTorch: the driver's figures distinguish busy and idle programs."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.hardware.test_foreign_load import MULTIPLIES
from tests.hardware.test_queue import shown
from tests.integration.queue_fixture import until

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA card")

HOLDS = """
import sys, torch
block = torch.ones(8192, 8192, device="cuda")
print("busy", flush=True)
sys.stdin.read()
"""


@contextmanager
def program(script: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        yield process
        process.kill()


def loads() -> dict[int, float | None]:
    [device] = shown("devices")["devices"]
    return {process["pid"]: process["utilization_percent"] for process in device["processes"]}


@pytest.mark.usefixtures("own_home")
def test_a_busy_program_has_a_load_and_an_idle_one_has_none() -> None:
    pytest.importorskip("torch")
    with program(HOLDS) as idle:
        with program(MULTIPLIES) as busy:
            until(lambda: (loads().get(busy.pid) or 0.0) > 80, "the load of the busy program")
            assert loads()[idle.pid] == 0.0
        until(lambda: not loads().get(idle.pid), "an idle card")
