"""What is kept of how the machine was used: means over steps, and never more than so many."""

from gpuyard.daemon.monitor.device_history import MOST_POINTS, Span, UsageSeries


def test_what_was_seen_within_a_step_is_one_point_and_the_unknown_counts_for_nothing() -> None:
    series = UsageSeries(("a", "b"), 10.0)
    for at, figures in ((100.0, (1.0, None)), (104.0, (2.0, None)), (109.0, (None, None)), (125.0, (7.0, 5.0))):
        series.add(at, figures)
    assert series.since(0.0) == {"at": [100.0, 120.0], "a": [1.5, 7.0], "b": [None, 5.0]}
    assert series.since(100.0)["at"] == [120.0]


def test_however_long_it_goes_on_only_so_much_is_kept() -> None:
    span = Span(600)
    for second in range(2000):
        span.add(float(second), {"GPU-a": (1.0,) * 6}, (50.0, 100.0))
    told = span.told(2000.0)
    at = told["devices"]["GPU-a"]["at"]
    assert MOST_POINTS - 1 <= len(at) <= MOST_POINTS
    assert (at[-1], at[0] > 1400 - 2 * told["step_s"]) == (1998.0, True)
    assert set(told["host"]["cpu_percent"]) == {50.0}


def test_while_nobody_looks_there_is_a_gap_and_a_device_that_is_gone_keeps_its_past() -> None:
    span = Span(3600)
    span.add(1000.0, {"GPU-a": (1.0,) * 6}, (None, None))
    span.add(3000.0, {"GPU-b": (2.0,) * 6}, (None, None))
    told = span.told(3600.0)
    assert told["devices"]["GPU-a"]["at"] == [996.0]
    assert told["host"] == {"at": [996.0, 3000.0], "cpu_percent": [None, None], "memory_used_mb": [None, None]}
    assert span.told(4700.0)["devices"]["GPU-a"]["at"] == []
