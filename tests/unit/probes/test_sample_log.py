import csv
import json
from pathlib import Path

import pytest

from gpuyard.errors import EnvironmentFault, UserError
from gpuyard.model.machine_snapshot import Device, Host, Sample, Snapshot, Vendor
from gpuyard.probes.sample_log import COLUMNS, RowLog, SampleLog

DEVICES = (
    Device(id="GPU-a", vendor=Vendor.NVIDIA, index=0, name="Test, with comma", memory_used_mb=5.5, processes=()),
    Device(id="GPU-b", vendor=Vendor.AMD, index=1, fault="lost"),
)
SAMPLE = Sample(
    snapshot=Snapshot(
        taken_at=1763176632.0,
        host=Host(name="box", cpu_percent=12.5, memory_total_mb=1000.0, memory_available_mb=400.0, load_1m=0.5),
        devices=DEVICES,
    ),
    cpu_percent=11.119,
    loads={"GPU-a": 33.333, "GPU-b": None},
)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_has_a_row_for_the_host_and_for_each_device_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    for _ in range(2):
        SampleLog(path).write(SAMPLE)
    rows = rows_of(path)
    assert path.read_text().count("taken_at") == 1
    assert [row["kind"] for row in rows] == ["host", "device", "device"] * 2
    host, first, second = rows[:3]
    figures = ("taken_at", "name", "utilization_percent", "memory_used_mb", "utilization_smoothed_percent")
    assert [host[each] for each in figures] == ["2025-11-15T03:17:12.000Z", "box", "12.5", "600.0", "11.12"]
    assert [first[each] for each in figures[1:]] == ["Test, with comma", "", "5.5", "33.33"]
    assert (first["process_count"], first["healthy"], second["healthy"]) == ("0", "True", "False")


def test_an_unknown_value_is_an_empty_cell_or_null_and_never_zero(tmp_path: Path) -> None:
    SampleLog(tmp_path / "usage.csv").write(SAMPLE)
    SampleLog(tmp_path / "usage.jsonl").write(SAMPLE)
    in_csv = rows_of(tmp_path / "usage.csv")[2]
    in_json = json.loads((tmp_path / "usage.jsonl").read_text().splitlines()[2])
    for figure in ("memory_used_mb", "utilization_percent", "power_draw_w", "process_count"):
        assert in_csv[figure] == ""
        assert in_json[figure] is None
    assert in_json["healthy"] is False


@pytest.mark.parametrize("name", ["usage.csv", "usage.jsonl"])
def test_a_full_file_is_rotated_and_some_are_kept(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuyard.probes.sample_log.MAX_BYTES", 1500)
    monkeypatch.setattr("gpuyard.probes.sample_log.KEPT_FILES", 2)
    log = SampleLog(tmp_path / name)
    for _ in range(40):
        log.write(SAMPLE)
    files = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert files == [name, f"{name}.1", f"{name}.2"]
    assert all((tmp_path / file).stat().st_size <= 1500 for file in files)
    if name.endswith(".csv"):
        assert all((tmp_path / file).read_text().startswith("taken_at,") for file in files)


def test_a_csv_file_with_other_columns_is_moved_aside_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "usage.csv"
    path.write_text("somebody,else\n1,2\n")
    SampleLog(path).write(SAMPLE)
    assert (tmp_path / "usage.csv.1").read_text() == "somebody,else\n1,2\n"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)


def test_a_file_that_cannot_be_used_is_refused_before_sampling(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"usage\.txt"):
        SampleLog(tmp_path / "usage.txt")
    with pytest.raises(EnvironmentFault, match="No such file or directory"):
        SampleLog(tmp_path / "nowhere" / "usage.csv")


def test_rows_with_any_columns_are_written_in_order_also_after_the_file_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "batch.csv"
    RowLog(path, ("event", "job")).write_rows([{"job": 7, "event": "launch"}, {"event": "sample", "job": None}])
    assert path.read_text() == "event,job\nlaunch,7\nsample,\n"
    path = tmp_path / "batch.csv"
    log = RowLog(path, ("event",))
    log.write_rows([{"event": "first"}])
    path.unlink()
    log.write_rows([{"event": "second"}])
    assert path.read_text() == "event\nsecond\n"
    path = tmp_path / "batch.jsonl"
    log = RowLog(path, ("event",))
    log.write_rows([])
    log.write_rows([{"event": "first"}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"event": "first"}]
