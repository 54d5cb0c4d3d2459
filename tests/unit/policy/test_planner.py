"""Which jobs start now and where, and why the others wait. A card has 24 GB by default."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuyard.model.lease import FixedMemory, Holder, Lease, Need, WholeDevice
from gpuyard.model.machine_snapshot import Device, Host, Snapshot, Vendor
from gpuyard.policy.machine import Machine
from gpuyard.policy.numbers import AGEING_S
from gpuyard.policy.plan import decide, estimate_start
from gpuyard.policy.queue_order import Candidate, Lane, LaneQueue
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import JobFacts, Plan, RunningJob, SchedulingLimits, StartCap, WaitingJob, WaitingLane, World
from tests.known import known
from tests.unit.policy.test_placement import BOB, GB, card, free_memory, lease, machine, shared, ticket

NOW = 1_000_000.0
ME = Holder(uid=1000, user="me", pid=1)
CPU = Need(devices=0)
PAUSED = Reason(ReasonKind.PAUSED, "the queue is paused")


def queue(lane_id: int, need: Need, *ids: int, waited_s: float = 0.0, **changes: Any) -> LaneQueue:
    """Return a lane with jobs submitted in the order of their ids; without ids, one job with the lane's number."""
    kept = Lane(id=lane_id, priority=0, user="me", tag="", need=need)
    jobs = (Candidate(job_id=each, queued_at=NOW - waited_s + each / 1000) for each in ids or (lane_id,))
    return LaneQueue(lane=replace(kept, **changes), jobs=jobs)


def view(
    *queues: LaneQueue,
    on: Snapshot | int = 1,
    leases: Sequence[Lease] = (),
    measured: dict[tuple[str, str], float | None] | None = None,
    cpu_jobs: int = 4,
    tags: dict[str, int] | None = None,
    running: Sequence[RunningJob] = (),
    facts: dict[int, JobFacts] | None = None,
    **changes: Any,
) -> World:
    """Return a world. `facts` are those of single jobs, by id."""
    known = facts or {}
    lanes = [
        WaitingLane(
            lane=each.lane,
            jobs=tuple(replace(job, kind=job.job_id if job.job_id in known else None) for job in each.jobs),
        )
        for each in queues
    ]
    snapshot = on if isinstance(on, Snapshot) else machine(*map(card, range(on)))
    return World(
        now=NOW,
        machine=Machine(now=NOW, snapshot=snapshot, leases=tuple(leases), measured=measured or {}),
        lanes=tuple(each for each in lanes if each.jobs),
        facts=known,
        holder=ME,
        limits=SchedulingLimits(cpu_jobs=cpu_jobs, tags=tags or {}),
        running=tuple(running),
        **changes,
    )


def running(job_id: int, tag: str = "", devices: int = 1, **changes: Any) -> RunningJob:
    return RunningJob(job_id=job_id, user="me", tag=tag, devices=devices, started_at=NOW - 60, **changes)


def started(plan: Plan) -> dict[int, tuple[str, ...]]:
    return {start.job_id: tuple(share.device_id for share in start.claim.shares) for start in plan.starts}


def waiting_job(plan: Plan, lane_id: int) -> WaitingJob:
    return next(job for job in plan.waiting if job.lane.id == lane_id)


def kinds_of(job: WaitingJob) -> list[ReasonKind]:
    return [reason.kind for reason in job.reasons]


def test_free_devices_go_to_the_first_in_the_queue() -> None:
    plan = decide(view(queue(1, Need(), 10, 11, 12), queue(2, Need(), 20, priority=1), on=2))
    assert started(plan) == {20: ("G0",), 10: ("G1",)}
    assert [job.job_id for job in plan.waiting] == [11]
    plan = decide(view(queue(1, Need(), 10, 11, 12, tag="a"), queue(2, Need(), 20, 21, tag="b"), on=4))
    assert list(started(plan)) == [10, 20, 11, 21], "tags take turns"
    # Recent use counts before submission.
    queues = queue(1, Need(), 10, tag="busy"), queue(2, Need(), 20, tag="idle")
    assert list(started(decide(view(*queues, used={("me", "busy"): 60.0})))) == [20]
    queues = queue(1, Need(), 10, waited_s=4 * AGEING_S), queue(2, Need(), 20, priority=3)
    assert list(started(decide(view(*queues)))) == [10], "an aged job goes before a fresh one of higher priority"


