"""What a suspended job needs to resume, and when one that is being suspended has freed its memory. G0 has 24 GB, G1 has
12 GB."""

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job, SuspendedBy, Usage
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import FixedMemory, MemoryNeed, Need, UnknownMemory, WholeDevice
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose
from gpuyard.policy.preempt import MoveRates
from gpuyard.queue.live_attempts import Live
from gpuyard.queue.suspend_jobs import SuspendControl, resume_need
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.database import open_database
from gpuyard.store.job_store import JobStore
from tests.fakes.no_suspender import NoSuspender
from tests.unit.policy.test_placement import GB, card, lease, machine
from tests.unit.store import attempt_of

SMALL = card(1, memory_total_mb=12 * GB, memory_free_mb=12 * GB)


def suspended(
    memory: MemoryNeed, held_gb: dict[str, float], *, reserved_gb: float | None = None, by: SuspendedBy | None = None
) -> Live:
    spec = JobSpec(command=("train",), cwd="/", environment={}, need=Need(devices=2, memory=memory))
    job = Job(id=1, spec=spec, state=JobState.SUSPENDED, priority=0, user="ada", submitted_at=0.0)
    attempt = attempt_of(
        1, 1.0, devices=("G0", "G1"), reserved_mb=None if reserved_gb is None else reserved_gb * GB,
        usage=Usage(peaks_mb={device_id: gb * GB for device_id, gb in held_gb.items()}) if held_gb else None,
        parked=by or SuspendedBy.FOR_ROOM,
    )  # fmt: skip
    return Live(job=job, attempt=attempt)


def granted_gb(
    live: Live, small: Device = SMALL, *leases: str, left_mb: dict[str, float] | None = None
) -> dict[str, float | None] | None:
    """Return the memory of each share that the job is granted, or None if it has to wait. Each of `leases` reserves
    10 GB of G0."""
    others = tuple(lease(name, "G0", memory_mb=10 * GB) for name in leases)
    claim = choose(
        resume_need(live, left_mb or {}), Machine(now=0.0, snapshot=machine(card(0), small), leases=others)
    ).claim
    if claim is None:
        return None
    return {each.device_id: each.memory_mb and each.memory_mb / GB for each in claim.shares}


@pytest.mark.parametrize(
    ("live", "granted"),
    [
        pytest.param(suspended(WholeDevice(), {"G0": 20, "G1": 8}), {"G0": 20, "G1": 8}, id="alone"),
        pytest.param(suspended(WholeDevice(), {"G0": 20, "G1": 0}), {"G0": 20, "G1": 0}, id="one card was not used"),
        pytest.param(
            suspended(FixedMemory(6 * GB), {"G0": 20, "G1": 8}, reserved_gb=6), {"G0": 20, "G1": 8}, id="it outgrew it"
        ),
        pytest.param(
            suspended(FixedMemory(6 * GB), {"G0": 20, "G1": 2}, reserved_gb=6), {"G0": 20, "G1": 6}, id="declared"
        ),
        pytest.param(
            suspended(UnknownMemory(), {"G0": 20, "G1": 8}, reserved_gb=9), {"G0": 20, "G1": 9}, id="a first run"
        ),
        pytest.param(
            suspended(UnknownMemory(), {"G0": 20, "G1": 8}, reserved_gb=25, by=SuspendedBy.MEMORY_GUARD),
            {"G0": 25, "G1": 25},
            id="the memory guard asked for room, and alone it gets what there is",
        ),
    ],
)
def test_a_job_on_unequal_cards_gets_back_on_each_what_it_held_there(live: Live, granted: dict[str, float]) -> None:
    assert granted_gb(live) == granted


def test_a_job_waits_where_a_card_lacks_what_it_held_there_and_does_not_hold_still() -> None:
    live = suspended(FixedMemory(6 * GB), {"G0": 20, "G1": 8}, reserved_gb=6)
    assert granted_gb(live, SMALL, "L") is None
    full = card(1, memory_total_mb=12 * GB, memory_used_mb=5 * GB, memory_free_mb=7 * GB)
    assert granted_gb(live, full) is None
    reasons = choose(resume_need(live, {}), Machine(now=0.0, snapshot=machine(card(0), full))).reasons
    assert "7 GB free, 8 GB needed" in reasons[0].text
    live = suspended(WholeDevice(), {})
    assert granted_gb(live) == {"G0": None, "G1": None}
    occupied = card(1, used=2 * GB, memory_total_mb=12 * GB, memory_free_mb=10 * GB)
    assert granted_gb(live, occupied) is None
    live = suspended(FixedMemory(6 * GB), {"G0": 20, "G1": 11.5}, reserved_gb=6)
    context_left = card(1, memory_total_mb=12 * GB, memory_used_mb=GB, memory_free_mb=11 * GB)
    assert granted_gb(live, context_left) is None
    assert granted_gb(live, context_left, left_mb={"G1": GB}) == {"G0": 20, "G1": 10.5}
    full = card(1, memory_total_mb=12 * GB, memory_used_mb=2 * GB, memory_free_mb=10 * GB)
    assert granted_gb(live, full, left_mb={"G1": GB}) is None


class Parks(NoSuspender):
    """Every program parks its memory."""

    def can_park(self, attempt: Attempt) -> bool:
        return True


def suspending(job_id: int, gigabytes: float, since: float) -> Live:
    live = suspended(FixedMemory(gigabytes * GB), {"G0": gigabytes}, reserved_gb=gigabytes)
    attempt = replace(live.attempt, job_id=job_id, devices=("G0",), suspended_at=since)
    return Live(job=replace(live.job, id=job_id, state=JobState.SUSPENDING), attempt=attempt)


def control_with(suspender: NoSuspender, *lives: Live) -> SuspendControl:
    database, _ = open_database(None)
    transitions = JobTransitions(JobStore(database))
    for live in lives:
        transitions.live[live.job.id] = live
    return SuspendControl(transitions, suspender)


def test_victims_free_their_memory_after_the_time_of_the_largest_sooner_if_parked() -> None:
    rates = MoveRates()
    control = control_with(NoSuspender(), suspending(1, 10, 100.0), suspending(2, 6, 101.0))
    assert control.frees_memory_at([1]) == 100.0 + rates.out_s(10 * GB)
    assert control.frees_memory_at([1, 2]) == 101.0 + rates.out_s(10 * GB)
    control = control_with(Parks(), suspending(1, 10, 100.0))
    assert control.frees_memory_at([1]) == 100.0 + MoveRates().out_s(10 * GB, is_parked=True)
    live = suspending(1, 10, 100.0)
    stopping = Live(job=replace(live.job, state=JobState.STOPPING), attempt=live.attempt)
    assert control_with(NoSuspender(), stopping).frees_memory_at([1]) is None
    assert control_with(NoSuspender()).frees_memory_at([1]) is None
