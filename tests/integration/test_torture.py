"""The torture run itself, for less than a minute; `make test-full` tortures with all faults for some minutes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A fault of each kind, and each quick: what all the others do is left to the full run.
SHORT = (
    "kill daemon,kill keeper,kill daemon and keeper,stop daemon,stop keeper,terminate daemon,limit nofile of keeper,"
    "no processes for keeper,I/O errors in daemon,clock forward,fill home,use up inodes of logs,garbage in the ledger,"
    "remove socket"
)

pytestmark = [
    pytest.mark.linux("namespaces, LD_PRELOAD and /proc"),
    pytest.mark.usefixtures("unmeasured"),
    pytest.mark.timeout(900),
]


def torture(folder: Path, *options: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "torture"), "--work", str(folder), "--recovery", "120", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_queue_survives_a_short_torture(tmp_path: Path) -> None:
    report = torture(tmp_path / "t", "--minutes", "0.3", "--seed", "20", "--faults", SHORT)
    assert "\nviolations: 0\n" in report
    assert "jobs: 0 " not in report


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_a_queue_survives_all_faults(tmp_path: Path, seed: int) -> None:
    assert "\nviolations: 0\n" in torture(tmp_path / "t", "--minutes", "4", "--seed", str(seed))