def test_jobs_get_all_their_devices_or_share_what_fits() -> None:
    wide = Need(devices=2)
    assert started(decide(view(queue(1, wide), on=3))) == {1: ("G0", "G1")}
    plan = decide(view(queue(1, wide), on=2, leases=[lease("a", "G0")]))
    assert not plan.starts, "several devices are had all at once or not at all"
    assert kinds_of(waiting_job(plan, 1)) == [ReasonKind.LEASED, ReasonKind.TOO_FEW]
    plan = decide(view(queue(1, shared(10 * GB), 10, 11, 12)))
    assert started(plan) == {10: ("G0",), 11: ("G0",)}, "jobs that share fill a card and no more"
    (reason,) = [reason for reason in waiting_job(plan, 1).reasons if reason.device_id == "G0"]
    assert (reason.kind, reason.had, reason.needed) == (ReasonKind.NO_ROOM, 4 * GB, 10 * GB)
    assert [holder.label for holder in reason.holders] == ["job 10", "job 11"]


@pytest.mark.parametrize(
    ("need", "device"),
    [
        (Need(vendor=Vendor.AMD), "G1"), (Need(model="h100"), "G2"),
        (Need(only=("G2", "G1"), banned=("G1",)), "G2"), (Need(banned=("G0", "G2")), "G1"),
        (Need(memory=WholeDevice(30 * GB)), "G2"),
    ],
)  # fmt: skip
def test_a_job_goes_only_where_it_asked_to_go(need: Need, device: str) -> None:
    cards = card(0), card(1, vendor=Vendor.AMD), card(2, name="NVIDIA H100", memory_free_mb=80 * GB)
    assert started(decide(view(queue(1, need), on=machine(*cards)))) == {1: (device,)}


def test_work_without_devices_waits_behind_none_and_has_slots_of_its_own() -> None:
    plan = decide(view(queue(1, Need()), queue(2, CPU), on=0))
    assert started(plan) == {2: ()}, "a machine without devices still runs jobs without devices"
    assert waiting_job(plan, 1).reasons[-1].text == "no GPU available now (1 needed)"
    plan = decide(view(queue(1, Need(), priority=9), queue(2, CPU), leases=[lease("a", "G0")]))
    assert started(plan) == {2: ()}, "work without devices waits behind no device"
    plan = decide(view(queue(1, CPU, 10, 11, 12), queue(2, Need()), cpu_jobs=3, running=[running(7, devices=0)]))
    assert list(started(plan)) == [2, 10, 11], "work without devices has slots of its own"
    (reason,) = waiting_job(plan, 1).reasons
    assert (reason.kind, reason.had, reason.needed) == (ReasonKind.LIMIT, 3.0, 3.0)
    quiet = Need(devices=0, max_cpu_percent=50.0)
    plan = decide(view(queue(1, quiet), queue(2, CPU), on=machine(host=Host(cpu_percent=80.0))))
    assert started(plan) == {2: ()}, "work that wants a quiet machine waits for one"
    assert [reason.text for reason in waiting_job(plan, 1).reasons] == ["CPU 80% > 50%"]
    # A ticket is no concern of work without devices.
    assert started(decide(view(queue(1, CPU), tickets=(ticket(Need()),)))) == {1: ()}


def test_tags_and_arrays_run_as_many_as_they_may() -> None:
    tagged = queue(1, Need(), 10, 11, 12, tag="net"), queue(2, CPU, 20, tag="net")
    plan = decide(view(*tagged, on=4, tags={"net": 2}, running=[running(5, tag="net")]))
    assert list(started(plan)) == [10], "a tag runs as many as it may"
    for lane_id in (1, 2):
        (reason,) = waiting_job(plan, lane_id).reasons
        assert reason.text == "limit reached: at most 2 jobs tagged 'net' at a time"
        assert (reason.kind, reason.had, reason.needed) == (ReasonKind.LIMIT, 2.0, 2.0)
    arrays = queue(1, Need(), 10, 11, group=10, group_limit=2), queue(2, Need(), 20, 21, group=20, group_limit=1)
    plan = decide(view(*arrays, on=8, running=[running(9, group=10)]))
    assert sorted(started(plan)) == [10, 20], "an array runs as many as it may"
    assert kinds_of(waiting_job(plan, 1)) == kinds_of(waiting_job(plan, 2)) == [ReasonKind.LIMIT]


@pytest.mark.parametrize(
    "limited", [{"tag": "net"}, {"group": 10, "group_limit": 1}], ids=["by its tag", "by its array"]
)
def test_a_job_at_a_limit_reserves_no_device(limited: dict[str, Any]) -> None:
    held = queue(1, Need(), 11, priority=5, **limited)
    now = running(9, tag="net", group=10)
    plan = decide(view(held, queue(2, Need(), 20, 21), on=2, tags={"net": 1}, running=[now]))
    assert sorted(started(plan)) == [20, 21]
    assert plan.head is None


