"""Backfill: which jobs may start behind the head of the queue without delaying it."""

from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Claim, FixedMemory, Lease, Need, Share, UncertainMemory
from gpuyard.model.machine_snapshot import Host, Snapshot, Vendor
from gpuyard.policy.estimates import Estimate, Profile, estimate
from gpuyard.policy.numbers import STRICT_AFTER_S, SURENESS
from gpuyard.policy.placement import PlacementState
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import JobFacts, Plan, RunningJob, Start, World
from tests.unit.policy.test_placement import BOB, GB, card, lease, machine, placement_without, shared, ticket
from tests.unit.policy.test_planner import (
    ME,
    NOW,
    cards,
    kinds_of,
    needs,
    queue,
    queues_of,
    running,
    started,
    view,
    waiting_job,
)

WIDE = Need(devices=2)
LONG = STRICT_AFTER_S + 1
Cards = tuple[Snapshot, tuple[Lease, ...], dict[tuple[str, str], float | None]]


def of_lease(lease_id: str, job_id: int, ends_after: float | None = None) -> RunningJob:
    return replace(running(job_id), lease_id=lease_id, ends_after=ends_after)


def behind_a_wide_one(*small: LaneQueue, ends_after: float | None = None, **changes: Any) -> World:
    """Job 1 wants two cards. One of them is leased to job 90, the other is free."""
    head = queue(1, WIDE, priority=5)
    return view(head, *small, on=2, leases=[lease("a", "G0")], running=[of_lease("a", 90, ends_after)], **changes)


def lasting(**most_s: float) -> dict[str, Any]:
    """Estimates by job: `_20=30.0` says that job 20 is over after 30 s."""
    expected = {int(name[1:]): Estimate(least_s=most, likely_s=most, most_s=most) for name, most in most_s.items()}
    return {"facts": {job_id: JobFacts(estimate=each) for job_id, each in expected.items()}}


def test_the_heads_devices_are_reserved() -> None:
    plan = decide(behind_a_wide_one(queue(2, Need(), 20), queue(3, shared(GB), 30)))
    assert not plan.starts
    assert plan.head is not None
    assert plan.head.job_id == 1, "free devices are reserved for the head"
    for lane_id in (2, 3):
        kept = next(reason for reason in waiting_job(plan, lane_id).reasons if reason.device_id == "G1")
        assert kept.kind is ReasonKind.AWAITED
        assert [holder.label for holder in kept.holders] == ["job 1"]
    head = queue(1, Need(memory=FixedMemory(4 * GB), max_utilization_percent=50.0), priority=5)
    busy = machine(card(0, used=4 * GB, utilization_percent=90.0))
    plan = decide(view(head, queue(2, shared(4 * GB)), on=busy, leases=[lease("a", "G0", memory_mb=4 * GB)]))
    assert not plan.starts, "a head with a load limit gets its device exclusively reserved"
    assert kinds_of(waiting_job(plan, 1))[0] is ReasonKind.TOO_BUSY
    hopeless = queue(1, Need(devices=5), priority=9)
    plan = decide(view(hopeless, queue(2, WIDE, priority=5), queue(3, Need(), 30), on=2, leases=[lease("a", "G0")]))
    assert not plan.starts
    assert plan.head is not None
    assert plan.head.job_id == 2, "behind a job that can never fit the next one becomes the head"


def test_jobs_behind_the_head_use_what_it_leaves_over() -> None:
    head = queue(1, Need(devices=2, only=("G0", "G1")), priority=5)
    plan = decide(view(head, queue(2, Need(), 20, 21), on=3, leases=[lease("a", "G0")]))
    assert started(plan) == {20: ("G2",)}, "jobs behind the head start on devices that it cannot use"
    head = queue(1, shared(16 * GB, devices=2), priority=5)
    leases = [lease("a", "G0", memory_mb=20 * GB)]
    plan = decide(view(head, queue(2, shared(5 * GB), 20, 21), on=2, leases=leases))
    assert started(plan) == {20: ("G1",)}, "jobs behind the head start in memory that it leaves over"


@pytest.mark.parametrize(
    ("need", "host"),
    [
        pytest.param(Need(devices=3), Host(), id="it wants more devices than there are"),
        pytest.param(Need(only=("G2",)), Host(), id="a foreign process has its device"),
        pytest.param(Need(max_cpu_percent=50.0), Host(cpu_percent=90.0), id="the machine is too busy for it"),
        pytest.param(Need(min_host_memory_mb=GB), Host(memory_available_mb=10.0), id="there is too little RAM for it"),
    ],
)
def test_a_job_that_would_not_fit_even_on_idle_devices_delays_no_other(need: Need, host: Host) -> None:
    snapshot = machine(card(0), card(1), card(2, used=20 * GB), host=host)
    plan = decide(view(queue(1, need, priority=5), queue(2, Need(), 20), on=snapshot, leases=[lease("a", "G0")]))
    assert started(plan) == {20: ("G1",)}
    assert plan.head is not None
    assert plan.head.job_id == 1


