"""Removing containers that an attempt may have left."""

import time
from pathlib import Path

import msgspec
import pytest

from gpuyard.engines.containers import started_containers
from gpuyard.engines.containers.started_containers import StartedContainers
from gpuyard.system.wakeable_poll import WakeablePoll

_DEADLINE_S = 90.0


def test_a_removal_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_containers, "_RETRY_S", 0.0, raising=False)
    tries, folder = tmp_path / "tries", tmp_path / "containers"
    folder.mkdir()
    fails_once = f"echo >> {tries}; test $(wc -l < {tries}) = 2"
    record = {"command": ["sh", "-c", fails_once], "environment": {"PATH": "/usr/bin:/bin"}}
    (folder / "17.1-a0b1").write_bytes(msgspec.json.encode(record))
    poll = WakeablePoll()
    containers = StartedContainers(str(folder), poll)
    containers.take_over(())
    deadline = time.monotonic() + _DEADLINE_S
    while (folder / "17.1-a0b1").exists() and time.monotonic() < deadline:
        containers.collect()
        time.sleep(0.01)
    poll.close()
    assert tries.read_text() == "\n\n"
    assert not (folder / "17.1-a0b1").exists()