def test_a_closed_queue_starts_nothing_and_gives_the_reason() -> None:
    plan = decide(view(queue(1, Need(), 10, 11), queue(2, CPU), on=4, closed_reasons=(PAUSED,)))
    assert not plan.starts
    assert {job.lane.id: job.reasons for job in plan.waiting} == {1: (PAUSED,), 2: (PAUSED,)}
    assert plan.head is None


def test_each_lane_waits_once_and_the_explained_one_with_its_reasons() -> None:
    def full() -> World:
        return view(*(queue(each, Need()) for each in (1, 2, 3)), leases=[lease("a", "G0", holder=BOB)])

    assert [bool(job.reasons) for job in decide(full()).waiting] == [True, False, False]
    plan = decide(full(), explained_lane=3)
    assert not waiting_job(plan, 2).reasons, "the explained lane gets its reasons even on full devices"
    assert waiting_job(plan, 3).reasons[0].text == "held by bob, pid 202"
    plan = decide(view(*(queue(each, Need(), each * 10, each * 10 + 1) for each in range(1, 5)), on=1))
    assert sorted(job.lane.id for job in plan.waiting) == [1, 2, 3, 4], "each considered lane waits once"


def test_requests_of_others_have_their_place() -> None:
    plan = decide(view(queue(1, Need()), tickets=(ticket(Need(), since=NOW - 5),)))
    assert not plan.starts, "who waits in the ledger without us being there goes first"
    assert waiting_job(plan, 1).reasons[0].text == "reserved for bob, pid 202, ahead in the queue"
    assert started(decide(view(queue(1, Need()), on=2, tickets=(ticket(Need()),)))) == {1: ("G1",)}
    # Our own ticket is our place in the queue.
    mine, theirs = ticket(Need(), since=NOW - 9, name="mine"), ticket(Need(), since=NOW - 5)
    assert started(decide(view(queue(1, Need()), tickets=(theirs,), my_ticket=mine))) == {1: ("G0",)}
    late = replace(mine, since=NOW - 1)
    assert not decide(view(queue(1, Need()), tickets=(theirs,), my_ticket=late)).starts

    def against(priority: int) -> Plan:
        return decide(view(queue(1, Need(), priority=priority), tickets=(ticket(Need(), priority=3),)))

    assert started(against(4)) == {1: ("G0",)}
    assert not against(2).starts, "a job of higher priority goes before a ticket and one of lower behind"


@st.composite
def cards(
    draw: st.DrawFn, vendors: Sequence[Vendor] = (Vendor.NVIDIA, Vendor.AMD)
) -> tuple[Snapshot, tuple[Lease, ...], dict[tuple[str, str], float | None]]:
    """Up to four cards, some of them leased, some used by foreign processes."""
    devices: list[Device] = []
    leases: list[Lease] = []
    measured: dict[tuple[str, str], float | None] = {}
    for index in range(draw(st.integers(1, 4))):
        foreign = draw(st.sampled_from([0.0, 0.0, 3 * GB, 12 * GB]))
        sizes = draw(st.lists(st.sampled_from([2 * GB, 6 * GB]), max_size=2))
        if draw(st.integers(0, 3)) == 0:
            leases.append(lease(f"x{index}", f"G{index}"))
            sizes = []
        for number, size in enumerate(sizes):
            name = f"s{index}.{number}"
            leases.append(lease(name, f"G{index}", memory_mb=size))
            used = draw(st.sampled_from([0.0, size / 2, size + GB]))
            measured[name, f"G{index}"] = used
            foreign += used
        vendor = draw(st.sampled_from(vendors))
        devices.append(card(index, used=foreign, vendor=vendor, name=draw(st.sampled_from(["H100", "A100"]))))
    return machine(*devices), tuple(leases), measured


needs = st.builds(
    lambda devices, memory, alone, vendor, banned: Need(
        devices=devices,
        memory=WholeDevice(memory) if alone or memory is None else FixedMemory(memory),
        vendor=vendor,
        banned=banned,
    ),
    st.integers(1, 3),
    st.sampled_from([None, GB, 5 * GB, 12 * GB, 20 * GB]),
    st.booleans(),
    st.sampled_from([None, None, Vendor.AMD]),
    st.sampled_from([(), (), ("G0",), ("G1", "G2")]),
)


@st.composite
def queues_of(draw: st.DrawFn) -> list[LaneQueue]:
    found = []
    for lane_id in range(1, draw(st.integers(1, 6)) + 1):
        ids = range(lane_id * 10, lane_id * 10 + draw(st.integers(1, 4)))
        changes: dict[str, Any] = {"tag": draw(st.sampled_from(["", "a", "b"])), "priority": draw(st.integers(0, 2))}
        if draw(st.booleans()):
            changes |= {"group": lane_id * 10, "group_limit": draw(st.integers(1, 2))}
        found.append(queue(lane_id, draw(st.one_of(needs, st.just(CPU))), *ids, **changes))
    return found


