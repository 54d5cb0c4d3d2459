"""Whoever follows a run is shown how it stands, finds it in a file, and can have it stopped."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render import following
from gpuyard.recipes.render.following import Follower, StatusFile
from gpuyard.residency.status import Status
from tests.unit.recipes.render.standing import STATUS, status

DEADLINE_S = 60.0


class Run:
    """It has not begun when it is first looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.stopped = threading.Event()

    def status(self) -> Status | None:
        self.looks += 1
        return None if self.looks == 1 else status(rendered=self.looks)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_EVERY_S", 0.001)


def test_it_is_shown_and_written_while_it_goes_on(tmp_path: Path) -> None:
    shown: list[Status] = []
    enough = threading.Event()

    def show(now: Status) -> None:
        shown.append(now)
        if len(shown) == 3:
            enough.set()

    path = tmp_path / "status.json"
    with Follower(Run(), show, StatusFile(path)) as follower:
        assert enough.wait(DEADLINE_S)
    assert [each.rendered for each in shown[:3]] == [2, 3, 4]
    assert json.loads(path.read_text())["rendered"] == shown[-1].rendered
    assert [file.name for file in tmp_path.iterdir() if file.name != "home"] == ["status.json"]
    assert follower.problem is None


def test_it_is_stopped_by_a_thread_that_holds_no_lock_of_the_run() -> None:
    run = Run()
    with Follower(run, lambda _: None, None) as follower:
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_a_reader_finds_a_whole_status_at_any_moment(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    file = StatusFile(path)
    file.write(STATUS)
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            file.write(status(rendered=number, scenes=("/a.ply",) * (number % 50)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = [json.loads(path.read_text())["labels"] for _ in range(300)]
    finally:
        is_over.set()
        writer.join()
    assert seen == [2000] * 300


def test_a_path_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write(status(scenes=(os.fsdecode(b"/\xff.ply"),)))
    assert json.loads(path.read_text())["scenes"] == ["/\udcff.ply"]


@pytest.mark.parametrize(("name", "says"), [(".", "is a folder"), ("none/status.json", "there is no folder")])
def test_a_file_that_cannot_be_one_is_refused_before_anything_runs(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        StatusFile(tmp_path / name)


def test_a_full_disk_is_told_and_the_last_status_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write(STATUS)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    shown = threading.Event()
    with Follower(Run(), lambda now: shown.set() if now.rendered > 3 else None, StatusFile(path)) as follower:
        assert shown.wait(DEADLINE_S)
    assert isinstance(follower.problem, EnvironmentFault)
    assert "No space left on device" in str(follower.problem)
    assert json.loads(path.read_text())["rendered"] == 1200
