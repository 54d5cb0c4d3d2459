"""The planner and the RAM of the host: 23 GB, of which 2 GB stay free, and a card of 24 GB."""

from msgspec.structs import replace

from gpuyard.model.lease import FixedMemory, HostShare, Lease, Need
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.policy.host_room import HostUse, HostView
from gpuyard.policy.numbers import STRICT_AFTER_S
from gpuyard.policy.plan import decide
from gpuyard.policy.wait_reasons import ReasonKind
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


def test_one_plan_starts_no_more_than_the_ram_is_enough_for() -> None:
    plan = decide(view(queue(1, ram(8, devices=1), *range(10, 18)), on=host()))
    assert list(started(plan)) == [10, 11]
    assert kinds_of(waiting_job(plan, 1))[0] is ReasonKind.HOST_ROOM


def test_jobs_without_devices_reserve_ram_too() -> None:
    plan = decide(view(queue(1, ram(8), 10, 11, 12), on=host(0)))
    assert list(started(plan)) == [10, 11]
    assert [start.claim.host for start in plan.starts] == [HostShare(ram_mb=8 * GB)] * 2


def test_jobs_that_reserve_nothing_do_not_wait_for_ram() -> None:
    plan = decide(view(queue(1, Need(devices=0), 10), on=host(0), leases=[held("a", 21)]))
    assert list(started(plan)) == [10]


def run_of(lease: str, before_s: float) -> RunningJob:
    """A job of this queue that started this long before now."""
    return replace(running(99), lease_id=lease, started_at=NOW - before_s)


def test_the_first_job_that_waits_for_ram_keeps_it_from_jobs_behind() -> None:
    """A script holds 8 GB, 13 GB are free: the 16 GB of job 10 come first."""
    queues = queue(1, ram(16), 10), queue(2, ram(6), 20), queue(3, ram(6, devices=1), 30)
    plan = decide(view(*queues, on=host(), leases=[held("a", 8)]))
    assert started(plan) == {}
    assert plan.head is not None
    assert plan.head.job_id == 10
    text = "RAM and CPUs reserved for job 10 of me, ahead in the queue"
    assert [reason.text for reason in waiting_job(plan, 2).reasons] == [text]


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


def test_a_job_that_has_waited_for_long_keeps_all_free_ram() -> None:
    queues = queue(1, ram(16), 10, waited_s=2 * STRICT_AFTER_S), queue(2, ram(2), 20)
    old = view(*queues, on=host(), leases=[held("a", 8)], running=[run_of("a", before_s=1e5)])
    plan = decide(old)
    assert started(plan) == {}
    text = "RAM reserved for job 10 of me, ahead in the queue"
    assert [reason.text for reason in waiting_job(plan, 2).reasons] == [text]


def test_a_job_of_more_ram_than_the_machine_has_keeps_none() -> None:
    plan = decide(view(queue(1, ram(64), 10), queue(2, ram(8), 20), on=host()))
    assert list(started(plan)) == [20]


def test_a_head_that_lacks_ram_has_its_devices_reserved_as_well() -> None:
    """Job 10 needs both cards and 16 GB: no job behind it takes a card while it waits for RAM."""
    whole = replace(Need(devices=2), host=HostShare(ram_mb=16 * GB))
    plan = decide(view(queue(1, whole, 10), queue(2, Need(), 20), on=host(2), leases=[held("a", 8)]))
    assert started(plan) == {}


def test_the_ram_of_a_request_ahead_in_the_ledger_is_kept() -> None:
    plan = decide(view(queue(1, ram(8), 10), on=host(), tickets=(ticket(ram(16), since=0.0),)))
    assert started(plan) == {}


def test_what_running_jobs_took_is_not_charged_twice() -> None:
    one = view(queue(1, ram(8), 10, 11), on=host(available_gb=15.0), leases=[held("a", 8)])
    placed = replace(one, machine=replace(one.machine, host=HostView(used={"a": HostUse(ram_mb=8 * GB)})))
    assert list(started(decide(placed))) == [10]


def test_jobs_with_devices_that_say_nothing_about_ram_start_as_before() -> None:
    assert list(started(decide(view(queue(1, shared(1), 10), on=host(available_gb=0.5))))) == [10]
