"""A follower shows the status of a run, writes it to a file, and stops the run."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.recipes.render import status_file as follow_run
from gpuyard.recipes.render.status_file import Follower, RenderStatus, StatusFile
from tests.integration.queue_fixture import until
from tests.unit.recipes.render.example_status import STATUS, status

DEADLINE_S = 60.0


class Run:
    """A run that has no status at the first poll."""

    def __init__(self) -> None:
        self.polls = 0
        self.stopped = threading.Event()

    def status(self) -> RenderStatus | None:
        self.polls += 1
        return None if self.polls == 1 else status(rendered=self.polls)

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_run, "INTERVAL_S", 0.001)


def test_the_status_is_shown_and_written_during_the_run(tmp_path: Path) -> None:
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


def test_the_run_is_stopped_by_a_thread_that_holds_none_of_its_locks() -> None:
    run = Run()
    with Follower(run, lambda _: None, None) as follower:
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_the_stop_is_shown_once_and_only_when_it_is_done() -> None:
    class Slow(Run):
        def stop(self) -> None:
            assert may_stop.wait(DEADLINE_S)
            super().stop()

    run, may_stop, shown = Slow(), threading.Event(), list[bool]()
    with Follower(run, lambda _: None, None, lambda: shown.append(run.stopped.is_set())) as follower:
        follower.stop()
        until(lambda: run.polls > 5, "polls while it is being stopped")
        assert shown == []
        may_stop.set()
        until(lambda: len(shown) > 0, "the stop, shown")
        polls = run.polls
        until(lambda: run.polls > polls + 5, "polls after it")
    assert shown == [True]


def test_a_run_that_had_not_started_is_stopped_again() -> None:
    class Deaf(Run):
        """Ignores stop before it has started, as a run that waits for its lease does."""

        def stop(self) -> None:
            if self.polls > 20:
                self.stopped.set()

    run = Deaf()
    with Follower(run, lambda _: None, None) as follower:
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_a_failing_display_does_not_end_the_run(tmp_path: Path) -> None:
    path, run = tmp_path / "status.json", Run()

    def show(_: RenderStatus) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    with Follower(run, show, StatusFile(path)) as follower:
        until(lambda: path.exists() and json.loads(path.read_text())["rendered"] > 9, "statuses after that")
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)


def test_a_display_that_blocks_delays_neither_file_nor_stop(tmp_path: Path) -> None:
    path, run, is_released = tmp_path / "status.json", Run(), threading.Event()
    with Follower(run, lambda _: assert_set(is_released), StatusFile(path)) as follower:
        until(lambda: path.exists() and json.loads(path.read_text())["rendered"] > 9, "statuses meanwhile")
        follower.stop()
        assert run.stopped.wait(DEADLINE_S)
        is_released.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(DEADLINE_S)


def test_a_run_that_was_abandoned_keeps_its_status_file_and_is_marked(tmp_path: Path) -> None:
    path, run = tmp_path / "status.json", Run()
    with Follower(run, lambda _: None, StatusFile(path)) as follower:
        until(path.exists, "a status")
        follower.abandon()
        assert json.loads(path.read_text())["state"] == "interrupted"
        polls = run.polls
        until(lambda: run.polls > polls + 3, "more polls")
    assert json.loads(path.read_text())["state"] == "interrupted"


def test_a_hanging_disk_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_reader_always_finds_a_complete_status(tmp_path: Path) -> None:
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
        counts = [json.loads(path.read_text())["labels"] for _ in range(300)]
    finally:
        is_over.set()
        writer.join()
    assert counts == [2000] * 300


def test_by_default_a_run_of_more_than_a_minute_writes_a_status_to_its_outputs(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile.default(tmp_path).write(status(elapsed_s=59.0))
    assert not path.exists()
    StatusFile.default(tmp_path).write(status(elapsed_s=60.0))
    assert json.loads(path.read_text())["elapsed_s"] == 60.0
    StatusFile.default(tmp_path).write(status(elapsed_s=1.0))
    assert json.loads(path.read_text())["elapsed_s"] == 1.0, "the status of an earlier run is replaced"


def test_a_path_that_is_not_text_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    StatusFile(path).write(status(scenes=(os.fsdecode(b"/\xff.ply"),)))
    assert json.loads(path.read_text())["scenes"] == ["/\udcff.ply"]


@pytest.mark.parametrize(("name", "message"), [(".", "is a folder"), ("none/status.json", "there is no folder")])
def test_an_invalid_status_file_is_refused_before_the_run(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        StatusFile(tmp_path / name)


def test_on_a_full_disk_the_last_status_stays_until_there_is_space(
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
