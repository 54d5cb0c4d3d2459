"""How many jobs share a card: as many as do more work together. A card has 24 GB."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.lease import FixedMemory, Lease, Need, Share
from gpuyard.core.scheduling.choose_devices import PlacementChoice, choose
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.device_memory import DeviceState, PromisedShare
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.scheduling.load_gates import Smoothed
from gpuyard.core.scheduling.placement import PlacementView
from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.sharing_gain import forecast
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from tests.unit.core.scheduling.test_placement import ALICE, GB, card, devices_of, kinds_of, lease, machine, shared
from tests.unit.core.scheduling.test_planner import kinds_of as waiting_kinds
from tests.unit.core.scheduling.test_planner import queue, started, waiting_job
from tests.unit.core.scheduling.test_planner import view as planner_view

GAIN = Packing(min_gain_percent=5.0)
loads = st.none() | st.floats(0.0, 100.0)
coefficients = st.none() | st.floats(0.0, 4.0)


def job(slowdown: float | None = None, load_percent: float | None = 100.0) -> Need:
    return Need(memory=FixedMemory(GB), load_percent=load_percent, slowdown=slowdown)


def share(need: Need, device_id: str = "G0") -> Share:
    return Share(
        device_id=device_id, memory_mb=GB, load_percent=need.load_percent, slowdown=need.slowdown, is_exclusive=False
    )


def running(*needs: Need, device_id: str = "G0") -> tuple[Lease, ...]:
    return tuple(
        Lease(id=f"{device_id}-{place}", holder=ALICE, shares=(share(need, device_id),), since=0.0)
        for place, need in enumerate(needs)
    )


def ask(need: Need, *leases: Lease, cards: int = 1, packing: Packing = GAIN, **changes: Any) -> PlacementChoice:
    view = PlacementView(now=0.0, snapshot=machine(*map(card, range(cards))), leases=leases, packing=packing)
    return choose(need, replace(view, **changes))


def most_that_share(need: Need) -> int:
    """Return how many jobs like this share a card."""
    return next(count for count in range(1, 99) if ask(need, *running(*[need] * count)).claim is None)


def test_jobs_that_slow_each_other_to_less_than_one_after_another_do_not_share() -> None:
    assert most_that_share(job(slowdown=1.5)) == 1
    assert most_that_share(job(slowdown=1.0)) == 1


def test_the_less_jobs_slow_each_other_the_more_of_them_share() -> None:
    counts = [most_that_share(job(slowdown)) for slowdown in (0.7, 0.5, 0.3, 0.1)]
    assert counts == sorted(set(counts))
    assert counts[0] >= 2
    assert counts[-1] >= 10


def test_before_anything_is_measured_several_jobs_share() -> None:
    assert 3 <= most_that_share(job(None, 100.0)) < most_that_share(job(None, None)) < most_that_share(job(None, 20.0))


def test_a_job_that_hardly_loads_the_card_joins_busy_ones() -> None:
    busy = running(*[job(0.9)] * 2)
    assert ask(job(0.9), *busy).claim is None
    assert ask(job(0.02, load_percent=1.0), *busy).claim is not None


def test_the_first_job_of_a_card_is_never_refused_for_its_slow_down() -> None:
    assert ask(job(4.0)).claim is not None


def test_why_shows_the_figures() -> None:
    (reason, _) = ask(job(1.5), *running(job(1.5), job(0.5))).reasons
    assert reason.kind is ReasonKind.NO_GAIN
    assert "2 jobs share it and do 1.07 times the work of one; this job would make it 1.00 times" in reason.text
    assert (reason.had, reason.needed) == pytest.approx((1.0, 1.12), abs=0.01)
    (reason, _) = ask(job(0.96), *running(job(0.96))).reasons
    assert reason.text.endswith("this job would make it 1.02 times; at least 5% more is needed")
    assert "min_gain_percent under [packing]" in reason.remedy


def test_without_the_setting_memory_alone_decides() -> None:
    assert ask(job(4.0), *running(job(4.0)), packing=Packing()).claim is not None


def test_a_user_who_set_how_many_share_is_obeyed() -> None:
    assert ask(replace(job(4.0), ignores_load=True), *running(job(4.0))).claim is not None


def test_a_suspended_job_comes_back_where_its_memory_fits() -> None:
    assert ask(replace(job(4.0), is_resumed=True), *running(job(4.0))).claim is not None


def test_the_measured_load_of_a_running_newcomer_replaces_the_assumption() -> None:
    newcomers = running(*[job(None, None)] * 12)
    assert ask(job(None, None), *newcomers).claim is None
    idle = dict.fromkeys((each.id for each in newcomers), 5.0)
    assert ask(job(None, None), *newcomers, lease_loads=idle).claim is not None


@st.composite
def states(draw: st.DrawFn) -> DeviceState:
    needs = draw(st.lists(st.builds(job, coefficients, loads), min_size=1, max_size=8))
    return DeviceState(card(0), [PromisedShare(share=share(need), holder=ALICE) for need in needs], None)


@given(states(), st.builds(job, coefficients, loads))
def test_the_throughput_is_at_most_the_number_of_jobs_and_the_joiner_adds_at_most_one(
    state: DeviceState, need: Need
) -> None:
    found = forecast(need, state)
    assert 0.0 < found.before <= found.jobs + 1e-9
    assert found.after <= found.before + 1.0 + 1e-9
    assert found.gains(-1.0)


@given(states(), coefficients, st.floats(0.0, 100.0), st.floats(0.0, 4.0))
def test_a_job_that_is_slowed_more_gains_less(
    state: DeviceState, slowdown: float | None, load: float, more: float
) -> None:
    one = forecast(job(slowdown or 0.0, load), state)
    assert forecast(job((slowdown or 0.0) + more, load), state).after <= one.after + 1e-9


# The longest job


LONG = {"G0-0": 33 * 86_400.0}


def test_a_program_outside_of_gpuyard_slows_the_jobs_on_its_card() -> None:
    """Beside it, a job does the work of two thirds of one."""
    busy = ForeignLoad(average=Smoothed(value=100.0))
    present = [PromisedShare(share=share(job(0.5)), holder=ALICE, measured_mb=0.0)]
    found = forecast(job(0.5), DeviceState(card(0), present, None, busy))
    assert found.before == pytest.approx(1 / 1.5)
    assert found.after == pytest.approx(2 / 2.0)


def test_no_job_joins_the_longest_one_if_that_slows_it() -> None:
    heavy, light = job(0.5, 60.0), job(0.5, 1.0)
    leases = (*running(heavy), *running(heavy, heavy, device_id="G1"))
    assert devices_of(ask(heavy, *leases, cards=2)) == ("G0",)
    assert devices_of(ask(heavy, *leases, cards=2, longest=LONG)) == ("G1",)
    assert devices_of(ask(light, *running(heavy), *running(heavy, device_id="G1"), cards=2, longest=LONG)) != ()
    assert ask(light, *running(heavy), longest=LONG).claim is not None


def test_why_names_the_longest_job() -> None:
    full = (*running(job(0.5)), lease("full", "G1"))
    found = ask(job(0.5), *full, cards=2, longest=LONG)
    assert kinds_of(found)["G0"] is ReasonKind.LONGEST
    text = next(reason.text for reason in found.reasons if reason.kind is ReasonKind.LONGEST)
    assert "alice, pid 101 (train) has the most time left of all work" in text
    assert "1.50 times as long as alone" in text


def test_a_job_that_could_run_nowhere_else_joins_the_longest_one() -> None:
    only_there = replace(job(0.5), only=("G0",))
    assert devices_of(ask(only_there, *running(job(0.5)), cards=2, longest=LONG)) == ("G0",)
    assert devices_of(ask(job(0.5), *running(job(0.5)), cards=1, longest=LONG)) == ("G0",)
    faulty = machine(card(0), card(1, fault="it has vanished"))
    assert devices_of(ask(job(0.5), *running(job(0.5)), snapshot=faulty, longest=LONG)) == ("G0",)
    two = replace(shared(GB), devices=2)
    assert devices_of(ask(two, *running(job(0.5)), cards=2, longest=LONG)) == ("G0", "G1")


def plan_of(*needs: Need, leases: tuple[Lease, ...], cards: int = 1) -> Plan:
    """Return the plan for jobs with these needs, numbered from 1 in their order."""
    queues = [queue(place, need, priority=-place) for place, need in enumerate(needs, 1)]
    view = planner_view(*queues, leases=leases, on=cards)
    return decide(replace(view, placement=replace(view.placement, packing=GAIN)))


LIGHT = job(0.02, load_percent=1.0)


def test_no_job_joins_before_a_request_ahead_that_would_gain_nothing_there() -> None:
    """A job that gains nothing on any card is the head of the queue. Light jobs that come later let its card drain."""
    busy = running(*[job(0.9)] * 2)
    plan = plan_of(job(0.9), LIGHT, leases=busy)
    assert started(plan) == {}
    assert waiting_kinds(waiting_job(plan, 1))[0] is ReasonKind.NO_GAIN
    assert waiting_kinds(waiting_job(plan, 2))[0] is ReasonKind.AWAITED
    assert started(plan_of(LIGHT, leases=busy)) == {1: ("G0",)}


def test_a_light_job_joins_beside_a_request_ahead_that_gains_there_and_waits_for_another_card() -> None:
    full = lease("full", "G0", memory_mb=23 * GB)
    both = replace(job(0.3), devices=2, memory=FixedMemory(4 * GB))
    plan = plan_of(both, LIGHT, leases=(full, *running(job(0.3), device_id="G1")), cards=2)
    assert started(plan) == {2: ("G1",)}