def unknown(least_mb: float = 12 * GB, devices: int = 1) -> Need:
    """Return the need of a job that was neither declared nor learned."""
    return Need(devices=devices, memory=UncertainMemory(least_mb, least_mb / 2, least_mb / 2 / SURENESS))


@pytest.mark.parametrize(
    ("small", "starts"),
    [
        pytest.param(unknown(), False, id="unknown"),
        pytest.param(unknown(GB), False, id="unknown, and likely small"),
        pytest.param(shared(12 * GB), True, id="known"),
        pytest.param(shared(13 * GB), False, id="known, and too large to fit beside the head"),
    ],
)
def test_a_job_of_unknown_memory_does_not_start_beside_a_head(small: Need, starts: bool) -> None:
    """The head needs half of each of two cards, or more; on one of them a job runs."""
    head = queue(1, unknown(devices=2), priority=5)
    plan = decide(view(head, queue(2, small, 20), on=2, leases=[lease("a", "G0", memory_mb=20 * GB)]))
    assert started(plan) == ({20: ("G1",)} if starts else {})
    if not small.is_memory_known:
        kept = next(reason for reason in waiting_job(plan, 2).reasons if reason.device_id == "G1")
        assert (kept.kind, [holder.label for holder in kept.holders]) == (ReasonKind.AWAITED, ["job 1"])
        assert kept.text.endswith("; how much memory this job needs is not known yet")


def test_a_job_of_unknown_memory_leaves_alone_what_a_ticket_ahead_has_reserved() -> None:
    def plan(small: Need) -> Plan:
        ahead = ticket(shared(12 * GB, devices=2), since=NOW - 5)
        leases = [lease("a", "G0", memory_mb=20 * GB)]
        return decide(view(queue(2, small, 20), on=3, leases=leases, tickets=(ahead,)))

    assert not plan(replace(unknown(), only=("G1",))).starts
    assert started(plan(replace(unknown(), only=("G2",)))) == {}, "both free devices serve the ticket"
    assert started(plan(shared(12 * GB))) == {20: ("G1",)}


def test_a_job_of_unknown_memory_may_start_if_it_ends_before_the_head_could_start() -> None:
    for most_s, then in ((39.0, {20: ("G1",)}), (41.0, {})):
        head = queue(1, unknown(devices=2), priority=5)
        plan = decide(
            view(head, queue(2, unknown(), 20), on=2, leases=[lease("a", "G0")], running=[of_lease("a", 90, NOW + 40)],
                 **lasting(_20=most_s))
        )  # fmt: skip
        assert started(plan) == then


@pytest.mark.parametrize(("most_s", "fits"), [(39.0, True), (40.0, True), (41.0, False)])
def test_a_job_that_ends_before_the_head_could_start_may_start(most_s: float, fits: bool) -> None:
    small = queue(2, Need(), 20)
    plan = decide(behind_a_wide_one(small, ends_after=NOW + 40, **lasting(_20=most_s)))
    assert started(plan) == ({20: ("G1",)} if fits else {})


@pytest.mark.parametrize(
    ("spec", "learned"),
    [
        pytest.param({"duration_s": 30.0}, None, id="declared"),
        pytest.param({"time_limit_s": 25.0, "grace_s": 5.0}, None, id="by its time limit"),
        pytest.param({}, Profile(count=2, durations_s=(1.0, 20.0)), id="learned, with its margin"),
    ],
)
def test_all_ways_of_knowing_how_long_a_job_takes_count(spec: dict[str, Any], learned: Profile | None) -> None:
    known = estimate(JobSpec(command=("true",), cwd="/", environment={}, need=Need(), **spec), learned)

    def plan(head_starts_in_s: float) -> Plan:
        small = queue(2, Need(), 20)
        return decide(behind_a_wide_one(small, ends_after=NOW + head_starts_in_s, facts={20: JobFacts(estimate=known)}))

    assert started(plan(30.0)) == {20: ("G1",)}
    assert not plan(29.0).starts


def test_only_jobs_that_end_in_time_start_on_reserved_devices() -> None:
    plan = decide(behind_a_wide_one(queue(2, Need(), 20), ends_after=NOW + 1e9))
    assert not plan.starts, "a job of unknown duration does not start on reserved devices"
    head, small = queue(1, WIDE, priority=5), queue(2, Need(), 20)
    leases = [lease("mine", "G0"), lease("theirs", "G1", holder=BOB)]
    plan = decide(
        view(head, small, on=3, leases=leases, running=[of_lease("mine", 90, NOW + 100)],
             **lasting(_20=50.0))
    )  # fmt: skip
    assert not plan.starts, "a lease of unknown end may end at any moment"
    # The head waits for as many ends as it needs.
    leases = [lease("a", "G0"), lease("b", "G1")]
    for most_s, fits in ((79.0, True), (81.0, False)):
        plan = decide(
            view(queue(1, Need(devices=3), priority=5), queue(2, Need(), 20), on=3, leases=leases,
                 running=[of_lease("a", 90, NOW + 20), of_lease("b", 91, NOW + 80)], **lasting(_20=most_s))
        )  # fmt: skip
        assert bool(plan.starts) is fits
    theirs = ticket(Need(), since=NOW - 5)
    small = queue(2, Need(), 20)
    plan = decide(behind_a_wide_one(small, tickets=(theirs,), ends_after=NOW + 40, **lasting(_20=1.0)))
    assert not plan.starts, "a backfilled job takes nothing from a ticket"


