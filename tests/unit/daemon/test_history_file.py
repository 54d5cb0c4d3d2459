"""The history of the devices in a file: what the next daemon takes from it."""

from pathlib import Path

import pytest

from gpuyard.daemon.monitor.devices import MAX_POINTS, HistorySpan
from gpuyard.daemon.monitor.history_file import NAME, HistoryFile, StoredHistory, StoredSpan

ROW: tuple[float | None, ...] = (1.0, 2.0, 3.0, 4.0, 5.0, None)
HOST: tuple[float | None, ...] = (10.0, 20.0)


def filled(until: int) -> HistorySpan:
    span = HistorySpan(600)
    for at in range(until):
        span.add(float(at), {"GPU-a": ROW}, HOST)
    return span


def restored(stored: StoredSpan, now: float) -> HistorySpan:
    span = HistorySpan(600)
    span.restore(stored, now)
    return span


def test_the_next_daemon_goes_on_with_what_was_stored(tmp_path: Path) -> None:
    file, before = HistoryFile(tmp_path), filled(100)
    file.write(StoredHistory(spans={"10m": before.stored()}))
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    found = file.read()
    assert found is not None
    after = restored(found.spans["10m"], now=100.0)
    assert after.as_answer(100.0) == before.as_answer(100.0)
    after.add(103.0, {"GPU-a": ROW}, HOST)
    assert after.as_answer(103.0).devices["GPU-a"].at[-2:] == [98.0, 102.0]


def test_what_is_too_old_or_of_the_future_is_dropped() -> None:
    stored = filled(700).stored()
    assert restored(stored, now=5_000.0).as_answer(5_000.0).devices == {}, "a device that was not seen since"
    some = restored(stored, now=1_000.0).as_answer(1_000.0)
    assert (some.devices["GPU-a"].at[0], some.host.at[-1]) == (402.0, 698.0)
    assert restored(stored, now=300.0).as_answer(300.0).host.at[-1] == 300.0


def test_the_size_is_bounded() -> None:
    points = [(float(at) / 100, HOST) for at in range(10 * MAX_POINTS)]
    devices = {f"GPU-{number}": [(1.0, ROW)] for number in range(1000)}
    span = restored(StoredSpan(host=points, devices=devices), now=100.0)
    stored = span.stored()
    assert (len(stored.host), len(stored.devices)) == (MAX_POINTS, 256)


def test_rows_with_other_columns_are_left_out() -> None:
    stored = StoredSpan(host=[(1.0, (1.0,)), (2.0, HOST)], devices={"GPU-a": [(1.0, HOST)]})
    answer = restored(stored, now=10.0).as_answer(10.0)
    assert (answer.host.at, answer.devices) == ([2.0], {})


@pytest.mark.parametrize("content", [b"", b"{", b'{"spans": 7}', b'{"spans": {}, "format": 99}', b"\xff" * 100])
def test_a_file_that_cannot_be_used_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    (tmp_path / NAME).chmod(0o600)
    assert HistoryFile(tmp_path).read() is None


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = HistoryFile(tmp_path / "gone")
    for _ in range(2):
        file.write(StoredHistory(spans={}))
    assert caplog.text.count("cannot be written") == 1
    assert file.read() is None
