"""The lease of a running job without an estimate follows what is measured. A card has 24 GB."""

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job import Usage
from gpuyard.model.lease import Share
from gpuyard.policy.device_state import margin_mb
from gpuyard.policy.estimates import (
    FLAT_S,
    ExpectedPeak,
    Moments,
    Profile,
    assumed_peak,
    learn_climb,
    missing_part,
    narrowed,
    peak_while_running,
    sureness_of,
)
from gpuyard.policy.numbers import ALONE_FLAT_S, MACHINE_WEIGHT, PROGRAM_WEIGHT
from gpuyard.policy.sizing import KnownRuns
from gpuyard.policy.usage_curve import Newcomer
from tests.unit.policy.test_placement import CARD, GB
from tests.unit.policy.test_sizing import attempt

SIZES = {"G0": CARD, "G1": CARD}
SURENESS = 1.28


def adjust(share: Share, usage: Usage | None, ran_s: float, known: KnownRuns | None = None) -> Share:
    newcomer = Newcomer(attempt(usage), known or KnownRuns(), ran_s)
    return newcomer.adjusted_shares([share], SIZES, SURENESS)[0]


def uncertain(**changes: Any) -> Share:
    fields = {"memory_mb": 6 * GB, "spread_mb": 6 * GB, "is_exclusive": False, **changes}
    return Share(device_id="G0", **fields)


def most_mb(share: Share) -> float:
    return (share.memory_mb or 0.0) + SURENESS * share.spread_mb


def test_a_running_job_is_charged_by_what_it_and_its_program_showed() -> None:
    assert adjust(uncertain(), None, 30.0) == uncertain(), "before it uses memory it is charged what is expected"
    small = KnownRuns(running_mb=(1000.0,) * 9)
    assert most_mb(adjust(uncertain(), None, 30.0, small)) < 5 * GB, "others of its program have shown what they use"
    # A program that is known to grow late keeps its charge.
    late = Profile(is_exact=False, climb=tuple(Moments(30.0, 15.0, 7.5) for _ in FLAT_S))
    usage = Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0)
    usual = adjust(uncertain(), usage, 30.0)
    assert most_mb(adjust(uncertain(), usage, 30.0, KnownRuns(program=late))) > most_mb(usual) + GB


def test_the_charge_follows_its_own_climb_and_falls_while_it_is_flat() -> None:
    charges = [
        most_mb(adjust(uncertain(), Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0), 10.0 + flat_s))
        for flat_s in (0.0, *FLAT_S)
    ]
    assert charges == sorted(charges, reverse=True)
    assert charges[0] > 10 * GB
    assert 5 * GB < charges[-1] < 7 * GB
    large = adjust(uncertain(), Usage(peaks_mb={"G0": 18 * GB}, grew_at_s=10.0), 11.0)
    assert most_mb(large) > CARD, "a lease may come to reserve more than at its start"


def test_a_lease_stays_as_it_is_or_shrinks() -> None:
    usage = Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0)
    after = adjust(uncertain(), usage, 14.0)
    slightly_more = Usage(peaks_mb={"G0": 5 * GB + 20.0}, grew_at_s=10.0)
    assert adjust(after, slightly_more, 15.0) is after, "small changes leave the lease as it is"
    assert adjust(after, Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0, load_percent=80.0), 15.0).load_percent == 80.0
    part = Share(device_id="G0", memory_mb=8 * GB, is_exclusive=False)
    assert adjust(part, Usage(peaks_mb={"G0": 7.9 * GB}), 100.0) == part
    shrunk = adjust(part, Usage(peaks_mb={"G0": 2 * GB}), 100.0)
    assert 2 * GB < (shrunk.memory_mb or 0.0) < 4 * GB, "the part of a device that a tag shares never grows"
    # A device of unknown size is left alone.
    newcomer = Newcomer(attempt(Usage(peaks_mb={"G0": 8 * GB})), KnownRuns(), 300.0)
    assert newcomer.adjusted_shares([Share(device_id="G0")], {}, SURENESS) == (Share(device_id="G0"),)


@pytest.mark.parametrize(
    ("usage", "ran_s"),
    [
        pytest.param(None, 300.0, id="its use was never measured"),
        pytest.param(Usage(peaks_mb={"G1": 2 * GB}), 300.0, id="its use was measured on another device"),
        pytest.param(Usage(peaks_mb={"G0": 8 * GB}), ALONE_FLAT_S - 1.0, id="it has just started"),
        pytest.param(Usage(peaks_mb={"G0": 8 * GB}, grew_at_s=290.0), 300.0, id="it grew a moment ago"),
        pytest.param(Usage(peaks_mb={"G0": 23 * GB}), 300.0, id="it would leave nothing to others"),
    ],
)
def test_a_job_that_holds_a_device_alone_keeps_it_while_it_may_grow(usage: Usage | None, ran_s: float) -> None:
    assert adjust(Share(device_id="G0"), usage, ran_s).is_exclusive


