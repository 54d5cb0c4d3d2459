"""Sharing never exceeds a card, in any order of events; suspended jobs resume, and urgent jobs preempt others."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Started, Usage
from gpuyard.model.lease import Claim, FixedMemory, Lease, Need, Share, WholeDevice
from gpuyard.policy.numbers import LOOK_AHEAD
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.sizing import KnownRuns
from gpuyard.policy.usage_curve import Newcomer
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import JobFacts, Plan, RunningJob, World
from tests.scale import size
from tests.unit.policy.test_placement import CARD, GB, card, lease, machine, shared
from tests.unit.policy.test_planner import NOW, kinds_of, queue, started, view, waiting_job

CARDS = 3
NAMES = tuple(f"G{index}" for index in range(CARDS))
LONG_S = 600.0


def run(job_id: int, lease_id: str, cost_s: float | None = 1.0, priority: int = 0, **changes: Any) -> RunningJob:
    made = RunningJob(
        job_id=job_id, user="me", tag="", devices=1, started_at=NOW - 60, lease_id=lease_id, priority=priority,
        preempt_cost_s=cost_s,
    )  # fmt: skip
    return replace(made, **changes)


def resuming(job_id: int, need: Need, **changes: Any) -> LaneQueue:
    return queue(-job_id, need, job_id, resumes=True, **changes)


def preempted(plan: Plan) -> dict[int, int]:
    return {preempt.job_id: preempt.for_job for preempt in plan.preempts}


class Ledger:
    """A ledger with its leases, and the memory that each process really holds."""

    def __init__(self) -> None:
        self.leases: dict[str, Lease] = {}
        self.used: dict[tuple[str, str], float] = {}
        self.foreign = dict.fromkeys(NAMES, 0.0)
        self.suspended: dict[str, Need] = {}
        self.made = 0

    def used_on(self, name: str) -> float:
        return self.foreign[name] + sum(used for (_, where), used in self.used.items() if where == name)

    def live(self) -> list[Lease]:
        return [each for each in self.leases.values() if each.shares]

    def look(self, *queues: LaneQueue, **changes: Any) -> World:
        cards = [card(index, used=self.used_on(name)) for index, name in enumerate(NAMES)]
        measured: dict[tuple[str, str], float | None] = {
            (each.id, share.device_id): self.used.get((each.id, share.device_id), 0.0)
            for each in self.live()
            for share in each.shares
        }
        return view(*queues, on=machine(*cards), leases=self.live(), measured=measured, **changes)

    def pick(self, which: int) -> Lease | None:
        held = self.live()
        return held[which % len(held)] if held else None

    # Events

    def start(self, which: int, part: float) -> None:
        needs = (Need(), shared(part * CARD), shared(part * 8 * GB, devices=2), Need(memory=WholeDevice(part * CARD)))
        waiting = [
            queue(number, needs[(which + number) % 4], *range(number * 10, number * 10 + 3)) for number in (1, 2)
        ]
        waiting += [resuming(100 + number, need) for number, need in enumerate(self.suspended.values())]
        names = list(self.suspended)
        for each in decide(self.look(*waiting)).starts:
            lease_id = names[each.job_id - 100] if each.lane.resumes else self._new_name()
            self._take(lease_id, each.claim)

    def _new_name(self) -> str:
        self.made += 1
        return f"l{self.made}"

    def _take(self, lease_id: str, claim: Claim) -> None:
        held = self.suspended.pop(lease_id, None)
        self.leases[lease_id] = Lease(id=lease_id, holder=lease("x", "G0").holder, shares=claim.shares, since=0.0)
        for share in claim.shares:
            self.check(share.device_id)
        for share in claim.shares:
            self.used[lease_id, share.device_id] = (held.required_mb or 0.0) if held is not None else 0.0

    def grow(self, which: int, part: float) -> None:
        one = self.pick(which)
        for share in one.shares if one is not None else ():
            key = (one.id if one is not None else "", share.device_id)
            self.used[key] = self.used.get(key, 0.0) + part * (CARD - self.used_on(share.device_id))

    def shrink(self, which: int, part: float) -> None:
        one = self.pick(which)
        self.used = {key: used * (part if one and key[0] == one.id else 1.0) for key, used in self.used.items()}

    def foreign_use(self, which: int, part: float) -> None:
        name = NAMES[which % CARDS]
        free = CARD - self.used_on(name) + self.foreign[name]
        self.foreign[name] = part * part * free

    def settle(self, which: int, _: float) -> None:
        one = self.pick(which)
        if one is None or not all(share.is_exclusive for share in one.shares):
            return
        peaks = {share.device_id: self.used.get((one.id, share.device_id), 0.0) for share in one.shares}
        attempt = Attempt(
            job_id=1, number=1, phase=Started(at=0.0, keeper_pid=1), boot_id=None, usage=Usage(peaks_mb=peaks)
        )
        shares = Newcomer(attempt, KnownRuns(), LONG_S).adjusted_shares(one.shares, dict.fromkeys(NAMES, CARD), 1.28)
        self.leases[one.id] = replace(one, shares=shares)

    def suspend(self, which: int, _: float) -> None:
        one = self.pick(which)
        if one is None:
            return
        devices = tuple(share.device_id for share in one.shares)
        held = max(self.used.get((one.id, name), 0.0) for name in devices)
        memory = WholeDevice(held) if one.shares[0].is_exclusive else FixedMemory(held)
        self.suspended[one.id] = Need(devices=len(devices), memory=memory, only=devices)
        self.leases[one.id] = replace(one, shares=())
        self.used = {key: used for key, used in self.used.items() if key[0] != one.id}

    def end(self, which: int, _: float) -> None:
        one = self.pick(which)
        if one is not None:
            del self.leases[one.id]
            self.used = {key: used for key, used in self.used.items() if key[0] != one.id}

    # The invariant of a device after each grant

    def check(self, name: str) -> None:
        here = [(each, share) for each in self.live() if (share := each.on(name)) is not None]
        assert len(here) == 1 or not any(share.is_exclusive for _, share in here), f"{name} is somebody's alone"
        charged = sum(max(share.memory_mb or 0.0, self.used.get((each.id, name), 0.0)) for each, share in here)
        assert charged + self.foreign[name] <= CARD + 1e-6, f"{name} is promised {charged} MB beside foreign processes"


verbs = st.sampled_from(
    ["start", "start", "start", "grow", "grow", "shrink", "foreign_use", "settle", "suspend", "end"]
)


@settings(max_examples=size(80, full=300))
@given(st.lists(st.tuples(verbs, st.integers(0, 5), st.floats(0.0, 1.0)), max_size=40))
def test_charged_memory_never_exceeds_a_card_in_any_order_of_events(story: list[tuple[str, int, float]]) -> None:
    ledger = Ledger()
    for verb, which, part in story:
        act: Callable[[int, float], None] = getattr(ledger, verb)
        act(which, part)


def test_the_story_of_a_ledger_would_notice_a_promise_too_many() -> None:
    ledger = Ledger()
    for name in ("a", "b"):
        ledger.leases[name] = lease(name, "G0", memory_mb=0.6 * CARD)
    with pytest.raises(AssertionError, match="is promised"):
        ledger.check("G0")
    ledger.leases["c"] = lease("c", "G1")
    ledger.leases["d"] = lease("d", "G1", memory_mb=GB)
    with pytest.raises(AssertionError, match="somebody's alone"):
        ledger.check("G1")


def sized(*queues: LaneQueue, sizes: dict[int, float], **changes: Any) -> World:
    return view(*queues, facts={each: JobFacts(need=shared(size * GB)) for each, size in sizes.items()}, **changes)


def test_jobs_of_a_lane_are_sized_one_by_one() -> None:
    lane = queue(1, Need(), 10, 11, 12, sizes_each=True)
    sizes = {10: 20.0, 11: 30.0, 12: 4.0}
    plan = decide(sized(lane, sizes=sizes, on=1))
    assert started(plan) == {10: ("G0",), 12: ("G0",)}, "a job too large for the machine delays no other"
    lane = queue(1, Need(), *range(10, 20), sizes_each=True)
    plan = decide(sized(lane, sizes=dict.fromkeys(range(10, 20), 7.0), on=2))
    assert sorted(started(plan).values()) == [("G0",)] * 3 + [("G1",)] * 3, "starts are charged in the same plan"
    # A claimed share is the needed memory.
    plan = decide(view(queue(1, replace(shared(5 * GB), load_percent=30.0), 10)))
    assert plan.starts[0].claim.shares == (
        Share(device_id="G0", memory_mb=5 * GB, load_percent=30.0, is_exclusive=False),
    )


def test_a_lane_is_dropped_after_many_jobs_that_do_not_fit() -> None:
    taken = lease("a", "G0", memory_mb=20 * GB)
    for too_large in (LOOK_AHEAD - 1, LOOK_AHEAD):
        sizes = dict.fromkeys(range(10, 10 + too_large), 30.0) | {1000: 1.0}
        lane = queue(1, Need(), *sizes, sizes_each=True)
        plan = decide(sized(lane, sizes=sizes, leases=[taken], measured={("a", "G0"): 0.0}))
        assert bool(plan.starts) is (too_large < LOOK_AHEAD)


def test_a_suspended_job_waits_in_the_same_queue_and_counts_once() -> None:
    need = Need(memory=WholeDevice(8 * GB), only=("G0",))
    for priority, first in ((1, 7), (-1, 20)):
        plan = decide(view(resuming(7, need, priority=priority), queue(2, Need(), 20)))
        assert list(started(plan)) == [first]
    live = [run(7, "a", tag="night")]
    waiting = queue(2, shared(GB), 20, 21, tag="night")
    going_on = resuming(7, replace(shared(8 * GB), only=("G0",)), tag="night", priority=1)
    plan = decide(view(going_on, waiting, running=live, tags={"night": 2}))
    assert list(started(plan)) == [7, 20]
    assert kinds_of(waiting_job(plan, 2)) == [ReasonKind.LIMIT], "a resumed job counts once"
    # A job resumes while the queue is paused but not while the machine is too busy.
    for kind, goes_on in ((ReasonKind.PAUSED, True), (ReasonKind.HOST_TOO_BUSY, False)):
        plan = decide(view(resuming(7, shared(GB)), queue(2, shared(GB), 20), closed_reasons=(Reason(kind, "no"),)))
        assert list(started(plan)) == ([7] if goes_on else [])


def urgent(need: Need | None = None, **changes: Any) -> LaneQueue:
    return queue(1, need or Need(), 10, preempts=True, priority=5, **changes)


def test_an_urgent_job_preempts_another_if_it_has_to() -> None:
    plan = decide(view(urgent(), leases=[lease("a", "G0")], running=[run(7, "a")]))
    assert (preempted(plan), plan.starts) == ({7: 10}, ()), "an urgent job preempts another"
    plan = decide(view(queue(1, Need(), priority=5), leases=[lease("a", "G0")], running=[run(7, "a")]))
    assert not plan.preempts, "a job that may not preempt waits"
    plan = decide(view(urgent(), on=2, leases=[lease("a", "G0")], running=[run(7, "a")]))
    assert (preempted(plan), started(plan)) == ({}, {10: ("G1",)}), "no job is preempted while memory is free"
    leaving = run(7, "a", None, is_leaving=True)
    leases = [lease("a", "G0"), lease("b", "G1")]
    plan = decide(view(urgent(), queue(2, Need(), 20), on=2, leases=leases, running=[leaving, run(8, "b")]))
    assert not plan.preempts
    left = decide(view(urgent(), queue(2, shared(GB), 20), on=2, leases=leases[1:], running=[run(8, "b")]))
    assert started(left) == {10: ("G0",)}, "no further job is preempted while one leaves and its memory stays reserved"
    first = queue(2, Need(devices=2), 20, priority=9)
    leases = [lease("a", "G0")]
    plan = decide(view(first, urgent(), on=2, leases=leases, running=[run(7, "a")]))
    assert not plan.preempts
    assert plan.head is not None
    assert plan.head.job_id == 20, "a head that may not preempt keeps jobs behind it from preempting"
