"""The lease of a running job without an estimate follows what is measured. A card has 24 GB."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuyard.model.job import Usage
from gpuyard.model.lease import Share
from gpuyard.policy.estimates import FLAT_S, Moments, Profile
from gpuyard.policy.numbers import ALONE_FLAT_S
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


def test_before_it_uses_memory_it_is_charged_what_is_expected() -> None:
    assert adjust(uncertain(), None, 30.0) == uncertain()
    small = KnownRuns(running_mb=(1000.0,) * 9)
    assert most_mb(adjust(uncertain(), None, 30.0, small)) < 5 * GB, "others of its program have shown what they use"


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


def test_a_program_that_is_known_to_grow_late_keeps_its_charge() -> None:
    late = Profile(is_exact=False, climb=tuple(Moments(30.0, 15.0, 7.5) for _ in FLAT_S))
    usage = Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0)
    usual = adjust(uncertain(), usage, 30.0)
    assert most_mb(adjust(uncertain(), usage, 30.0, KnownRuns(program=late))) > most_mb(usual) + GB


def test_small_changes_leave_the_lease_as_it_is() -> None:
    usage = Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0)
    after = adjust(uncertain(), usage, 14.0)
    slightly_more = Usage(peaks_mb={"G0": 5 * GB + 20.0}, grew_at_s=10.0)
    assert adjust(after, slightly_more, 15.0) is after
    assert adjust(after, Usage(peaks_mb={"G0": 5 * GB}, grew_at_s=10.0, load_percent=80.0), 15.0).load_percent == 80.0


def test_the_part_of_a_device_that_a_tag_shares_never_grows() -> None:
    """The rest is promised to leases that joined it."""
    part = Share(device_id="G0", memory_mb=8 * GB, is_exclusive=False)
    assert adjust(part, Usage(peaks_mb={"G0": 7.9 * GB}), 100.0) == part
    shrunk = adjust(part, Usage(peaks_mb={"G0": 2 * GB}), 100.0)
    assert 2 * GB < (shrunk.memory_mb or 0.0) < 4 * GB


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


def test_a_device_of_unknown_size_is_left_alone() -> None:
    newcomer = Newcomer(attempt(Usage(peaks_mb={"G0": 8 * GB})), KnownRuns(), 300.0)
    assert newcomer.adjusted_shares([Share(device_id="G0")], {}, SURENESS) == (Share(device_id="G0"),)


@given(st.floats(1.0, CARD), st.floats(0.0, 5000.0), st.floats(0.0, 5000.0))
def test_a_lease_always_reserves_what_its_job_holds(peak_mb: float, grew_at_s: float, ran_s: float) -> None:
    usage = Usage(peaks_mb={"G0": peak_mb}, grew_at_s=min(grew_at_s, ran_s))
    after = adjust(uncertain(memory_mb=0.0, spread_mb=1.0), usage, ran_s)
    assert most_mb(after) >= peak_mb * 0.95 - 128.0