def test_others_may_join_a_job_that_held_a_device_alone_and_was_flat() -> None:
    joined = adjust(Share(device_id="G0"), Usage(peaks_mb={"G0": 8 * GB}, load_percent=40.0), 300.0)
    assert not joined.is_exclusive
    assert joined.load_percent == 40.0
    assert 8 * GB < most_mb(joined) < 12 * GB


@given(st.floats(1.0, CARD), st.floats(0.0, 5000.0), st.floats(0.0, 5000.0))
def test_a_lease_always_reserves_what_its_job_holds(peak_mb: float, grew_at_s: float, ran_s: float) -> None:
    usage = Usage(peaks_mb={"G0": peak_mb}, grew_at_s=min(grew_at_s, ran_s))
    after = adjust(uncertain(memory_mb=0.0, spread_mb=1.0), usage, ran_s)
    assert most_mb(after) >= peak_mb * 0.95 - 128.0


sizes_mb = st.floats(100.0, 200 * GB)
peak_lists = st.lists(st.floats(0.0, 100 * GB), max_size=32)


def test_a_first_run_is_expected_to_take_a_part_and_what_runs_showed() -> None:
    assert assumed_peak(8 * GB) == ExpectedPeak(2 * GB, 2 * GB)
    assert assumed_peak(141 * GB) == ExpectedPeak(6 * GB, 6 * GB), "without any run a part of the device is assumed"
    # One run of the program counts more than one of another.
    assumed = assumed_peak(24 * GB)
    other, own = (narrowed(assumed, (12 * GB,), weight) for weight in (MACHINE_WEIGHT, PROGRAM_WEIGHT))
    assert assumed.mean_mb < other.mean_mb < own.mean_mb < 12 * GB
    one = margin_mb(6 * GB, (6 * GB) ** 2, 1.28)
    assert one == pytest.approx(1.28 * 6 * GB)
    four = margin_mb(24 * GB, 4 * (6 * GB) ** 2, 1.28)
    assert 2 * one < four < 3 * one, "several jobs need less than each may need at worst"


@given(peak_lists, sizes_mb)
def test_many_alike_runs_leave_little_spread_and_few_leave_more(found: list[float], size: float) -> None:
    assumed = assumed_peak(size)
    expected = narrowed(assumed, tuple(found), PROGRAM_WEIGHT)
    low, high = min((*found, assumed.mean_mb)), max((*found, assumed.mean_mb))
    assert low - 1e-3 <= expected.mean_mb <= high + 1e-3
    alike = narrowed(assumed_peak(24 * GB), (2 * GB,) * 30, PROGRAM_WEIGHT)
    assert alike.at_most_mb(1.28) < 5 * GB < narrowed(assumed_peak(24 * GB), (2 * GB,), PROGRAM_WEIGHT).at_most_mb(1.28)


def test_what_climbs_missed_is_learned_per_machine_and_per_program() -> None:
    steady = learn_climb((), (1000.0,), 1000.0)
    late = learn_climb((), (100.0,), 1000.0)
    for _ in range(30):
        steady, late = learn_climb(steady, (1000.0,), 1000.0), learn_climb(late, (100.0,), 1000.0)
    assumed, _ = missing_part(1.0, ())
    assert missing_part(1.0, (steady,))[0] < 0.1 < assumed < 0.7 < missing_part(1.0, (steady, late))[0]
    assert missing_part(2.0, (steady, late)) == missing_part(2.0, ()), "these runs were never flat for so long"
    assert missing_part(0.5, (late,)) == missing_part(0.5, ())
    longer = learn_climb((), (500.0, 1000.0), 1000.0)
    both = learn_climb(longer, (1000.0,), 1000.0)
    assert [moments.count for moments in both] == [2.0, 1.0]
    assert learn_climb(longer, (0.0,), 0.0) == longer, "a climb keeps the times that a shorter run did not reach"
    means = [missing_part(flat_s, ())[0] for flat_s in (0.0, *FLAT_S)]
    assert means == sorted(set(means), reverse=True)
    assert missing_part(1.5, ()) == missing_part(1.0, ()), "the missing part shrinks while memory is flat"


def test_older_runs_fade() -> None:
    moments = Moments()
    for _ in range(200):
        moments = moments.plus(1.0)
    for _ in range(100):
        moments = moments.plus(0.0)
    assert moments.count == pytest.approx(33.0, abs=1.0)
    assert moments.total < 5.0


@given(sizes_mb, st.floats(0.0, 100 * GB), st.sampled_from((0.0, *FLAT_S)))
def test_a_running_job_is_expected_to_need_at_least_what_it_holds(size: float, level_mb: float, flat_s: float) -> None:
    before = assumed_peak(size)
    expected = peak_while_running(level_mb, missing_part(flat_s, ()), before)
    assert expected.mean_mb >= level_mb
    assert expected.mean_mb <= level_mb + max(level_mb, before.mean_mb)


@given(st.floats(0.5, 0.999))
def test_sureness_is_the_normal_quantile(quantile: float) -> None:
    assert sureness_of(quantile) == pytest.approx(statistics.NormalDist().inv_cdf(quantile), abs=1e-3)
