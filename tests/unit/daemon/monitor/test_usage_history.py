"""The usage history: means per step, in bounded memory, and what the next daemon takes from the file."""

from pathlib import Path

import msgspec
import pytest

from gpuyard.daemon.monitor.usage_history import HOST, MAX_POINTS, HistorySpan, StoredHistory, Values, read_history
from gpuyard.schema.machine import HostSeries

ROW: Values = (1.0, 2.0, 3.0, 4.0, 5.0, None)
OF_HOST: Values = (10.0, 20.0)


def filled(until: int) -> HistorySpan:
    span = HistorySpan(600)
    for at in range(until):
        span.add(float(at), {HOST: OF_HOST, "GPU-a": ROW})
    return span


def test_the_samples_of_a_step_are_one_point_and_unknown_values_are_ignored() -> None:
    span = HistorySpan(600)
    for at, row in ((100.0, (1.0, None)), (101.0, (2.0, None)), (101.5, (None, None)), (125.0, (7.0, 5.0))):
        span.add(at, {HOST: row})
    assert span.as_answer(130.0).host == HostSeries(
        at=[100.0, 124.0], cpu_percent=[1.5, 7.0], memory_used_mb=[None, 5.0]
    )


def test_the_number_of_points_is_bounded() -> None:
    answer = filled(2000).as_answer(2000.0)
    at = answer.devices["GPU-a"].at
    assert MAX_POINTS - 1 <= len(at) <= MAX_POINTS
    assert (at[-1], at[0] > 1400 - 2 * answer.step_s) == (1998.0, True)
    stored = {HOST: [(float(at) / 100, OF_HOST) for at in range(10 * MAX_POINTS)]}
    span = HistorySpan(600)
    span.restore(stored | {f"GPU-{number}": [(1.0, ROW)] for number in range(1000)}, now=100.0)
    assert (len(span.points()), len(span.points()[HOST])) == (257, MAX_POINTS)


def test_time_without_samples_is_a_gap_and_a_removed_device_keeps_its_history() -> None:
    span = HistorySpan(3600)
    span.add(1000.0, {HOST: (None, None), "GPU-a": ROW})
    span.add(3000.0, {HOST: (None, None), "GPU-b": ROW})
    answer = span.as_answer(3600.0)
    assert answer.devices["GPU-a"].at == [996.0]
    assert answer.host == HostSeries(at=[996.0, 3000.0], cpu_percent=[None, None], memory_used_mb=[None, None])
    assert "GPU-a" not in span.as_answer(4700.0).devices


def test_the_next_daemon_goes_on_with_what_was_stored(tmp_path: Path) -> None:
    before, after = filled(100), HistorySpan(600)
    (tmp_path / "file").write_bytes(msgspec.json.encode(StoredHistory(spans={"10m": before.points()})))
    (tmp_path / "file").chmod(0o600)
    after.restore(read_history(tmp_path / "file").spans["10m"], now=100.0)
    assert after.as_answer(100.0) == before.as_answer(100.0)
    after.add(103.0, {"GPU-a": ROW})
    assert after.as_answer(103.0).devices["GPU-a"].at[-2:] == [98.0, 102.0]


def test_what_is_too_old_or_of_the_future_or_of_other_columns_is_dropped() -> None:
    points = {**filled(700).points(), "GPU-b": [(450.0, OF_HOST)]}

    def times(now: float) -> list[float]:
        span = HistorySpan(600)
        span.restore(points, now)
        assert "GPU-b" not in span.as_answer(now).devices
        return span.as_answer(now).host.at

    assert times(5_000.0) == []
    assert (times(1_000.0)[0], times(1_000.0)[-1], times(300.0)[-1]) == (402.0, 698.0, 300.0)


@pytest.mark.parametrize("content", [b"", b"{", b'{"spans": 7}', b'{"spans": {}, "format": 99}', b"\xff" * 100])
def test_a_file_that_cannot_be_used_is_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "file").chmod(0o600)
    assert read_history(tmp_path / "file").spans == {}
    assert read_history(tmp_path / "missing").spans == {}
