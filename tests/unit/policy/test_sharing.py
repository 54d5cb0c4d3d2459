"""No device gets more jobs than its part of all jobs, unless sharing pays. A card has 24 GB; jobs need 1 GB."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.lease import FixedMemory, Lease, Need, Share
from gpuyard.policy.device_state import DeviceState, PromisedShare
from gpuyard.policy.foreign_load import ForeignLoad, Smoothed
from gpuyard.policy.machine import Machine, Packing
from gpuyard.policy.numbers import MOST_PER_DEVICE
from gpuyard.policy.placement import PlacementChoice, choose
from gpuyard.policy.sharing import DepthLimit, depth_limit, durations_with
from gpuyard.policy.wait_reasons import ReasonKind
from tests.unit.policy.test_placement import ALICE, GB, card, devices_of, machine, shared


def job(load_percent: float | None) -> Need:
    return Need(memory=FixedMemory(GB), load_percent=load_percent)


HEAVY, LIGHT, UNKNOWN = job(100.0), job(20.0), shared(GB)


def share(need: Need, device_id: str = "G0") -> Share:
    return Share(device_id=device_id, memory_mb=GB, load_percent=need.load_percent, is_exclusive=False)


def running(*needs: Need, device_id: str = "G0") -> tuple[Lease, ...]:
    return tuple(
        Lease(id=f"{device_id}-{place}", holder=ALICE, shares=(share(need, device_id),), since=0.0)
        for place, need in enumerate(needs)
    )


def ask(need: Need, *leases: Lease, cards: int, jobs: int, **changes: Any) -> PlacementChoice:
    """Return where the job goes on a machine for which `jobs` run or wait, this one included."""
    packing = Packing(depth=depth_limit(jobs, cards))
    snapshot = machine(*(card(index) for index in range(cards)))
    view = Machine(now=0.0, snapshot=snapshot, leases=leases, packing=packing)
    return choose(need, replace(view, **changes))


def one_each(need: Need, cards: int) -> tuple[Lease, ...]:
    return tuple(lease for index in range(cards) for lease in running(need, device_id=f"G{index}"))


def test_jobs_wait_for_a_free_card_or_share() -> None:
    assert ask(HEAVY, *one_each(HEAVY, 4), cards=4, jobs=5).claim is None
    assert ask(HEAVY, *one_each(HEAVY, 4), cards=4, jobs=8).claim is not None
    # A job that hardly slows others joins at once.
    assert ask(LIGHT, *one_each(LIGHT, 2), cards=2, jobs=3).claim is not None
    assert ask(LIGHT, *one_each(LIGHT, 8), cards=8, jobs=16).claim is not None
    # First runs share two cards at once and wait for one of forty.
    assert ask(UNKNOWN, *one_each(UNKNOWN, 2), cards=2, jobs=3).claim is not None
    assert ask(UNKNOWN, *one_each(UNKNOWN, 40), cards=40, jobs=41).claim is None
    assert ask(UNKNOWN, *one_each(UNKNOWN, 40), cards=40, jobs=200).claim is not None
    # A light job joins where a heavy one would wait.
    assert devices_of(ask(LIGHT, *one_each(HEAVY, 4), cards=4, jobs=7)) == ("G0",)
    assert ask(HEAVY, *one_each(HEAVY, 4), cards=4, jobs=7).claim is None
    only = replace(HEAVY, only=("G0",))
    assert ask(only, *one_each(HEAVY, 4), cards=4, jobs=5).claim is not None
    assert ask(HEAVY, *one_each(HEAVY, 4), cards=4, jobs=5).claim is None, "only cards that suit the job count"


def test_what_does_not_wait_for_a_free_card() -> None:
    assert depth_limit(100, 1) is None
    assert ask(HEAVY, *running(*[HEAVY] * 5), cards=1, jobs=6).claim is not None, "a single card has no limit"
    # A user who set how many share is obeyed.
    assert ask(replace(HEAVY, ignores_load=True), *one_each(HEAVY, 4), cards=4, jobs=5).claim is not None
    # A suspended job comes back where its memory fits.
    resumed = replace(HEAVY, is_resumed=True, only=("G0", "G1"))
    assert ask(resumed, *one_each(HEAVY, 4), cards=4, jobs=5).claim is not None
    assert DepthLimit(jobs=3, devices=2).caution == 0.0
    assert DepthLimit(jobs=3, devices=8).caution == pytest.approx(0.84, abs=0.01)
    assert DepthLimit(jobs=3, devices=40).caution == pytest.approx(1.67, abs=0.01), "the limit is surer with more cards"


def test_why_shows_what_sharing_gains() -> None:
    found = ask(HEAVY, *one_each(HEAVY, 4), cards=4, jobs=5)
    reason = found.reasons[0]
    assert reason.kind is ReasonKind.NO_GAIN, "why says that a card should be free sooner"
    assert reason.text == (
        "a free GPU is expected sooner: 2 jobs on this one would take about 2.13 times as long as one alone, "
        "all jobs on 4 GPUs 1.49 times"
    )
    assert reason.holders == (replace(ALICE, pid=reason.holders[0].pid, label=reason.holders[0].label),)
    found = ask(HEAVY, *running(HEAVY, HEAVY), cards=1, jobs=3, packing=Packing(min_gain_percent=20.0))
    reason = found.reasons[0]
    assert reason.kind is ReasonKind.NO_GAIN
    assert reason.text == (
        "2 jobs share it and do 1.33 times the work of one; this job would make it 1.50 times; "
        "at least 20% more is needed"
    )
    assert (reason.had, reason.needed) == pytest.approx((1.5, 1.6))


@given(jobs=st.integers(0, 5000), devices=st.integers(2, 64), more=st.integers(0, 100))
def test_more_waiting_jobs_never_lower_the_limit(jobs: int, devices: int, more: int) -> None:
    few, many = depth_limit(jobs, devices), depth_limit(jobs + more, devices)
    assert few is not None
    assert many is not None
    assert 1.0 <= few.durations <= many.durations
    assert many.jobs <= MOST_PER_DEVICE * devices


def test_measured_loads_count() -> None:
    newcomers = one_each(UNKNOWN, 8)
    assert ask(LIGHT, *newcomers, cards=8, jobs=11).claim is None
    idle = dict.fromkeys((each.id for each in newcomers), 5.0)
    assert ask(LIGHT, *newcomers, cards=8, jobs=11, lease_loads=idle).claim is not None
    # A program outside of gpuyard slows the jobs on its card.
    state = DeviceState(card(0), [PromisedShare(share=share(HEAVY), holder=ALICE, measured_mb=0.0)], None)
    busy = DeviceState(card(0), state.promises, None, ForeignLoad(average=Smoothed(value=100.0)))
    limit = DepthLimit(jobs=3, devices=2)
    assert durations_with(HEAVY, state, limit) == pytest.approx(1.5)
    assert durations_with(HEAVY, busy, limit) == pytest.approx(2.0)


def most_that_share(need: Need, least_percent: float = 2.0) -> int:
    """Return how many jobs like this share the only card."""
    packing = Packing(min_gain_percent=least_percent)
    counts = range(1, MOST_PER_DEVICE)
    return next(n for n in counts if ask(need, *running(*[need] * n), cards=1, jobs=99, packing=packing).claim is None)


def test_the_less_jobs_load_a_card_the_more_of_them_share_it() -> None:
    assert [most_that_share(job(load)) for load in (100.0, None, 20.0)] == [7, 16, 24]
    assert most_that_share(HEAVY, least_percent=5.0) == 4


loads = st.none() | st.floats(0.0, 100.0)


@given(st.lists(loads, max_size=8), st.floats(0.0, 100.0), st.floats(0.0, 100.0), st.integers(2, 64))
def test_busier_joiners_slow_jobs_more(present: list[float | None], load: float, other: float, devices: int) -> None:
    limit = DepthLimit(jobs=3, devices=devices)
    state = DeviceState(card(0), [PromisedShare(share=share(job(each)), holder=ALICE) for each in present], None)
    lighter, busier = sorted((load, other))
    assert durations_with(job(lighter), state, limit) <= durations_with(job(busier), state, limit) + 1e-9
