"""A job does not join a card on which it would end later than elsewhere. A card has 24 GB; jobs need 1 GB."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.core.lease import Lease, Need
from gpuyard.core.memory.estimates import Estimate
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.plan import Plan
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.preemption import RunningJob
from gpuyard.core.scheduling.sharing_depth import depth_limit
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from tests.unit.core.scheduling.test_placement import CARD, GB, lease
from tests.unit.core.scheduling.test_planner import NOW, queue, started, view, waiting_job
from tests.unit.core.scheduling.test_sharing_gain import job, running

HEAVY = job(1.0, 100.0)  # two of them on one card take as long as one after the other
LIGHT = job(0.05, 20.0)
NEW = 9


def holding(need: Need, number: int, device_id: str) -> Lease:
    [found] = running(need, device_id=device_id)
    return replace(found, id=f"lease-{number}")


def plan(
    leases: Mapping[int, Lease],
    left_s: Mapping[int, float],
    *,
    seconds: float | None = 1000.0,
    waiting_s: float | None = 1000.0,
    need: Need = HEAVY,
    cards: int = 2,
    jobs: int | None = None,
    suspended_s: float = 0.0,
    **changes: Any,
) -> Plan:
    """Return the plan for job NEW of these seconds, beside running jobs that have `left_s` left. `jobs` is how many run
    or wait, by default so many that devices are shared at any depth. They have run for 60 s, and before that they were
    suspended for `suspended_s`."""
    run = RunningJob(
        job_id=0, user="me", tag="", devices=1, started_at=NOW - 60 - suspended_s, suspended_s=suspended_s
    )  # fmt: skip
    runs = [replace(run, job_id=number, lease_id=each.id) for number, each in leases.items()]
    found = view(
        queue(1, need, NEW, **changes),
        on=cards,
        leases=list(leases.values()),
        running=runs,
        estimate=lambda _: Estimate(likely_s=seconds),
        ends_about=lambda number: NOW + left_s[number] if number in left_s else None,
        waiting_s=lambda: waiting_s,
    )
    packing = Packing(min_gain_percent=-50.0, depth=depth_limit(16 * cards if jobs is None else jobs, cards))
    return decide(replace(found, placement=replace(found.placement, packing=packing)), explained_lane=1)


BOTH = {1: holding(HEAVY, 1, "G0"), 2: lease("lease-2", "G1", memory_mb=CARD)}


def test_a_job_waits_for_a_card_on_which_it_ends_sooner() -> None:
    """Beside job 1 it would end after 2000 s, after job 2 on the other card already after 1300 s."""
    assert not plan(BOTH, {1: 1500.0, 2: 300.0}).starts
    assert started(plan(BOTH, {1: 1500.0, 2: 1200.0})) == {NEW: ("G0",)}


def test_the_time_in_which_an_overdue_job_was_suspended_says_nothing_about_its_end() -> None:
    """Job 2 is a second overdue after a minute of work, so it is expected to take about another minute."""
    left_s = {1: 1500.0, 2: -1.0}
    assert not plan(BOTH, left_s).starts
    assert not plan(BOTH, left_s, suspended_s=5 * 3600.0).starts


def test_why_says_when_it_would_end_here_and_elsewhere() -> None:
    waiting = waiting_job(plan(BOTH, {1: 1500.0, 2: 300.0}), 1)
    reason = next(each for each in waiting.reasons if each.device_id == "G0")
    assert reason.kind is ReasonKind.TOO_DEEP
    assert reason.text == (
        "it would end sooner elsewhere: in about 21m 40s, with the wait for another GPU; "
        "beside 1 job on this one in about 33m 20s"
    )
    assert "min_gain_percent" in reason.remedy


def test_among_cards_that_fit_it_joins_one_where_it_ends_in_time() -> None:
    """The first card is fuller, and would be chosen otherwise."""
    leases = {1: holding(HEAVY, 1, "G0"), 2: holding(HEAVY, 2, "G1")}
    fuller = {**leases, 1: replace(leases[1], shares=(replace(leases[1].shares[0], memory_mb=4 * GB),))}
    assert started(plan(fuller, {1: 900.0, 2: 900.0})) == {NEW: ("G0",)}
    assert started(plan(fuller, {1: 900.0, 2: 100.0})) == {NEW: ("G1",)}


def test_while_much_work_waits_it_joins_at_once() -> None:
    """Spread evenly, all work ends after (1800 + 4000) / 2 s: later than this job."""
    assert plan(BOTH, {1: 1500.0, 2: 300.0}, waiting_s=4000.0).starts


def test_a_job_that_is_hardly_slowed_joins() -> None:
    assert plan(BOTH, {1: 1500.0, 2: 300.0}, need=LIGHT).starts


def test_a_short_job_joins() -> None:
    assert plan(BOTH, {1: 1500.0, 2: 1.0}, seconds=50.0).starts


def test_where_all_durations_are_expected_jobs_do_not_count() -> None:
    """Three jobs on two cards: two that share one take longer than 3 / 2 durations. By seconds it ends in time."""
    left_s = {1: 1500.0, 2: 1400.0}
    assert not plan(BOTH, left_s, jobs=3, waiting_s=None).starts
    assert started(plan(BOTH, left_s, jobs=3)) == {NEW: ("G0",)}


def test_a_short_job_joins_where_jobs_are_too_many() -> None:
    """It waited for a card of its own while longer jobs passed it, which end in time on the cards that were left."""
    left_s = {1: 1500.0, 2: 1.0}
    assert not plan(BOTH, left_s, jobs=3, seconds=50.0, waiting_s=None).starts
    assert started(plan(BOTH, left_s, jobs=3, seconds=50.0)) == {NEW: ("G0",)}


@pytest.mark.parametrize(
    "changes",
    [{"seconds": None}, {"waiting_s": None}, {"left_s": {1: 1500.0}}, {"preempts": True}],
    ids=["its duration", "what waits", "the end of a lease", "it may preempt"],
)
def test_without_a_figure_for_all_work_there_is_no_such_limit(changes: dict[str, Any]) -> None:
    assert plan(BOTH, **{"left_s": {1: 1500.0, 2: 300.0}, **changes}).starts


def test_a_job_that_runs_for_longer_than_expected_counts_as_half_done() -> None:
    """It has run for 60 s, so the other card is expected to be free in 60 s."""
    assert not plan(BOTH, {1: 1500.0, 2: -10.0}).starts


def test_it_joins_on_a_single_card() -> None:
    assert plan({1: BOTH[1]}, {1: 1500.0}, cards=1).starts


def test_the_starts_of_a_plan_count() -> None:
    """Of two jobs, the first takes the idle card. The second would end there after 2000 s, elsewhere after 1300 s."""
    found = plan({2: BOTH[2]}, {2: 300.0}, waiting_s=2000.0)
    assert started(found) == {NEW: ("G0",)}
    both = view(
        queue(1, HEAVY, NEW, NEW + 1),
        on=2,
        leases=[BOTH[2]],
        running=[RunningJob(job_id=2, user="me", tag="", devices=1, started_at=NOW - 60, lease_id="lease-2")],
        estimate=lambda _: Estimate(likely_s=1000.0),
        ends_about=lambda _: NOW + 300.0,
        waiting_s=lambda: 2000.0,
    )
    packing = Packing(min_gain_percent=-50.0, depth=depth_limit(32, 2))
    found = decide(replace(both, placement=replace(both.placement, packing=packing)))
    assert started(found) == {NEW: ("G0",)}


@given(
    left_s=st.tuples(st.floats(1.0, 1e5), st.floats(1.0, 1e5)),
    seconds=st.floats(60.0, 1e5),
    waiting_s=st.floats(0.0, 1e6),
)
def test_some_card_is_always_left(left_s: tuple[float, float], seconds: float, waiting_s: float) -> None:
    """Where all cards fit, it always starts: on the one on which it ends first."""
    leases = {1: holding(HEAVY, 1, "G0"), 2: holding(HEAVY, 2, "G1")}
    found = plan(leases, dict(enumerate(left_s, 1)), seconds=seconds, waiting_s=waiting_s)
    assert found.starts


def test_other_jobs_of_its_lane_are_considered() -> None:
    """A short job of the same lane joins beside job 1, where the long one would end late."""
    runs = [
        RunningJob(job_id=number, user="me", tag="", devices=1, started_at=NOW - 60, lease_id=each.id)
        for number, each in BOTH.items()
    ]
    left_s = {1: 1500.0, 2: 300.0}
    found = view(
        queue(1, HEAVY, NEW, NEW + 1),
        on=2,
        leases=list(BOTH.values()),
        running=runs,
        estimate=lambda number: Estimate(likely_s=1000.0 if number == NEW else 70.0),
        ends_about=lambda number: NOW + left_s[number],
        waiting_s=lambda: 1000.0,
    )
    packing = Packing(min_gain_percent=-50.0, depth=depth_limit(32, 2))
    found = replace(found, placement=replace(found.placement, packing=packing))
    assert list(started(decide(found))) == [NEW + 1]
