"""Jobs of a tag that share devices: spread evenly, limited per device, without delaying others. A card has 24 GB."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.job_spec import TagSharing
from gpuyard.model.lease import Need, PartOfDevice
from gpuyard.policy.machine import Packing
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.wait_reasons import ReasonKind
from gpuyard.policy.world import Plan
from tests.unit.policy.test_placement import CARD, GB, card, lease, machine, shared
from tests.unit.policy.test_planner import CPU, NOW, queue, running, started, view, waiting_job

TWO = TagSharing(most_per_device=2)
UNKNOWN = Need(memory=PartOfDevice(0.5))


def sweep(
    lane_id: int, need: Need, *ids: int, sharing: TagSharing = TWO, tag: str = "sweep", **changes: Any
) -> LaneQueue:
    return queue(lane_id, need, *ids, tag_sharing=sharing, tag=tag, **changes)


def running_on(job_id: int, *devices: str, tag: str = "sweep") -> Any:
    return replace(running(job_id, tag=tag, devices=len(devices)), device_ids=devices, lease_id=f"L{job_id}")


def reserved(plan: Plan) -> dict[int, list[float | None]]:
    return {start.job_id: [share.memory_mb for share in start.claim.shares] for start in plan.starts}


def test_jobs_of_a_tag_are_spread_evenly_up_to_their_limit() -> None:
    assert started(decide(view(sweep(1, shared(GB), 10, 11, 12, 13), on=2))) == {
        10: ("G0",), 11: ("G1",), 12: ("G0",), 13: ("G1",),
    }  # fmt: skip
    made = decide(view(sweep(1, shared(GB), 10, 11, 12), on=1))
    assert list(started(made)) == [10, 11], "the limit per device holds and is the reason"
    (reason,) = waiting_job(made, 1).reasons
    assert (reason.kind, reason.text) == (
        ReasonKind.LIMIT,
        "limit reached: at most 2 tasks of its workspace on one GPU at a time",
    )
    leases = [lease("L5", "G0", memory_mb=GB), lease("L6", "G1", memory_mb=GB), lease("L7", "G1", memory_mb=GB)]
    at = [running_on(5, "G0"), running_on(6, "G1"), running_on(7, "G1")]
    made = decide(view(sweep(1, shared(GB), 10, 11), on=2, leases=leases, running=at))
    assert started(made) == {10: ("G0",)}, "running jobs count"
    # Jobs of another tag do not count.
    at = [running_on(5, "G0", tag="other"), running_on(6, "G0", tag="other")]
    leases = [lease("L5", "G0", memory_mb=GB), lease("L6", "G0", memory_mb=GB)]
    assert started(decide(view(sweep(1, shared(GB), 10), leases=leases, running=at))) == {10: ("G0",)}
    made = decide(view(sweep(1, shared(GB), 10, 11, 12, priority=5), queue(2, shared(GB), 20)))
    assert list(started(made)) == [10, 11, 20]
    assert made.head is None, "a job at its tags limit delays no other"


def test_a_job_of_unknown_memory_gets_its_part_of_the_card() -> None:
    assert reserved(decide(view(sweep(1, UNKNOWN, 10, 11), on=2))) == {10: [CARD / 2], 11: [CARD / 2]}
    cards = card(0), card(1, memory_total_mb=80 * GB, memory_free_mb=80 * GB)
    made = decide(view(sweep(1, UNKNOWN, 10, 11, 12, 13), on=machine(*cards)))
    shares = {started(made)[job_id][0]: memory for job_id, (memory,) in reserved(made).items()}
    assert shares == {"G0": CARD / 2, "G1": 40 * GB}
    assert Counter(started(made).values()) == {("G0",): 2, ("G1",): 2}, "the part depends on the size of the card"
    leases, at = [lease("L5", "G0", memory_mb=11 * GB)], [running_on(5, "G0")]
    on = machine(card(0, used=4 * GB))
    made = decide(view(sweep(1, UNKNOWN, 10), on=on, leases=leases, running=at, measured={("L5", "G0"): 0.0}))
    assert reserved(made) == {10: [9 * GB]}, "the last part is the rest of the card"
    # The card where it slows no other job comes before the card with the larger part.
    leases = [lease("a", "G1", memory_mb=GB)]
    made = decide(view(sweep(1, UNKNOWN, 10), on=machine(card(0, used=4 * GB), card(1)), leases=leases))
    assert started(made) == {10: ("G0",)}
    assert reserved(made) == {10: [10 * GB]}
    made = decide(view(sweep(1, replace(UNKNOWN, devices=2), 10), on=machine(card(0, used=23 * GB), card(1), card(2))))
    assert reserved(made) == {10: [CARD / 2, CARD / 2]}, "a full card does not shrink the parts of two others"
    made = decide(view(sweep(1, UNKNOWN, 10), leases=[lease("a", "G0", memory_mb=20 * GB)]))
    assert not made.starts
    assert [reason.kind for reason in waiting_job(made, 1).reasons] == [ReasonKind.NO_ROOM, ReasonKind.TOO_FEW]
    assert made.head is not None, "a job waits while another job has its part"
    made = decide(view(sweep(1, UNKNOWN, 10, 11), sweep(2, UNKNOWN, 20, 21, tag="other")))
    parts = [memory or 0.0 for (memory,) in reserved(made).values()]
    assert sum(parts) == CARD, "two tags share a card by its free memory"
    assert min(parts) == CARD / 4, "at least half of a full part"


@pytest.mark.parametrize("others_mb", [300.0, 1.5 * GB, 11 * GB])
def test_the_part_is_taken_from_what_others_leave(others_mb: float) -> None:
    share = (CARD - others_mb) / 2
    beside_a_desktop = decide(view(sweep(1, UNKNOWN, 10, 11, 12), on=machine(card(0, used=others_mb))))
    assert reserved(beside_a_desktop) == {10: [share], 11: [share]}
    beside_a_lease = decide(view(sweep(1, UNKNOWN, 10, 11, 12), leases=[lease("a", "G0", memory_mb=others_mb)]))
    assert reserved(beside_a_lease) == {10: [share], 11: [share]}


def test_jobs_of_a_tag_share_a_device_however_busy_it_is() -> None:
    busy = replace(shared(GB), load_percent=100.0)
    asked = view(sweep(1, busy, 10, 11, 12, 13, sharing=TagSharing(most_per_device=4)))
    asked = replace(asked, machine=replace(asked.machine, packing=Packing(max_load_percent=200.0)))
    assert list(started(decide(asked))) == [10, 11, 12, 13]
    leases = [lease("a", "G0"), lease("L5", "G1", memory_mb=GB)]
    made = decide(view(sweep(1, shared(GB), 10), on=2, leases=leases, running=[running_on(5, "G1")]))
    assert started(made) == {10: ("G1",)}, "the next job goes past a full device to one with more jobs of the tag"


def test_tasks_that_need_two_devices_count_and_wait_on_both() -> None:
    made = decide(view(sweep(1, shared(GB, devices=2), 10, 11, 12), on=3, running=[]))
    assert started(made) == {10: ("G0", "G1"), 11: ("G0", "G2"), 12: ("G1", "G2")}
    # A job that needs two devices has its places held.
    one = TagSharing(most_per_device=1)
    wide = sweep(1, shared(GB, devices=2), 10, sharing=one, priority=5)
    narrow = sweep(2, shared(GB), 20, sharing=one)
    leases = [lease("L5", "G0", memory_mb=GB)]
    assert not decide(view(wide, narrow, on=2, leases=leases, running=[running_on(5, "G0")])).starts
    wide, narrow = (
        sweep(1, shared(GB, devices=2), 10, sharing=one, priority=5),
        sweep(2, shared(GB), 20, 21, sharing=one),
    )
    leases = [lease("L5", "G0", memory_mb=GB), lease("L6", "G1", memory_mb=GB), lease("L7", "G2", memory_mb=GB)]
    at = [running_on(5, "G0"), running_on(6, "G1"), running_on(7, "G2")]
    assert not decide(view(wide, narrow, on=4, leases=leases, running=at)).starts, "G3 is the first of its two"
    # A task without a device needs no place on one.
    assert started(decide(view(sweep(1, CPU, 10), running=[running_on(5, "G0"), running_on(6, "G0")]))) == {10: ()}


@pytest.mark.parametrize(("ago_s", "ids"), [(0.5, []), (2.0, [10])])
def test_the_next_job_of_a_tag_waits_for_the_stagger_time(ago_s: float, ids: list[int]) -> None:
    sharing = TagSharing(most_per_device=2, stagger_s=1.0)
    made = decide(view(sweep(1, shared(GB), 10, 11, sharing=sharing), on=2, last_starts={"sweep": NOW - ago_s}))
    assert list(started(made)) == ids
    assert ReasonKind.STAGGERED in [reason.kind for reason in waiting_job(made, 1).reasons]


def test_no_job_of_a_stopped_tag_starts_and_a_clock_that_was_set_back_delays_none() -> None:
    made = decide(view(sweep(1, shared(GB), 10), queue(2, shared(GB), 20), stopped_tags=frozenset({"sweep"})))
    assert list(started(made)) == [20], "no job of a stopped tag starts"
    assert [reason.kind for reason in waiting_job(made, 1).reasons] == [ReasonKind.PAUSED]
    sharing = TagSharing(most_per_device=2, stagger_s=1.0)
    made = decide(view(sweep(1, shared(GB), 10, sharing=sharing), last_starts={"sweep": NOW + 3600.0}))
    assert list(started(made)) == [10], "a clock that was set back delays no start"


@given(
    most=st.integers(1, 4),
    sizes=st.lists(st.sampled_from([24 * GB, 40 * GB, 80 * GB]), min_size=1, max_size=4),
    needs=st.lists(st.sampled_from([None, GB, 7 * GB, 20 * GB]), min_size=1, max_size=20),
    used=st.lists(st.floats(0, 30 * GB), min_size=4, max_size=4),
)
def test_the_limit_per_device_and_the_card_size_always_hold(
    most: int, sizes: list[float], needs: list[float | None], used: list[float]
) -> None:
    cards = [
        card(index, memory_total_mb=size, memory_used_mb=min(held, size), memory_free_mb=size - min(held, size))
        for index, (size, held) in enumerate(zip(sizes, used, strict=False))
    ]
    first_run = Need() if most == 1 else Need(memory=PartOfDevice(1 / most))
    queues = [
        sweep(each, first_run if need is None else shared(need), each, sharing=TagSharing(most_per_device=most))
        for each, need in enumerate(needs, 1)
    ]
    made = decide(view(*queues, on=machine(*cards)))
    counts = Counter(device for devices in started(made).values() for device in devices)
    assert all(count <= most for count in counts.values())
    for device in cards:
        charged = sum(
            device.memory_free_mb or 0.0 if share.is_exclusive else share.memory_mb or 0.0
            for start in made.starts
            for share in start.claim.shares
            if share.device_id == device.id
        )
        assert charged <= (device.memory_free_mb or 0.0) + 1e-6
