"""The library that steps the clock of a process does so at once, and leaves its monotonic clocks alone."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executables import write_executable
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


# Prints which files this process itself has opened below its first argument.
_WRITE = """
import sys
from pathlib import Path
from tests.executables import write_executable

opened = []
place = sys.argv[1]
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith(place) and opened.append(args[0]))
write_executable(Path(place, "program"), "#!/bin/sh\\necho it ran\\n")
print(opened)
"""


def test_the_process_that_runs_the_tests_never_has_the_program_open(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _WRITE, str(tmp_path)]
    opened = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert opened.stdout == "[]\n"
    assert subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout == "it ran\n"


def test_another_program_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a program"
    for status in (3, 4):
        assert subprocess.run([write_executable(path, f"#!/bin/sh\nexit {status}\n")], check=False).returncode == status
