"""Victims of a preemption: enough of them, and none too many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.lease import FixedMemory, Lease, Need, WholeDevice
from gpuyard.model.machine_snapshot import Host
from gpuyard.policy.placement import PlacementState
from gpuyard.policy.preempt import MoveRates, find_victims, learn_move, learn_together
from gpuyard.policy.world import RunningJob
from tests.unit.policy.test_placement import GB, card, lease, on_cards, placement_without, shared

URGENT = 5


def job(job_id: int, cost_s: float | None = 1.0, priority: int = 0, *, is_leaving: bool = False) -> RunningJob:
    """Return a running job; its lease has the same name."""
    return RunningJob(
        job_id=job_id, user="me", tag="", devices=1, started_at=float(job_id), lease_id=f"job {job_id}",
        priority=priority, preempt_cost_s=cost_s, is_leaving=is_leaving,
    )  # fmt: skip


def held(job_id: int, *device_ids: str, memory_mb: float | None = None) -> Lease:
    return lease(f"job {job_id}", *device_ids, memory_mb=memory_mb)


def placement(*leases: Lease, cards: int = 2, host: Host | None = None, foreign_mb: float = 0.0) -> PlacementState:
    devices = [card(index, used=foreign_mb) for index in range(cards)]
    measured: dict[tuple[str, str], float | None] = {
        (each.id, share.device_id): 0.0 for each in leases for share in each.shares
    }
    return PlacementState(on_cards(*devices, host=host, leases=leases, measured=measured))


def ids(victims: tuple[RunningJob, ...]) -> set[int]:
    return {run.job_id for run in victims}


def test_the_cheapest_enough_leave() -> None:
    running = [job(1, 30.0), job(2, 10.0)]
    assert ids(find_victims(Need(), placement(held(1, "G0"), held(2, "G1")), running, URGENT)) == {2}
    # Only as many leave as there is need for.
    here = [held(number, "G0", memory_mb=size * GB) for number, size in enumerate((2, 4, 6, 8), 1)]
    running = [job(number, float(number)) for number in range(1, 5)]
    assert ids(find_victims(shared(12 * GB), placement(*here, cards=1), running, URGENT)) == {1, 3}
    # A victim that frees two devices spares others.
    small = held(1, "G0", memory_mb=8 * GB), held(2, "G0", "G1", memory_mb=8 * GB)
    leases = *small, held(3, "G0", memory_mb=8 * GB), held(4, "G1", memory_mb=16 * GB)
    running = [job(1, 1.0), job(2, 5.0), job(3, None), job(4, None)]
    assert ids(find_victims(shared(8 * GB, devices=2), placement(*leases), running, URGENT)) == {2}


def moved(job_id: int, gigabytes: float, out_gb_s: float = 1.5, together_gb_s: float = 6.0) -> RunningJob:
    """Return a running job that is suspended at this rate, and resumed at 5 GB/s."""
    out_s = gigabytes / out_gb_s
    run = job(job_id, out_s + gigabytes / 5.0)
    return replace(run, frees_in_s=out_s, shares_s=gigabytes / together_gb_s)


def test_victims_that_leave_soonest_go() -> None:
    here = [held(number, "G0", memory_mb=size * GB) for number, size in enumerate((12, 6, 6), 1)]
    running = [moved(1, 12), moved(2, 6), moved(3, 6)]
    assert ids(find_victims(shared(12 * GB), placement(*here, cards=1), running, URGENT)) == {2, 3}
    # A large victim that parks its memory beats two small ones.
    here = [held(number, "G0", memory_mb=size * GB) for number, size in enumerate((12, 6, 6), 1)]
    running = [replace(moved(1, 12, out_gb_s=30.0), shares_s=0.0), moved(2, 6), moved(3, 6)]
    assert ids(find_victims(shared(12 * GB), placement(*here, cards=1), running, URGENT)) == {1}
    # Small victims are spared where the machine moves no more side by side.
    here = [held(1, "G0", memory_mb=10 * GB), held(2, "G0", memory_mb=7 * GB), held(3, "G0", memory_mb=7 * GB)]
    running = [moved(1, 10, together_gb_s=1.5), moved(2, 7, together_gb_s=1.5), moved(3, 7, together_gb_s=1.5)]
    assert ids(find_victims(shared(10 * GB), placement(*here, cards=1), running, URGENT)) == {1}
    # A victim that takes long to leave is spared for one that loses more.
    here = [held(1, "G0", memory_mb=12 * GB), held(2, "G0", memory_mb=12 * GB)]
    running = [replace(job(1, 5.0), frees_in_s=61.0), moved(2, 12)]
    assert ids(find_victims(shared(12 * GB), placement(*here, cards=1), running, URGENT)) == {2}


@pytest.mark.parametrize(
    "other", [job(1, None), job(1, priority=URGENT), job(1, priority=URGENT + 1)], ids=["never", "equal", "higher"]
)
def test_a_job_that_may_not_be_preempted_is_no_victim(other: RunningJob) -> None:
    assert not find_victims(Need(), placement(held(1, "G0"), cards=1), [other], URGENT)


def test_no_victim_that_would_not_help_or_is_not_needed() -> None:
    leases = held(1, "G0"), held(2, "G1")
    assert not find_victims(Need(), placement(*leases), [job(1, is_leaving=True), job(2)], URGENT)
    both = find_victims(Need(devices=2), placement(*leases), [job(1, is_leaving=True), job(2)], URGENT)
    assert ids(both) == {2}, "no further victim while enough jobs are leaving"
    # No victim where preemption would not help.
    running = [job(1)]
    assert not find_victims(Need(), placement(held(1, "G0"), cards=1, foreign_mb=8 * GB), running, URGENT)
    assert not find_victims(shared(30 * GB), placement(held(1, "G0"), cards=1), running, URGENT)
    assert not find_victims(Need(devices=2), placement(held(1, "G0"), cards=1), running, URGENT)
    starved = Host(memory_available_mb=GB)
    assert not find_victims(
        Need(min_host_memory_mb=2 * GB), placement(held(1, "G0"), cards=1, host=starved), running, URGENT
    )


@st.composite
def crowds(draw: st.DrawFn) -> tuple[PlacementState, list[RunningJob]]:
    """Up to three cards full of jobs, some of them on several."""
    cards = draw(st.integers(1, 3))
    names = [f"G{index}" for index in range(cards)]
    free = dict.fromkeys(names, 24 * GB)
    leases: list[Lease] = []
    running: list[RunningJob] = []
    for job_id in range(1, draw(st.integers(1, 8)) + 1):
        where = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
        size = draw(st.sampled_from([2.0, 5.0, 9.0, 14.0])) * GB
        if any(free[name] < size for name in where):
            continue
        for name in where:
            free[name] -= size
        leases.append(held(job_id, *where, memory_mb=size))
        cost = draw(st.sampled_from([None, 0.0, 1.0, 1.0, 7.5]))
        priority = draw(st.sampled_from([0, 0, URGENT - 1, URGENT, URGENT + 3]))
        running.append(job(job_id, cost, priority, is_leaving=draw(st.integers(0, 4)) == 0))
    return placement(*leases, cards=cards), running


wishes = st.builds(
    lambda size, devices, alone: Need(devices=devices, memory=(WholeDevice if alone else FixedMemory)(size * GB)),
    st.sampled_from([1.0, 6.0, 12.0, 20.0, 24.0]),
    st.integers(1, 2),
    st.booleans(),
)


@given(crowds(), wishes)
def test_victims_are_enough_and_each_is_needed(crowd: tuple[PlacementState, list[RunningJob]], need: Need) -> None:
    here, running = crowd
    victims = find_victims(need, here, running, URGENT)
    leaving = {run.lease_id for run in running if run.is_leaving}

    def fits_without(gone: set[str | None]) -> bool:
        return (
            placement_without(here, frozenset(each for each in gone if each is not None)).find_claim(need) is not None
        )

    asked = {run.lease_id for run in victims}
    assert all(run.priority < URGENT and run.preempt_cost_s is not None and not run.is_leaving for run in victims)
    could = {run.lease_id for run in running if run.priority < URGENT and run.preempt_cost_s is not None}
    if fits_without(leaving):
        assert not victims, "it fits without them"
    elif fits_without(leaving | could):
        assert fits_without(leaving | asked), "the victims are not enough"
    else:
        assert not victims, "it would not help"
    for lease_id in asked:
        assert not fits_without(leaving | (asked - {lease_id})), f"{lease_id} need not leave"


# Younger first runs


RATES = MoveRates(out_mb_s=1500.0, back_mb_s=5000.0, parked_out_mb_s=30000.0, together_mb_s=6000.0)


def test_programs_side_by_side_leave_in_the_time_of_the_largest() -> None:
    alone = RATES.out_s(10 * GB)
    assert RATES.all_out_s([(10 * GB, False)]) == alone
    assert RATES.all_out_s([(10 * GB, False), (8 * GB, False)]) == alone
    assert RATES.all_out_s([(20 * GB, False)]) > 1.5 * alone, "two of 10 GB beat one of 20"
    eight = RATES.all_out_s([(10 * GB, False)] * 8)
    assert eight == pytest.approx(0.5 + 80 * GB / 6000.0), "many side by side share what the machine moves in all"
    assert RATES.all_out_s([(10 * GB, True)] * 8) == RATES.out_s(10 * GB, is_parked=True), "no driver moves these"
    assert RATES.all_out_s([]) == 0.0, "nothing to move takes no time"


def test_rates_are_learned_by_kind_of_move() -> None:
    rates = RATES
    for _ in range(5):
        rates = learn_move(rates, 20 * GB, 0.5 + 20 * GB / 4000.0)
    assert rates.out_mb_s == pytest.approx(4000.0, rel=0.05)
    assert rates.back_mb_s == RATES.back_mb_s
    assert rates.parked_out_mb_s == RATES.parked_out_mb_s, "a rate follows a change within a few moves"
    # Each kind of move has a rate of its own.
    assert learn_move(RATES, 20 * GB, 10.0, is_resumed=True).back_mb_s < RATES.back_mb_s
    assert learn_move(RATES, 20 * GB, 10.0, is_parked=True, is_resumed=True).parked_back_mb_s < RATES.parked_back_mb_s
    assert learn_move(RATES, 20 * GB, 10.0, is_parked=True).parked_out_mb_s < RATES.parked_out_mb_s
    assert learn_together(RATES, 40 * GB, 4.0).together_mb_s > RATES.together_mb_s
    assert learn_together(RATES, 40 * GB, 400.0).together_mb_s >= RATES.out_mb_s
    fast = learn_move(RATES, 40 * GB, 1.0)
    assert fast.together_mb_s >= fast.out_mb_s, "several are never slower together than one alone"
    assert learn_move(RATES, 500.0, 0.4) == RATES
    assert learn_move(RATES, 20 * GB, 0.0) == RATES, "a small move says nothing"