@pytest.mark.parametrize("ends_at", [None, NOW - 5], ids=["unknown", "past"])
def test_where_the_head_might_start_at_any_moment_nothing_goes_before_it(ends_at: float | None) -> None:
    plan = decide(behind_a_wide_one(queue(2, Need(), 20), ends_after=ends_at, **lasting(_20=0.1)))
    assert not plan.starts


def head_fits(planner_view: World, need: Need, gone: tuple[Lease, ...], plan: Plan | None = None) -> bool:
    """Return whether the head could start after these leases end, beside the starts of the plan."""
    placement = placement_without(PlacementState(planner_view.machine), frozenset(lease.id for lease in gone))
    for start in plan.starts if plan else ():
        placement.add_claim(start.claim, ME)
    return placement.find_claim(need) is not None


# Needs of several devices wait most often, and so have the most to lose.
heads = st.one_of(
    needs,
    st.builds(Need, devices=st.integers(2, 4)),
    st.builds(shared, st.sampled_from([5 * GB, 20 * GB]), st.integers(2, 4)),
)


@pytest.mark.no_cover
@given(cards(), heads, queues_of(), st.randoms(use_true_random=False))
def test_whichever_leases_end_no_head_waits(world: Cards, need: Need, queues: list[LaneQueue], chance: Random) -> None:
    snapshot, leases, measured = world
    head = queue(99, need, 999, priority=100, waited_s=LONG)
    planner_view = view(head, *queues, on=snapshot, leases=leases, measured=measured)
    plan = decide(planner_view)
    assume(999 not in started(plan))
    ending = chance.sample(leases, len(leases))
    for count in range(len(leases) + 1):
        gone = tuple(ending[:count])
        if head_fits(planner_view, need, gone):
            assert head_fits(planner_view, need, gone, plan)


def grown(start: Start) -> Start:
    """Return the start of a job of unknown memory that turns out to need all of its devices."""
    if start.lane.need.is_memory_known:
        return start
    return replace(start, claim=Claim(shares=tuple(Share(device_id=each.device_id) for each in start.claim.shares)))


@pytest.mark.no_cover
@given(
    cards([Vendor.NVIDIA]),
    st.builds(unknown, st.sampled_from([2 * GB, 12 * GB]), st.integers(1, 4)),
    st.lists(st.one_of(needs, st.builds(unknown, st.sampled_from([GB, 12 * GB]), st.integers(1, 2))), max_size=5),
    st.randoms(use_true_random=False),
)
def test_unknown_jobs_delay_no_head(world: Cards, need: Need, others: list[Need], chance: Random) -> None:
    snapshot, leases, measured = world
    queues = [queue(place, each, place * 10) for place, each in enumerate(others, start=1)]
    head = queue(99, need, 999, priority=100, waited_s=LONG)
    planner_view = view(head, *queues, on=snapshot, leases=leases, measured=measured)
    plan = decide(planner_view)
    assume(999 not in started(plan))
    plan = replace(plan, starts=tuple(map(grown, plan.starts)))
    ending = chance.sample(leases, len(leases))
    for count in range(len(leases) + 1):
        gone = tuple(ending[:count])
        if head_fits(planner_view, need, gone):
            assert head_fits(planner_view, need, gone, plan)


@pytest.mark.no_cover
@given(
    cards(),
    heads,
    queues_of(),
    st.lists(st.sampled_from([None, None, 10.0, 50.0]), min_size=9, max_size=9),
    st.dictionaries(st.integers(10, 69), st.sampled_from([5.0, 20.0, 60.0]), min_size=20),
)
def test_with_known_durations_only_jobs_that_end_in_time_use_the_heads_devices(
    world: Cards, need: Need, queues: list[LaneQueue], ends: list[float | None], most_s: dict[int, float]
) -> None:
    """At each moment at which the head could start, were nothing else started, it still can."""
    snapshot, leases, measured = world
    ends_at = [None if end is None else NOW + end for end in ends]
    live = [of_lease(each.id, 100 + place, ends_at[place]) for place, each in enumerate(leases)]
    planner_view = view(
        queue(99, need, 999, priority=100, waited_s=LONG), *queues, on=snapshot, leases=leases, measured=measured,
        running=live, facts={each: JobFacts(estimate=Estimate(most_s=most)) for each, most in most_s.items()},
    )  # fmt: skip
    plan = decide(planner_view)
    assume(999 not in started(plan))
    for after_s in (0.0, 10.0, 50.0):
        gone = tuple(each for each, end in zip(leases, ends, strict=False) if (end or 0.0) <= after_s)
        still = [start for start in plan.starts if most_s.get(start.job_id, 1e9) > after_s]
        if head_fits(planner_view, need, gone):
            assert head_fits(planner_view, need, gone, Plan(starts=tuple(still)))
