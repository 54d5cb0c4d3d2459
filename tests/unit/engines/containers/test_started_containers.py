"""Removing containers that an attempt may have left."""

import select
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines import containers as module
from gpuyard.engines.containers import StartedContainers

_DEADLINE_S = 90.0
_RECORD = "17.1-a0b1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "containers"
    folder.mkdir()
    return folder


@pytest.fixture
def containers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> StartedContainers:
    """With removals that are tried again at once."""
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.02)
    return StartedContainers(str(folder), lambda: None)


def record(folder: Path, script: str) -> None:
    """Write a record as of an earlier daemon. The script is what removes the container `box`."""
    content = {"command": ["sh", "-c", script, "box"], "environment": {"PATH": "/usr/bin:/bin"}}
    (folder / _RECORD).write_bytes(msgspec.json.encode(content))


def collect_until(containers: StartedContainers, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)
        containers.collect()


def kill() -> int:
    raise AssertionError


def test_a_removal_that_fails_is_tried_again_and_logged_once(
    containers: StartedContainers, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tries = tmp_path / "tries"
    record(folder, f"echo >> {tries}; echo no daemon >&2; test $(wc -l < {tries}) = 4")
    containers.take_over(())
    collect_until(containers, containers.problems)
    assert 0 < (containers.next_check_s() or 0) <= 10
    assert "the container box cannot be removed (no daemon): try `sh -c" in containers.problems()[0]
    collect_until(containers, lambda: not (folder / _RECORD).exists())
    assert tries.read_text() == "\n\n\n\n"
    assert [message.count("box") for message in caplog.messages] == [1]
    assert (containers.problems(), containers.next_check_s()) == ([], None)


def test_a_removal_that_hangs_is_killed_and_tried_again(
    containers: StartedContainers,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_LIMIT_S", 0.2)
    hangs = tmp_path / "hangs"
    hangs.touch()
    # Its own child holds the pipe open, too.
    record(folder, f"test ! -e {hangs} || {{ rm {hangs}; sleep 3600; }}")
    containers.take_over({"17.1"})
    assert containers.end("17.1", None, kill)
    collect_until(containers, lambda: not (folder / _RECORD).exists())
    assert not containers.end("17.1", None, kill)
    assert ["it did not end within" in message for message in caplog.messages] == [True]


def test_an_end_is_held_back_for_a_while_only(
    containers: StartedContainers, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LIMIT_S", 0.2)
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 3600.0)
    monkeypatch.setattr(module, "_HOLD_S", 3600.0)
    record(folder, "exec sleep 3600")
    containers.take_over({"17.1"})
    assert not containers.end("16.1", None, kill), "another job's"
    assert containers.end("17.1", 137, kill)
    collect_until(containers, containers.problems)
    assert containers.end("17.1", 137, kill)
    monkeypatch.setattr(module, "_HOLD_S", 0.0)
    assert not containers.end("17.1", 137, lambda: 3)
    assert "container box of job 17 was not removed within 0 s: 3 of its processes" in caplog.messages[-1]


def test_a_container_that_its_tool_has_removed_is_not_waited_for(containers: StartedContainers, folder: Path) -> None:
    record(folder, "exec sleep 3600")
    containers.take_over({"17.1"})
    assert not containers.end("17.1", 1, kill)
    assert not (folder / _RECORD).exists()
