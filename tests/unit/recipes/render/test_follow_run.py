"""A follower shows the status of a run, writes it to a file, and stops the run."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render import follow_run
from gpuyard.recipes.render.follow_run import Follower, StatusFile
from gpuyard.residency.running.status_file import RenderStatus
from tests.integration.queue_fixture import until
from tests.unit.recipes.render.standing import STATUS, status

DEADLINE_S = 60.0


class Run:
    """It has not begun when it is first looked at."""

    def __init__(self) -> None:
        self.looks = 0
        self.stopped = threading.Event()

    def status(self) -> RenderStatus | None:
        self.looks += 1
        return None if self.looks == 1 else status(rendered=self.looks)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_run, "INTERVAL_S", 0.001)


def test_it_is_shown_and_written_while_it_goes_on(tmp_path: Path) -> None:
    shown: list[RenderStatus] = []
    enough = threading.Event()

    def show(now: RenderStatus) -> None:
        shown.append(now)
        if len(shown) == 3:
            enough.set()

    path = tmp_path / "status.json"
    with Follower(Run(), show, StatusFile(path)):
        assert enough.wait(DEADLINE_S)
        until(path.exists, "a status")
    assert [each.rendered for each in shown] == sorted({each.rendered for each in shown})
    assert json.loads(path.read_text())["rendered"] >= 2
    assert [file.name for file in tmp_path.iterdir() if file.name != "home"] == ["status.json"]


def test_it_is_stopped_by_a_thread_that_holds_no_lock_of_the_run() -> None:
    run = Run()
    with Follower(run, lambda _: None, None) as follower:
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_the_stop_is_shown_once_and_not_before_it_holds() -> None:
    class Slow(Run):
        def stop(self) -> None:
            assert may_stop.wait(DEADLINE_S)
            super().stop()

    run, may_stop, shown = Slow(), threading.Event(), list[bool]()
    with Follower(run, lambda _: None, None, lambda: shown.append(run.stopped.is_set())) as follower:
        follower.stop()
        until(lambda: run.looks > 5, "looks while it is being stopped")
        assert shown == []
        may_stop.set()
        until(lambda: len(shown) > 0, "the stop, shown")
        looks = run.looks
        until(lambda: run.looks > looks + 5, "looks after it")
    assert shown == [True]


def test_a_run_that_had_not_started_is_stopped_again() -> None:
    class Deaf(Run):
        """It hears of nothing before it has begun, as one that waits for its lease."""

        def stop(self) -> None:
            if self.looks > 20:
                self.stopped.set()

    run = Deaf()
    with Follower(run, lambda _: None, None) as follower:
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_the_display_may_go_away(tmp_path: Path) -> None:
    path, run = tmp_path / "status.json", Run()

    def show(_: RenderStatus) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with Follower(run, show, StatusFile(path)) as follower:
        until(lambda: path.exists() and json.loads(path.read_text())["rendered"] > 9, "statuses after that")
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_a_display_that_blocks_delays_neither_file_nor_stop(tmp_path: Path) -> None:
    path, run, looks_again = tmp_path / "status.json", Run(), threading.Event()
    with Follower(run, lambda _: assert_set(looks_again), StatusFile(path)) as follower:
        until(lambda: path.exists() and json.loads(path.read_text())["rendered"] > 9, "statuses meanwhile")
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)
        looks_again.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def test_when_it_is_given_up_the_file_says_so_and_stays(tmp_path: Path) -> None:
    path, run = tmp_path / "status.json", Run()
    with Follower(run, lambda _: None, StatusFile(path)) as follower:
        until(path.exists, "a status")
        follower.abandon()
        assert json.loads(path.read_text())["state"] == "interrupted"
        looks = run.looks
        until(lambda: run.looks > looks + 3, "more looks")
    assert json.loads(path.read_text())["state"] == "interrupted"


def test_a_disk_that_does_not_answer_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, is_asked, answers = tmp_path / "status.json", threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        is_asked.set()
        assert answers.wait(DEADLINE_S)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "write_bytes", hang)
    with Follower(Run(), lambda _: None, StatusFile(path)) as follower:
        assert is_asked.wait(DEADLINE_S)
        follower.abandon()
        assert not path.exists()
        answers.set()


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


def test_by_default_a_run_of_more_than_a_minute_writes_a_status_to_its_outputs(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile.default(tmp_path).write(status(elapsed_s=59.0))
    assert not path.exists()
    StatusFile.default(tmp_path).write(status(elapsed_s=60.0))
    assert json.loads(path.read_text())["elapsed_s"] == 60.0
    StatusFile.default(tmp_path).write(status(elapsed_s=1.0))
    assert json.loads(path.read_text())["elapsed_s"] == 1.0, "what an earlier run left does not stay"


def test_a_path_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write(status(scenes=(os.fsdecode(b"/\xff.ply"),)))
    assert json.loads(path.read_text())["scenes"] == ["/\udcff.ply"]


@pytest.mark.parametrize(("name", "says"), [(".", "is a folder"), ("none/status.json", "there is no folder")])
def test_a_file_that_cannot_be_one_is_refused_before_anything_runs(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        StatusFile(tmp_path / name)


def test_on_a_full_disk_the_last_status_stays_until_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, refused = tmp_path / "status.json", threading.Semaphore(0)
    file = StatusFile(path)
    file.write(STATUS)

    def refuse(*_: Any) -> None:
        refused.release()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", refuse)
        with pytest.raises(EnvironmentFault, match=r"status\.json cannot be written: No space left on device"):
            file.write(STATUS)
        with Follower(Run(), lambda _: None, file):
            assert all(refused.acquire(timeout=DEADLINE_S) for _ in range(3))
            assert json.loads(path.read_text())["rendered"] == STATUS.rendered
            full.undo()
            until(lambda: json.loads(path.read_text())["rendered"] != STATUS.rendered, "a status once more")
