"""Free space is read in the background: nothing ever waits for a disk, and a disk that hangs is recognised."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuyard.policy.disk_and_system_limits import DiskFigure
from gpuyard.probes.disk_watch import (
    FRESH_S,
    NEAR_MB,
    NEAR_S,
    SILENT_S,
    STALE_S,
    DiskWatch,
    read_disk,
    read_disk_in_time,
)

_IN_TIME_S = 30.0
LEAST_MB = 1024.0
PLENTY_MB = LEAST_MB + 2 * NEAR_MB


class Disk:
    """A disk that answers once it is let: each answer is the figure of that moment."""

    def __init__(self) -> None:
        self.free_mb: float | None = PLENTY_MB
        self.now = 100.0
        self.readings = 0
        self.answers = threading.Semaphore(0)
        self.answered = threading.Semaphore(0)
        self.watch = DiskWatch(self.answered.release, self.read, lambda: self.now)

    def read(self, folder: str) -> DiskFigure:
        self.readings += 1
        assert self.answers.acquire(timeout=_IN_TIME_S)
        return DiskFigure(folder=folder, free_mb=self.free_mb, total_mb=1e6)

    def answer(self) -> None:
        """Let it answer a question whose answer is awaited."""
        self.answers.release()
        assert self.answered.acquire(timeout=_IN_TIME_S)

    def free(self) -> float | None:
        figure = self.watch.figure("/data", LEAST_MB)
        assert figure is not None
        return figure.free_mb


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.answers.release(100)  # readings that a test leaves behind


def until(is_true: Callable[[], bool]) -> None:
    """Wait for an answer that was not awaited, and so is not announced."""
    event = threading.Event()
    for _ in range(int(_IN_TIME_S / 0.01)):
        if is_true():
            return
        event.wait(0.01)
    raise AssertionError("too late")


def test_the_first_figure_is_announced_and_kept(disk: Disk) -> None:
    assert disk.watch.figure("/data", LEAST_MB) is None
    disk.answer()
    disk.now += FRESH_S - 1
    assert (disk.free(), disk.readings) == (PLENTY_MB, 1)
    disk.now += STALE_S
    assert disk.watch.figure("/data", LEAST_MB) is None, "a very old figure is not used"
    disk.answer()
    assert disk.free() == PLENTY_MB


def test_an_older_figure_is_used_while_the_disk_is_read_again(disk: Disk) -> None:
    disk.watch.figure("/data", LEAST_MB)
    disk.answer()
    disk.now += FRESH_S + 1
    disk.free_mb = 2 * PLENTY_MB
    assert disk.free() == PLENTY_MB
    disk.answers.release()
    until(lambda: disk.free() == 2 * PLENTY_MB)


def test_near_the_limit_a_figure_lets_jobs_start_for_a_moment_only(disk: Disk) -> None:
    disk.free_mb = LEAST_MB + 1
    disk.watch.figure("/data", LEAST_MB)
    disk.answer()
    assert disk.free() == LEAST_MB + 1
    disk.now += NEAR_S * 2
    assert disk.watch.figure("/data", LEAST_MB) is None
    disk.free_mb = LEAST_MB - 1
    disk.answer()
    disk.now += NEAR_S * 2
    assert disk.free() == LEAST_MB - 1, "below the limit nothing starts, so an older figure does no harm"


def test_a_disk_that_hangs_is_silent_and_the_caller_never_waits(disk: Disk) -> None:
    assert disk.watch.figure("/data", LEAST_MB) is None
    disk.now += SILENT_S + 5
    assert disk.watch.figure("/data", LEAST_MB) == DiskFigure(folder="/data", silent_s=SILENT_S + 5)
    assert disk.readings == 1, "one reading hangs, and no other is begun"
    disk.answers.release()
    until(lambda: (found := disk.watch.figure("/data", LEAST_MB)) is not None and found.silent_s is None)


def test_dead_disks_do_not_use_up_all_threads(disk: Disk) -> None:
    folders = [f"/dead/{number}" for number in range(100)]
    assert None in [disk.watch.figure(folder, LEAST_MB) for folder in folders]
    assert disk.watch.figure("/other", LEAST_MB) == DiskFigure(folder="/other"), "unknown, and no reason to wait"
    assert disk.readings < 50
    for _ in range(disk.readings):
        disk.answers.release()


def test_a_folder_that_does_not_exist_yet_is_on_the_disk_of_the_one_above(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    figure = read_disk(str(tmp_path / "not" / "yet"))
    assert figure.total_mb == pytest.approx(found.f_blocks * found.f_frsize / 1048576)
    assert figure.free_mb is not None
    assert figure.free_mb <= found.f_blocks * found.f_frsize / 1048576


def test_what_has_no_free_space_to_speak_of_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_disk(str(tmp_path / "file" / "below")).free_mb is None
    assert read_disk("/proc").free_mb is None


def test_a_command_waits_for_a_disk_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr("gpuyard.probes.disk_watch.read_disk", lambda _: is_over.wait(_IN_TIME_S))
    assert read_disk_in_time("/dead", 0.01) == DiskFigure(folder="/dead", silent_s=0.01)
    is_over.set()
