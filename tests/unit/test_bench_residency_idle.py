"""The parts of `bench.residency_idle` that need no card."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.lock_probe import IssueTimes, percentiles_us
from bench.pinned_slabs import PinnedSlabs

ROOT = Path(__file__).parents[2]
MB = 1048576


class RecordingDriver:
    """Records pinned mappings, and can refuse them."""

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, start: int, nbytes: int, flags: int) -> int:  # noqa: N802 - the driver's name
        assert not flags
        self.pinned[start] = nbytes
        return self._error

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.pinned[start]
        return 0


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


def test_pages_of_slabs_are_writable_and_do_not_overlap() -> None:
    driver = RecordingDriver()
    slabs = PinnedSlabs(driver, 4 * MB)
    pages = [slabs.page(MB) for _ in range(6)]
    for number, page in enumerate(pages):
        page[:] = bytes([number]) * MB
    assert [set(page) for page in pages] == [{number} for number in range(6)]
    assert list(driver.pinned.values()) == [4 * MB, 4 * MB]
    assert all(start % (2 * MB) == 0 for start in driver.pinned), "huge pages begin at multiples of their size"
    slabs.close()
    assert not driver.pinned


def test_memory_that_cannot_be_pinned_is_an_error() -> None:
    with pytest.raises(MemoryError, match="error 2"):
        PinnedSlabs(RecordingDriver(error=2), 4 * MB).page(MB)


def test_a_tiny_run_compares_its_parts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.residency_idle", str(tmp_path), "--tiny", "--parts", "transfers,whole"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| transfers only", "| whole run"]
    assert "failed" not in result.stdout
