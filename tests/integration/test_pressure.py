"""Programs that take RAM for real: `scripts/hogs` and `scripts/soak` for a moment, and warnings for programs beside the
queue. The kernel kills in the control group of the run only."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes import ram_hog

ROOT = Path(__file__).parents[2]
NO_GROUPS = 2
DEADLINE_S = 90.0


def run_script(name: str, folder: Path, *options: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / name), "--work", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == NO_GROUPS:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.linux("control groups")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.timeout(900)
def test_hogs_end_well_beside_a_program_that_outgrew_its_declared_ram(tmp_path: Path) -> None:
    report = run_script("hogs", tmp_path / "h", "--ram", "1G", "--each", "2", "--phases", "undeclared,mixed,outgrown")
    assert "the kernel killed 0 processes" in report


@pytest.mark.full
@pytest.mark.linux("control groups and namespaces")
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.timeout(1800)
def test_no_start_crosses_a_threshold_under_pressure_from_outside(tmp_path: Path) -> None:
    report = run_script("soak", tmp_path / "s", "--minutes", "3", "--seed", "7")
    assert "\nviolations: 0" in report


@pytest.mark.linux("/proc")
@pytest.mark.usefixtures("two_gpus")
def test_run_warns_about_a_program_that_outgrew_its_declared_ram(own_home: Path) -> None:
    gate = own_home / "gate"
    program = [*ram_hog.COMMAND, "--to", "200", "--over", "0", str(gate)]
    command = [sys.executable, "-m", "gpuyard", "run", "--gpus", "0", "--ram", "100M", "--", *program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "holding 200\n"
    assert "of RAM, more than the 100 MB of --ram; declare" in process.stderr.readline()
    gate.touch()
    _, rest = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, rest) == (0, "")


SCRIPT = """
import sys
from gpuyard import GPUScheduler
with GPUScheduler(vram="1G", ram=sys.argv[1], label="train"):
    kept = bytearray(b"1") * (200 << 20)
"""


@pytest.mark.linux("/proc")
@pytest.mark.usefixtures("two_gpus", "own_home")
@pytest.mark.parametrize(("declared", "is_warned"), [("100M", True), ("1G", False)])
def test_a_script_that_outgrew_its_declared_ram_is_warned_when_it_releases(declared: str, is_warned: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, declared], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("gpuyard: train holds 2" in done.stderr) is is_warned
    assert ("more than the 100 MB of ram=; declare" in done.stderr) is is_warned
