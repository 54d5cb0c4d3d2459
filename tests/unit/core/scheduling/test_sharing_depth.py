"""No device gets more jobs than its part of all jobs, unless sharing pays. A card has 24 GB; jobs need 1 GB."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.lease import Lease, Need, Ticket
from gpuyard.core.scheduling.choose_devices import PlacementChoice, choose
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.placement import PlacementView
from gpuyard.core.scheduling.sharing_depth import MOST_PER_DEVICE, DepthLimit, depth_limit
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from tests.unit.core.scheduling.test_placement import ALICE, GB, card, lease, machine, shared
from tests.unit.core.scheduling.test_sharing_gain import job, running

HEAVY = job(1.0, 100.0)  # two of them on one card take as long as one after the other
LIGHT = job(0.05, 20.0)
UNKNOWN = shared(GB)


def ask(need: Need, *leases: Lease, cards: int, jobs: int, ahead: tuple[Ticket, ...] = ()) -> PlacementChoice:
    """Return where the job goes on a machine for which `jobs` run or wait, this one included."""
    packing = Packing(min_gain_percent=-50.0, depth=depth_limit(jobs, cards))
    snapshot = machine(*(card(index) for index in range(cards)))
    return choose(need, PlacementView(now=0.0, snapshot=snapshot, leases=leases, packing=packing, ahead=ahead))


def one_each(need: Need, cards: int) -> tuple[Lease, ...]:
    return tuple(lease for index in range(cards) for lease in running(need, device_id=f"G{index}"))


def test_a_job_waits_for_a_free_card_while_few_others_wait() -> None:
    assert ask(HEAVY, *one_each(HEAVY, 2), cards=2, jobs=3).claim is None
    assert ask(HEAVY, *one_each(HEAVY, 2), cards=2, jobs=4).claim is not None


def test_a_job_that_hardly_slows_others_joins_at_once() -> None:
    assert ask(LIGHT, *one_each(LIGHT, 2), cards=2, jobs=3).claim is not None
    assert ask(LIGHT, *one_each(LIGHT, 8), cards=8, jobs=16).claim is not None


def test_first_runs_share_two_cards_at_once_and_wait_for_one_of_forty() -> None:
    """On forty cards one is free soon, and what sharing costs a program is not known."""
    assert ask(UNKNOWN, *one_each(UNKNOWN, 2), cards=2, jobs=3).claim is not None
    assert ask(UNKNOWN, *one_each(UNKNOWN, 40), cards=40, jobs=41).claim is None
    assert ask(UNKNOWN, *one_each(UNKNOWN, 40), cards=40, jobs=200).claim is not None


def first_runs_on_one(cards: int) -> int:
    """Return how many first runs share a card while the others are full and hundreds wait."""
    packing = Packing(min_gain_percent=5.0, depth=depth_limit(500, cards))
    snapshot = machine(*(card(index) for index in range(cards)))
    full = tuple(lease(f"full-{index}", f"G{index}") for index in range(1, cards))
    for count in range(1, MOST_PER_DEVICE):
        leases = (*full, *running(*[UNKNOWN] * count))
        view = PlacementView(now=0.0, snapshot=snapshot, leases=leases, packing=packing)
        if choose(UNKNOWN, view).claim is None:
            return count
    return MOST_PER_DEVICE


def test_the_gain_of_sharing_counts_by_the_quantile_too() -> None:
    """However many wait: programs that may gain nothing together are not all put on one of many cards."""
    assert first_runs_on_one(2) > first_runs_on_one(8) > first_runs_on_one(40) >= 1


def test_a_single_card_has_no_limit() -> None:
    assert depth_limit(100, 1) is None
    assert ask(HEAVY, *running(*[HEAVY] * 5), cards=1, jobs=6).claim is not None


def test_only_cards_that_suit_the_job_count() -> None:
    only = replace(HEAVY, only=("G0",))
    assert ask(only, *one_each(HEAVY, 4), cards=4, jobs=5).claim is not None
    assert ask(HEAVY, *one_each(HEAVY, 4), cards=4, jobs=5).claim is None


def test_a_request_ahead_keeps_its_place_on_a_card_that_it_could_join() -> None:
    """The request needs both cards and waits for the second. Beside another heavy job it could not join the first."""
    leases = (*running(LIGHT), lease("whole", "G1"))
    ahead = Ticket(id="t", holder=ALICE, need=replace(HEAVY, devices=2), since=0.0)
    assert ask(HEAVY, *leases, cards=2, jobs=3).claim is not None
    found = ask(HEAVY, *leases, cards=2, jobs=3, ahead=(ahead,))
    assert found.claim is None
    assert found.reasons[0].kind is ReasonKind.AWAITED
    assert ask(LIGHT, *leases, cards=2, jobs=3, ahead=(ahead,)).claim is not None


def test_why_says_that_a_card_should_be_free_sooner() -> None:
    found = ask(HEAVY, *one_each(HEAVY, 2), cards=2, jobs=3)
    reason = found.reasons[0]
    assert reason.kind is ReasonKind.TOO_DEEP
    assert reason.text == (
        "a free GPU is expected sooner: 2 jobs on this one would take about 2.00 times as long as one alone, "
        "all jobs on 2 GPUs 1.50 times"
    )
    assert reason.holders == (replace(ALICE, pid=reason.holders[0].pid, label=reason.holders[0].label),)


def test_the_limit_is_surer_with_more_cards() -> None:
    assert DepthLimit(jobs=3, devices=2).caution == 0.0
    assert DepthLimit(jobs=3, devices=8).caution == pytest.approx(0.84, abs=0.01)
    assert DepthLimit(jobs=3, devices=40).caution == pytest.approx(1.67, abs=0.01)


@given(jobs=st.integers(0, 5000), devices=st.integers(2, 64), more=st.integers(0, 100))
def test_more_waiting_jobs_never_lower_the_limit(jobs: int, devices: int, more: int) -> None:
    few, many = depth_limit(jobs, devices), depth_limit(jobs + more, devices)
    assert few is not None
    assert many is not None
    assert 1.0 <= few.durations <= many.durations
    assert many.jobs <= MOST_PER_DEVICE * devices
