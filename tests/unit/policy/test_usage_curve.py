"""The use of an attempt, sample by sample."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job import Attempt, Started, Usage
from gpuyard.policy.usage_curve import MOST_POINTS, add_sample, devices_to_watch, holds_more_than_reserved

looks = st.lists(st.tuples(st.floats(0.0, 80_000.0), st.floats(0.0, 80_000.0)), min_size=1, max_size=400)


def watched(*looks: Mapping[str, float]) -> Usage:
    """Return the usage after one sample per second."""
    usage = Usage()
    for second, memory in enumerate(looks):
        usage = add_sample(usage, float(second), memory)
    return usage


@given(looks)
def test_the_curve_is_bounded_in_order_and_keeps_the_peak(looks: list[tuple[float, float]]) -> None:
    usage = watched(*({"G0": first, "G1": second} for first, second in looks))
    assert len(usage.curve) <= MOST_POINTS
    times = [at for at, _ in usage.curve]
    assert times == sorted(set(times))
    assert times[0] == 0.0
    assert max(used for _, used in usage.curve) == pytest.approx(max(map(sum, looks)), abs=0.06)
    assert usage.peaks_mb == {"G0": max(first for first, _ in looks), "G1": max(second for _, second in looks)}
    assert usage.peak_mb == max(usage.peaks_mb.values())


def test_points_are_equally_far_apart_however_often_memory_was_read() -> None:
    """The first ten seconds are read ten times a second, the next hour once a second."""
    usage = Usage()
    for at_s in (*(tenth / 10 for tenth in range(100)), *map(float, range(10, 3600))):
        usage = add_sample(usage, at_s, {"G0": 5000.0 if at_s == 5.3 else 1000.0})
    times = [at for at, _ in usage.curve]
    assert max(after - before for before, after in itertools.pairwise(times)) <= 64.0
    assert sum(at < 128.0 for at in times) == 2
    assert max(used for _, used in usage.curve) == 5000.0


@given(st.lists(st.floats(0.0, 0.02), min_size=120, max_size=200))
def test_slow_growth_counts_as_growth(growth: list[float]) -> None:
    """However small each step is: memory is flat only while it stays constant."""
    used = 4096.0
    usage = Usage()
    trace: list[float] = []
    for second, part in enumerate(growth):
        used *= 1.0 + part
        trace.append(used)
        usage = add_sample(usage, float(second), {"G0": used})
    flat_since = next(second for second, level in enumerate(trace) if level * 1.02 >= used)
    assert usage.grew_at_s >= flat_since


def test_constant_memory_does_not_grow_and_unknown_figures_change_nothing() -> None:
    usage = watched({"G0": 4000.0}, {"G0": 4010.0}, {"G0": 3000.0}, {"G0": 4079.0})
    assert (usage.grew_at_s, usage.peaks_mb) == (0.0, {"G0": 4079.0})
    assert add_sample(usage, 9.0, {"G0": 4081.0}).grew_at_s == 9.0, "constant memory does not grow"
    before = watched({"G0": 4000.0, "G1": 100.0})
    assert add_sample(before, 5.0, {"G0": None}) == before
    after = add_sample(before, 5.0, {"G1": 300.0})
    assert after.peaks_mb == {"G0": 4000.0, "G1": 300.0}, "unknown figures of a sample change nothing"


def test_ram_and_load_are_the_most_and_the_mean_over_time() -> None:
    usage = Usage()
    for at_s, ram_mb, load in ((0.0, None, None), (1.0, 500.0, 20.0), (4.0, None, None), (9.0, 300.0, 60.0)):
        usage = add_sample(usage, at_s, {}, ram_mb=ram_mb, load_percent=load)
    assert (usage.ram_mb, usage.load_percent) == (500.0, 20.0), "RAM and load are the most and the mean"
    assert add_sample(usage, 10.0, {}, load_percent=0.0).load_percent == 30.0, "3 s at 20% and 1 s at 60%"
    # Many samples while a program starts count no more than their time.
    usage = Usage()
    for tick in range(40):  # imports: twenty samples a second for 2 s
        usage = add_sample(usage, tick / 20, {}, load_percent=0.0)
    for second in range(2, 21):
        usage = add_sample(usage, float(second), {}, load_percent=90.0)
    assert usage.load_percent == pytest.approx(81.0)


def running_attempt(
    usage: Usage | None = None, devices: tuple[str, ...] = ("G0",), reserved_mb: float | None = None
) -> Attempt:
    return Attempt(job_id=1, number=1, phase=Started(at=1000.0), devices=devices, usage=usage, reserved_mb=reserved_mb)


def used(grew_at_s: float) -> Usage:
    return Usage(peaks_mb={"G0": 4000.0}, grew_at_s=grew_at_s)


def test_which_devices_are_read_often() -> None:
    assert devices_to_watch([running_attempt(used(8.0), ("G0", "G1"))], 1010.0) == {"G0", "G1"}
    assert devices_to_watch([running_attempt(used(8.0))], 1014.0) == frozenset()
    both = [running_attempt(used(8.0)), running_attempt(used(14.0), ("G1",))]
    assert devices_to_watch(both, 1015.0) == {"G1"}, "the devices of a growing first run are read often"
    # A program that has not used its device is awaited for two minutes.
    assert devices_to_watch([running_attempt()], 1100.0) == {"G0"}
    assert devices_to_watch([running_attempt(Usage(ram_mb=500.0))], 1100.0) == {"G0"}
    assert devices_to_watch([running_attempt()], 1121.0) == frozenset()
    assert holds_more_than_reserved(running_attempt(used(0.0), reserved_mb=3000.0))
    assert not holds_more_than_reserved(running_attempt(used(0.0), reserved_mb=3900.0)), "drivers round"
    assert not holds_more_than_reserved(running_attempt(used(0.0))), (
        "a job that outgrows its declared memory is noticed"
    )
    assert not holds_more_than_reserved(running_attempt(reserved_mb=3000.0))