@given(cards(), queues_of(), st.lists(st.builds(running, st.just(1), st.sampled_from(["a", "b"])), max_size=3))
def test_no_plan_exceeds_a_device_or_a_limit(
    world: tuple[Snapshot, tuple[Lease, ...], dict[tuple[str, str], float | None]],
    queues: list[LaneQueue],
    live: list[RunningJob],
) -> None:
    snapshot, leases, measured = world
    planner_view = view(*queues, on=snapshot, leases=leases, measured=measured, cpu_jobs=2, tags={"a": 2}, running=live)
    plan = decide(planner_view)

    assert len(started(plan)) == len(plan.starts)
    for device in snapshot.devices:
        shares = [share for start in plan.starts for share in start.claim.shares if share.device_id == device.id]
        beside = [each for each in leases if each.on(device.id)]
        if any(share.is_exclusive for share in shares):
            assert len(shares) == 1
            assert not beside
        elif shares:
            assert not any(share.is_exclusive for each in beside for share in each.shares)
            free = known(free_memory(device, planner_view.machine))
            assert sum(share.memory_mb or 0.0 for share in shares) <= free
    for start in plan.starts:
        need, ids = start.lane.need, started(plan)[start.job_id]
        assert len(set(ids)) == len(ids) == need.devices
        assert not set(ids) & set(need.banned)
        chosen = [snapshot.device(each) for each in ids]
        assert all(need.vendor in (None, device.vendor) for device in chosen if device)
    assert sum(not start.lane.need.devices for start in plan.starts) <= 2
    before = sum(each.tag == "a" for each in live)
    assert sum(start.lane.tag == "a" for start in plan.starts) <= max(0, 2 - before)
    for each in queues:
        of_lane = [start.job_id for start in plan.starts if start.lane is each.lane]
        assert of_lane == sorted(of_lane)
        assert len(of_lane) <= (each.lane.group_limit or len(of_lane))


def test_a_start_is_estimated_where_everything_is_known() -> None:
    on_cpus = running(3, devices=0, ends_about=NOW - 5)
    lanes = queue(9, Need()).lane, queue(8, CPU).lane
    both = view(running=[running(1, ends_about=NOW + 100), running(2, ends_about=NOW + 40), on_cpus])
    assert [estimate_start(both, lanes[0], ahead, 30.0) for ahead in range(4)] == [
        NOW + 40, NOW + 100, NOW + 70, NOW + 130,
    ]  # fmt: skip
    assert estimate_start(both, lanes[0], 1, None) == NOW + 100, "a start is estimated from running jobs and jobs ahead"
    assert estimate_start(both, lanes[1], 0, None) == NOW - 5, "the job before it is overdue"
    assert estimate_start(both, lanes[1], 1, 30.0) == NOW + 30, "after it, and not after the time when it should end"
    lane = queue(9, Need()).lane
    assert estimate_start(view(), lane, 0, 30.0) is None
    known = view(running=[running(1, ends_about=NOW + 5)])
    assert estimate_start(known, lane, 1, None) is None
    partly = view(running=[running(1, ends_about=NOW + 5), running(2)])
    assert estimate_start(partly, lane, 0, 30.0) is None, "where anything is unknown no start is estimated"


# Caps on starts

CAP = Reason(ReasonKind.RESOURCE_LIMIT, "no program can be started")


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_cap_on_starts_leaves_the_rest_waiting_for_its_reason(most: int) -> None:
    plan = decide(view(queue(1, shared(GB), 1, 2), queue(3, CPU, 3, 4), start_caps=(StartCap(most=most, reason=CAP),)))
    assert len(started(plan)) == most
    assert {job.reasons for job in plan.waiting} == {(CAP,)}
    assert plan.head is None


def test_a_cap_on_starts_with_devices_leaves_other_and_resumed_jobs_alone() -> None:
    cap = StartCap(most=1, reason=CAP, is_for_devices=True)
    plan = decide(view(queue(1, shared(GB), 1, 2), queue(3, CPU, 3, 4), start_caps=(cap,)))
    assert sorted(started(plan)) == [1, 3, 4]
    assert waiting_job(plan, 1).reasons == (CAP,), "a cap on starts with devices leaves other jobs alone"
    cap = StartCap(most=0, reason=CAP)
    plan = decide(view(queue(-1, shared(GB), 1, resumes=True), start_caps=(cap,)))
    assert sorted(started(plan)) == [1], "a suspended job resumes despite a cap on starts"
