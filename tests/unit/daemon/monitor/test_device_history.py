"""The usage history: means per step, in bounded memory."""

from gpuyard.daemon.monitor.devices import MAX_POINTS, HistorySpan, UsageSeries
from gpuyard.schema.machine import HostSeries


def test_the_samples_of_a_step_are_one_point_and_unknown_values_are_ignored() -> None:
    series = UsageSeries(("a", "b"), 10.0)
    for at, row in ((100.0, (1.0, None)), (104.0, (2.0, None)), (109.0, (None, None)), (125.0, (7.0, 5.0))):
        series.add(at, row)
    assert series.since(0.0) == {"at": [100.0, 120.0], "a": [1.5, 7.0], "b": [None, 5.0]}
    assert series.since(100.0)["at"] == [120.0]


def test_the_number_of_points_is_bounded() -> None:
    span = HistorySpan(600)
    for second in range(2000):
        span.add(float(second), {"GPU-a": (1.0,) * 6}, (50.0, 100.0))
    answer = span.as_answer(2000.0)
    at = answer.devices["GPU-a"].at
    assert MAX_POINTS - 1 <= len(at) <= MAX_POINTS
    assert (at[-1], at[0] > 1400 - 2 * answer.step_s) == (1998.0, True)
    assert set(answer.host.cpu_percent) == {50.0}


def test_time_without_samples_is_a_gap_and_a_removed_device_keeps_its_history() -> None:
    span = HistorySpan(3600)
    span.add(1000.0, {"GPU-a": (1.0,) * 6}, (None, None))
    span.add(3000.0, {"GPU-b": (2.0,) * 6}, (None, None))
    answer = span.as_answer(3600.0)
    assert answer.devices["GPU-a"].at == [996.0]
    assert answer.host == HostSeries(at=[996.0, 3000.0], cpu_percent=[None, None], memory_used_mb=[None, None])
    assert span.as_answer(4700.0).devices["GPU-a"].at == []
