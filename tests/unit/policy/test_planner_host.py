"""The planner and the RAM of the host: 23 GB, of which 2 GB stay free, and a card of 24 GB."""

from typing import Any

from msgspec.structs import replace

from gpuyard.model.job_spec import BatchPace
from gpuyard.model.lease import FixedMemory, HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.host_room import HostUse, HostView
from gpuyard.policy.numbers import STRICT_AFTER_S
from gpuyard.policy.plan import decide
from gpuyard.policy.queue_order import LaneQueue
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import RunningJob
from tests.unit.policy.test_placement import ALICE, GB, card, machine, shared, ticket
from tests.unit.policy.test_planner import NOW, kinds_of, queue, running, started, view, waiting_job

HOST = Host(memory_total_mb=23 * GB, memory_available_mb=23 * GB, cpu_count=8.0)


def host(cards: int = 1, available_gb: float = 23.0) -> Snapshot:
    return replace(machine(*map(card, range(cards))), host=replace(HOST, memory_available_mb=available_gb * GB))


def ram(size_gb: float, devices: int = 0, vram_gb: float = 2.0) -> Need:
    return Need(devices=devices, memory=FixedMemory(vram_gb * GB), host=HostShare(ram_mb=size_gb * GB))


def held(name: str, size_gb: float) -> Lease:
    return Lease(id=name, holder=ALICE, shares=(), since=0.0, host=HostShare(ram_mb=size_gb * GB))


def test_a_plan_starts_no_more_than_the_ram_is_enough_for() -> None:
    plan = decide(view(queue(1, ram(8, devices=1), *range(10, 18)), on=host()))
    assert list(started(plan)) == [10, 11], "one plan starts no more than the RAM is enough for"
    assert kinds_of(waiting_job(plan, 1))[0] is ReasonKind.HOST_ROOM
    plan = decide(view(queue(1, ram(8), 10, 11, 12), on=host(0)))
    assert list(started(plan)) == [10, 11], "jobs without devices reserve RAM too"
    assert [start.claim.host for start in plan.starts] == [HostShare(ram_mb=8 * GB)] * 2
    plan = decide(view(queue(1, Need(devices=0), 10), on=host(0), leases=[held("a", 21)]))
    assert list(started(plan)) == [10], "jobs that reserve nothing do not wait for RAM"
    one = view(queue(1, ram(8), 10, 11), on=host(available_gb=15.0), leases=[held("a", 8)])
    placed = replace(one, machine=replace(one.machine, host=HostView(used={"a": HostUse(ram_mb=8 * GB)})))
    assert list(started(decide(placed))) == [10], "what running jobs took is not charged twice"
    # Jobs with devices that say nothing about RAM start as before.
    assert list(started(decide(view(queue(1, shared(1), 10), on=host(available_gb=0.5))))) == [10]


def run_of(lease: str, before_s: float) -> RunningJob:
    """A job of this queue that started this long before now."""
    return replace(running(99), lease_id=lease, started_at=NOW - before_s)


def test_the_first_job_that_waits_for_ram_keeps_it_from_jobs_behind() -> None:
    queues = queue(1, ram(16), 10), queue(2, ram(6), 20), queue(3, ram(6, devices=1), 30)
    plan = decide(view(*queues, on=host(), leases=[held("a", 8)]))
    assert started(plan) == {}
    assert plan.head is not None
    assert plan.head.job_id == 10
    text = "RAM and CPUs reserved for job 10 of me, ahead in the queue"
    assert [reason.text for reason in waiting_job(plan, 2).reasons] == [text]
    old = queue(1, ram(16), 10, waited_s=2 * STRICT_AFTER_S), queue(2, ram(2), 20)
    plan = decide(view(*old, on=host(), leases=[held("a", 8)], running=[run_of("a", before_s=1e5)]))
    assert started(plan) == {}, "a job that has waited for long keeps all free RAM"
    text = "RAM reserved for job 10 of me, ahead in the queue"
    assert [reason.text for reason in waiting_job(plan, 2).reasons] == [text]
    whole = replace(Need(devices=2), host=HostShare(ram_mb=16 * GB))
    plan = decide(view(queue(1, whole, 10), queue(2, Need(), 20), on=host(2), leases=[held("a", 8)]))
    assert started(plan) == {}, "a head that lacks RAM has its devices reserved as well"
    plan = decide(view(queue(1, ram(8), 10), on=host(), tickets=(ticket(ram(16), since=0.0),)))
    assert started(plan) == {}, "the RAM of a request ahead in the ledger is kept"
    plan = decide(view(queue(1, ram(64), 10), queue(2, ram(8), 20), on=host()))
    assert list(started(plan)) == [20], "a job of more RAM than the machine has keeps none"


def test_jobs_behind_start_in_what_it_leaves_over_once_older_jobs_have_ended() -> None:
    """21 GB can be reserved: 16 GB for job 10 leave 5 GB, of which jobs 20 and 21 take 4 GB. The 4 GB of a job that
    started since are of those, too."""
    queues = queue(1, ram(16), 10, waited_s=60.0), queue(2, ram(2), 20, 21, 22)
    older = view(*queues, on=host(), leases=[held("a", 8)], running=[run_of("a", before_s=100.0)])
    assert list(started(decide(older))) == [20, 21]
    queues = queue(1, ram(16), 10, waited_s=60.0), queue(2, ram(2), 20)
    leases = [held("a", 8), held("b", 4)]
    newer = view(*queues, on=host(), leases=leases, running=[run_of("a", before_s=100.0), run_of("b", before_s=1.0)])
    assert list(started(decide(newer))) == []


FULL = Reason(ReasonKind.DISK_FULL, "the disk of its output (/data) has 1 MB free < 1 GB", had=1.0, needed=1024.0)
BEING_READ = Reason(ReasonKind.DISK_FULL, "the free space of the disk of its output is being read")


def refused(job_id: int, *others: int, reason: Reason = FULL, **changes: Any) -> LaneQueue:
    """Return a lane of jobs that write to files, of which the first may not."""
    lane = queue(1, Need(), job_id, *others, **{"writes_files": True, **changes})
    jobs = (replace(job, full_disks=(reason,) if job.job_id == job_id else ()) for job in lane.jobs)
    return replace(lane, jobs=jobs)


def test_a_job_that_writes_to_a_full_disk_waits_and_delays_no_others() -> None:
    plan = decide(view(refused(1)))
    assert started(plan) == {}
    assert waiting_job(plan, 1).reasons == (FULL,), "a job that writes to a full disk waits"
    plan = decide(view(refused(1, 2), queue(3, Need()), on=2))
    assert started(plan) == {2: ("G0",), 3: ("G1",)}, "jobs behind it that write elsewhere start"
    waiting, suspended = queue(1, Need()), queue(-2, Need(), 2, resumes=True)
    plan = decide(view(waiting, suspended, on=2, closed_reasons=(FULL,)))
    assert started(plan) == {2: ("G0",)}, "a full disk of the queue keeps all jobs but suspended ones"
    assert kinds_of(waiting_job(plan, 1)) == [ReasonKind.DISK_FULL]


def test_jobs_stay_in_order_in_a_batch_and_while_a_disk_is_being_read() -> None:
    assert started(decide(view(refused(1, 2, reason=BEING_READ)))) == {}
    assert started(decide(view(refused(1, 2, pace=BatchPace(), group=1)))) == {}, "the runs of a batch stay in order"
