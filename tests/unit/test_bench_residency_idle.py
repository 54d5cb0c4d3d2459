"""The parts of `bench.residency_idle` that need no card."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from bench.lock_probe import IssueTimes, percentiles_us

ROOT = Path(__file__).parents[2]


def test_percentiles_are_in_microseconds() -> None:
    assert percentiles_us([1e-6 * n for n in range(101)]) == {"mean": 50.0, "median": 50.0, "90%": 90.0, "99%": 99.0}
    assert percentiles_us([]) == {}


def test_issue_times_are_means_since_the_last_call() -> None:
    owner = SimpleNamespace(draw=lambda number: number + 1)
    times = IssueTimes()
    times.wrap(owner, "draw")
    assert owner.draw(1) == 2
    assert set(times.take()) == {"wall_ms", "cpu_ms", "waiting_ms"}
    assert times.take() == {}


def test_a_tiny_run_compares_its_parts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "bench.residency_idle",
        str(tmp_path),
        "--tiny",
        "--parts",
        "transfers,whole,before",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| transfers only", "| whole run", "| whole run as before"]
    assert "failed" not in result.stdout
