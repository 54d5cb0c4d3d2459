"""The sample logs of batches as files: one per batch, complete, and without effect on runs."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gpuyard.daemon.monitor.sampling import SampleLogs
from gpuyard.queue.batch_gates import COLUMNS

LAUNCH: dict[str, Any] = dict.fromkeys(COLUMNS) | {
    "taken_at": "2026-01-01T00:00:00.000Z", "event": "launch", "job": 7, "index": "3", "device": "GPU-a",
    "cpu_percent": 12.3456, "gpu_memory_charged_mb": 7000.0, "running": 2,
}  # fmt: skip


def test_a_row_has_every_column_and_unknown_values_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    SampleLogs().write([(str(path), LAUNCH)])
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == COLUMNS
    assert (row["event"], row["job"], row["index"], row["device"], row["running"]) == ("launch", "7", "3", "GPU-a", "2")
    assert (row["cpu_percent"], row["gpu_memory_charged_mb"], row["gpu_percent"]) == ("12.35", "7000.0", "")


def test_each_batch_has_its_own_file_in_the_format_of_its_suffix(tmp_path: Path) -> None:
    logs = SampleLogs()
    first, second = tmp_path / "a.csv", tmp_path / "b.jsonl"
    logs.write([(str(first), LAUNCH), (str(second), LAUNCH), (str(first), LAUNCH)])
    logs.write([(str(second), LAUNCH)])
    assert len(first.read_text().splitlines()) == 1 + 2
    rows = [json.loads(line) for line in second.read_text().splitlines()]
    assert [(row["job"], row["gpu_percent"]) for row in rows] == [(7, None)] * 2


def test_a_log_is_continued_by_the_next_daemon(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    for _ in range(2):
        SampleLogs().write([(str(path), LAUNCH)])
    assert path.read_text().count("taken_at") == 1
    assert len(path.read_text().splitlines()) == 3


def test_an_unwritable_log_is_reported_once_and_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs, good = SampleLogs(), tmp_path / "good.csv"
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            logs.write([(str(tmp_path / "nowhere" / "bad.csv"), LAUNCH), (str(good), LAUNCH)])
    assert len(caplog.records) == 1
    assert "bad.csv" in caplog.records[0].message
    assert len(good.read_text().splitlines()) == 1 + 3


def test_a_log_that_is_neither_csv_nor_json_lines_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        SampleLogs().write([(str(tmp_path / "samples.txt"), LAUNCH)])
    assert "samples.txt" in caplog.text
    assert not list(tmp_path.iterdir())
