"""The daemon's own log stays within a limit."""

import logging
import sys
from pathlib import Path

import pytest

from gpuyard.daemon import main

RECORD = logging.LogRecord("gpuyard", logging.ERROR, __file__, 1, "x" * 500, None, None)


def write_records(log: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> int:
    """Write to a log through standard error, and return how many bytes it holds on disk."""
    with log.open("a", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        handler = main.CappedLogHandler()
        for _ in range(count):
            handler.emit(RECORD)
    return log.stat().st_blocks * 512


def test_the_log_of_the_daemon_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path))
    monkeypatch.setattr(main, "_LOG_CAP", 1 << 17)
    log = tmp_path / "daemon.log"
    assert write_records(log, monkeypatch, 2000) <= 2 << 17


def test_another_file_that_gets_the_messages_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUYARD_HOME", str(tmp_path))
    monkeypatch.setattr(main, "_LOG_CAP", 1 << 17)
    (tmp_path / "daemon.log").write_bytes(b"")
    assert write_records(tmp_path / "own.log", monkeypatch, 2000) > 900_000
