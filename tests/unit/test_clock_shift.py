"""The library that steps the clock of a process does so at once, and leaves its monotonic clocks alone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.clock_shift import ClockShift

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD and CLOCK_BOOTTIME")

_DAY_S = 86_400.0
_PROGRAM = """
import sys, time
for _ in sys.stdin:
    clocks = [time.time(), time.clock_gettime(time.CLOCK_REALTIME), time.monotonic()]
    print(*clocks, time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
"""


@pytest.fixture
def shift(tmp_path: Path) -> ClockShift:
    return ClockShift(tmp_path)


@pytest.fixture
def program(shift: ClockShift) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, **shift.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def _clocks(program: "subprocess.Popen[str]") -> list[float]:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return [float(value) for value in program.stdout.readline().split()]


@pytest.mark.parametrize(("step_s", "slept_s"), [(0.0, 0.0), (_DAY_S, 0.0), (-_DAY_S, 0.0), (-_DAY_S, 3600.0)])
def test_a_step_moves_the_wall_clock_and_a_suspend_both_clocks_of_a_running_process(
    shift: ClockShift, program: "subprocess.Popen[str]", step_s: float, slept_s: float
) -> None:
    _clocks(program)
    shift.step(step_s)
    shift.suspend(slept_s)
    before = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    wall, realtime, monotonic, boot = _clocks(program)
    after = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before[0] + step_s + slept_s - 0.01 <= wall <= realtime <= after[0] + step_s + slept_s + 0.01
    assert before[1] <= monotonic <= after[1]
    assert before[2] + slept_s - 0.01 <= boot <= after[2] + slept_s + 0.01
