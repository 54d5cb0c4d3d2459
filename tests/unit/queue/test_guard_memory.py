"""The memory guard over a store: what it records, and whose leases count. A card has 24 GB."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuyard.model.job import Attempt, Outcome, OutcomeKind, PublishedEventKind, SuspendedBy, Usage
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lease import FixedMemory, Holder, Lease, Need, Share, UncertainMemory, UnknownMemory
from gpuyard.model.lifecycle import JobEvent, JobState
from gpuyard.model.machine_snapshot import Device, Host, Process, Sample, Snapshot, Vendor
from gpuyard.policy.world import SchedulingLimits
from gpuyard.ports import LeaseLedger, SuspendResult
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.guard_memory import MemoryGuard
from gpuyard.queue.suspend_jobs import SuspendControl
from gpuyard.queue.transitions import JobTransitions
from tests.fakes.no_suspender import NoSuspender
from tests.unit.store import QueueDb, attempt_of

GB = 1024.0
CARD = 24 * GB
RULES = Rules(limits=SchedulingLimits(cpu_jobs=1))
STRANGER = Holder(uid=4711, user="bob", pid=9)


class CanSuspend(NoSuspender):
    def __init__(self) -> None:
        self.results: list[SuspendResult] = []

    def can_park(self, attempt: Attempt) -> bool:
        return False

    def moved(self) -> list[SuspendResult]:
        return self.results

    def refusal(self, attempt: Attempt, snapshot: Snapshot) -> str | None:
        return None


class Guard:
    """The guard of a queue whose jobs began at 100, 101, 102, … and hold what each reading says."""

    def __init__(self, queue_db: QueueDb, *, can_suspend: bool = True) -> None:
        self.queue_db = queue_db
        self.transitions = JobTransitions(queue_db.store)
        self.leases: tuple[Lease, ...] = ()
        self.more_devices: tuple[Device, ...] = ()
        ledger = cast("LeaseLedger", SimpleNamespace(read=lambda: (self.leases, ())))
        self.suspender = CanSuspend()
        self.suspend_control = SuspendControl(self.transitions, self.suspender if can_suspend else NoSuspender())
        self.guard = MemoryGuard(self.transitions, self.suspend_control, ledger, lambda at: at - 1000.0)

    def start(self, **spec: Any) -> int:
        need = spec.pop("need", Need(memory=UnknownMemory()))
        (job_id,) = self.queue_db.add(need=need, **spec)
        reserved = need.required_mb or 6 * GB
        attempt = attempt_of(job_id, 99.0 + job_id, devices=("G0",), lease_id=f"L{job_id}", reserved_mb=reserved)
        self.queue_db.store.start_attempt(attempt)
        self.transitions.reload()
        return job_id

    def move_out(self, job_id: int, at: float, *, is_done: bool = True) -> None:
        """Report that the memory of a job was moved out, or could not be."""
        self.suspender.results = [
            SuspendResult(job_id=job_id, attempt=1, is_resumed=False, is_done=is_done, text="no")
        ]  # fmt: skip
        self.suspend_control.collect()
        with self.queue_db.store.transaction():
            self.suspend_control.record(at)
        self.suspend_control.forget_recorded()

    def read(self, at: float, *, is_hidden: bool = False, foreign_gb: float = 0.0, **held_gb: float) -> bool:
        """Take a reading, with what `job1`, `job2`, … hold, and do a step if the guard asks for one. `is_hidden`: the
        driver lists no processes, so that only the sum is known. `foreign_gb`: what programs hold that are no jobs."""
        held = {int(name.removeprefix("job")): gb * GB for name, gb in held_gb.items()}
        for job_id, mb in held.items():
            if job_id in self.transitions.live:
                self.transitions.note_usage(job_id, Usage(peaks_mb={"G0": mb}))
        used = sum(held.values()) + foreign_gb * GB
        device = Device(
            id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=CARD, memory_used_mb=used,
            memory_free_mb=CARD - used, processes=None if is_hidden else (Process(pid=1, memory_mb=used),),
        )  # fmt: skip
        sample = Sample(
            snapshot=Snapshot(
                taken_at=at, host=Host(memory_available_mb=200 * GB), devices=(device, *self.more_devices)
            )
        )
        acts = self.guard.note(sample, {job_id: {"G0": None if is_hidden else mb} for job_id, mb in held.items()}, at)
        if acts:
            with self.queue_db.store.transaction():
                self.guard.act(RULES, at)
        return acts

    def state(self, job_id: int) -> JobState:
        return self.queue_db.job(job_id).state


@pytest.fixture
def guard(queue_db: QueueDb) -> Guard:
    return Guard(queue_db)


def test_the_youngest_is_suspended_and_resumes_where_clearly_more_is_free(guard: Guard) -> None:
    first, second = guard.start(), guard.start()
    assert not guard.read(110.0, job1=8.0, job2=14.0)
    assert guard.read(111.0, job1=8.0, job2=15.8)
    assert (guard.state(first), guard.state(second)) == (JobState.RUNNING, JobState.SUSPENDING)
    attempt = guard.transitions.live[second].attempt
    assert attempt.parked is SuspendedBy.MEMORY_GUARD
    assert attempt.reserved_mb == 6 * GB, "until it is suspended"
    reason = "GPU 0 had 205 MB left while it grew; it was the youngest first run"
    assert guard.queue_db.job(second).reason == reason
    assert guard.guard.suspended == 1
    (published,) = guard.transitions.take_events()
    assert (published.kind, published.job.id, published.text) == (PublishedEventKind.MADE_WAY, second, reason)
    assert published.job.state is JobState.SUSPENDING
    assert not guard.read(111.1, job1=8.0, job2=15.8), "its memory will be free soon"
    guard.move_out(second, 112.0)
    assert guard.transitions.live[second].attempt.reserved_mb == pytest.approx(1.25 * 15.8 * GB)


def test_a_job_that_could_not_be_suspended_reserves_what_it_did(guard: Guard) -> None:
    guard.start()
    second = guard.start()
    guard.read(110.0, job1=8.0, job2=14.0)
    guard.read(111.0, job1=8.0, job2=15.8)
    guard.move_out(second, 112.0, is_done=False)
    assert guard.state(second) is JobState.RUNNING
    assert guard.transitions.live[second].attempt.reserved_mb == 6 * GB


def test_a_job_that_outgrew_its_memory_resumes_alone_with_what_it_held_and_keeps_its_place(guard: Guard) -> None:
    """Beside 5 GB of a desktop, the 20 GB that it should have on a shared card are never free."""
    guard.start()
    second = guard.start(need=Need(memory=FixedMemory(15 * GB)))
    guard.read(110.0, foreign_gb=5.0, job1=2.8, job2=15.0)
    guard.read(111.0, foreign_gb=5.0, job1=2.8, job2=16.0)
    guard.move_out(second, 112.0)
    (queue,) = guard.suspend_control.queues(113.0)
    assert queue.lane.need.memory == UncertainMemory(16 * GB, 20 * GB, 5 * GB)
    (candidate,) = queue.jobs
    assert candidate.queued_at == guard.queue_db.job(second).submitted_at


def test_a_job_that_takes_long_to_stop_does_not_turn_the_guard_off(guard: Guard) -> None:
    first, second, third = guard.start(), guard.start(), guard.start(grace_s=600.0)
    with guard.queue_db.store.transaction():
        guard.transitions.stop(third, OutcomeKind.CANCELLED, 109.0)
    guard.read(110.0, job1=8.0, job2=6.0, job3=8.0)
    assert not guard.read(111.0, job1=8.0, job2=7.8, job3=8.0), "its memory may be free at any moment"
    guard.read(129.0, job1=8.0, job2=6.0, job3=8.0)
    guard.read(130.0, job1=8.0, job2=7.0, job3=8.0)
    assert guard.read(131.0, job1=8.0, job2=7.8, job3=8.0)
    assert (guard.state(first), guard.state(second)) == (JobState.RUNNING, JobState.SUSPENDING)


def test_where_the_driver_lists_no_processes_the_youngest_counts_as_the_one_that_grows(guard: Guard) -> None:
    first, second = guard.start(), guard.start()
    assert not guard.read(110.0, is_hidden=True, job1=8.0, job2=14.0)
    assert guard.read(111.0, is_hidden=True, job1=9.8, job2=14.0)
    assert (guard.state(first), guard.state(second)) == (JobState.RUNNING, JobState.SUSPENDING)


def test_nothing_new_starts_on_the_card_until_enough_was_free_for_a_while(guard: Guard) -> None:
    guard.start()
    guard.start()
    guard.read(110.0, job1=8.0, job2=14.0)
    assert guard.guard.closed() == {}
    guard.read(111.0, job1=8.0, job2=15.8)
    assert "205 MB free" in guard.guard.closed()["G0"].text
    guard.read(112.0, job1=8.0, job2=0.0)
    assert guard.guard.closed()
    guard.read(118.0, job1=8.0, job2=0.0)
    assert guard.guard.closed() == {}


@pytest.mark.parametrize("options", [{"on_preempt": OnPreempt.REQUEUE}, {}])
def test_a_young_job_is_stopped_where_it_cannot_be_suspended(queue_db: QueueDb, options: dict[str, Any]) -> None:
    guard = Guard(queue_db, can_suspend=bool(options))
    guard.start()
    second = guard.start(**options)
    guard.read(110.0, job1=8.0, job2=14.0)
    assert guard.read(111.0, job1=8.0, job2=15.8)
    assert guard.state(second) is JobState.STOPPING
    assert guard.transitions.live[second].attempt.stopping is OutcomeKind.MEMORY_GUARD
    job = queue_db.job(second)
    assert job.growth.memory_mb == pytest.approx(1.25 * 15.8 * GB)
    assert job.growth.count == 0
    (published,) = guard.transitions.take_events()
    assert (published.kind, published.job.state) == (PublishedEventKind.MADE_WAY, JobState.STOPPING)
    assert "GPU 0 had 205 MB left while it grew" in published.text


def test_a_stopped_job_asks_for_no_more_than_is_free_without_jobs(queue_db: QueueDb) -> None:
    guard = Guard(queue_db, can_suspend=False)
    guard.start()
    second = guard.start()
    guard.read(110.0, foreign_gb=5.0, job1=2.8, job2=15.0)
    assert guard.read(111.0, foreign_gb=5.0, job1=2.8, job2=16.0)
    assert queue_db.job(second).growth.memory_mb == pytest.approx(18.5 * GB)


def test_a_job_that_held_more_than_its_smallest_card_has_resumes_with_what_it_held_on_each(guard: Guard) -> None:
    guard.more_devices = (Device(id="G1", vendor=Vendor.NVIDIA, index=1, memory_total_mb=12 * GB, memory_used_mb=0.0,
                                 memory_free_mb=12 * GB),)  # fmt: skip
    guard.start()
    second = guard.start()
    live = guard.transitions.live[second]
    guard.transitions.keep_attempt(live, replace(live.attempt, devices=("G0", "G1")))
    guard.read(110.0, job1=8.0, job2=14.0)
    assert guard.read(111.0, job1=8.0, job2=15.8)
    assert guard.state(second) is JobState.SUSPENDING
    live = guard.transitions.live[second]
    guard.transitions.note_usage(second, Usage(peaks_mb={"G0": 15.8 * GB, "G1": 4 * GB}))
    guard.move_out(second, 112.0)
    (queue,) = guard.suspend_control.queues(113.0)
    assert [queue.lane.need.on(device_id).required_mb for device_id in ("G0", "G1")] == [15.8 * GB, 4 * GB]


def test_a_job_that_has_run_for_long_is_left_to_run(queue_db: QueueDb) -> None:
    guard = Guard(queue_db, can_suspend=False)
    guard.start()
    second = guard.start()
    guard.read(300.0, job1=8.0, job2=14.0)
    assert guard.read(301.0, job1=8.0, job2=15.8)
    assert guard.state(second) is JobState.RUNNING
    assert not guard.read(301.1, job1=8.0, job2=15.9), "it is not tried again at each reading"
    assert guard.guard.closed()


def test_jobs_that_stay_within_their_memory_are_left_alone_and_others_are_not(guard: Guard) -> None:
    guard.start()
    second = guard.start(need=Need(memory=FixedMemory(16 * GB)))
    assert not guard.read(110.0, job1=7.8, job2=14.0)
    assert not guard.read(111.0, job1=7.8, job2=15.9)
    third = guard.start(need=Need(memory=FixedMemory(0.1 * GB)))
    guard.read(112.0, job1=7.8, job2=15.7, job3=0.1)
    assert guard.read(113.0, job1=7.8, job2=15.7, job3=0.4)
    assert (guard.state(second), guard.state(third)) == (JobState.RUNNING, JobState.SUSPENDING)
    assert "more than the 102 MB reserved for it" in (guard.queue_db.job(third).reason or "")


def test_a_known_job_gets_the_memory_that_a_first_run_has_taken(guard: Guard) -> None:
    known, first_run = guard.start(need=Need(memory=FixedMemory(8 * GB))), guard.start()
    guard.read(110.0, job1=4.0, job2=19.0)
    assert guard.read(111.0, job1=4.6, job2=19.0)
    assert (guard.state(known), guard.state(first_run)) == (JobState.RUNNING, JobState.SUSPENDING)
    text = f"GPU 0 had 410 MB left while job {known} grew; it was the youngest first run"
    assert guard.queue_db.job(first_run).reason == text


def test_a_device_on_which_a_known_job_grows_beside_a_first_run_is_read_often(guard: Guard) -> None:
    """Once a second is too seldom to see the known job take the rest, which the first run should have left to it."""
    guard.start(need=Need(memory=FixedMemory(12 * GB)))
    first_run = guard.start()
    for at, known_gb in ((300.0, 4.0), (301.0, 4.0), (302.0, 4.0)):
        guard.read(at, job1=known_gb, job2=16.0)
    assert not guard.guard.watched, "all is flat"
    guard.read(303.0, job1=5.5, job2=16.0)
    assert guard.guard.watched == {"G0"}
    assert guard.read(304.0, job1=7.1, job2=16.0), "it climbs by more than is left, and was promised more"
    assert guard.state(first_run) is JobState.SUSPENDING


@pytest.mark.parametrize(
    ("since", "foreign_gb", "is_suspended"), [(1099.0, 2.0, True), (1200.0, 2.0, False), (0.0, 0.1, False)]
)
def test_a_lease_of_another_user_counts_only_if_it_was_there_first_and_memory_is_in_use(
    guard: Guard, since: float, foreign_gb: float, is_suspended: bool
) -> None:
    """Else any user could have a job suspended by a small lease beside it."""
    job_id = guard.start()
    share = Share(device_id="G0", memory_mb=100.0, is_exclusive=False)
    guard.leases = (Lease(id="theirs", holder=STRANGER, shares=(share,), since=since),)
    guard.read(110.0, foreign_gb=foreign_gb, job1=20.0)
    assert guard.read(111.0, foreign_gb=foreign_gb, job1=23.8 - foreign_gb) is is_suspended
    assert (guard.state(job_id) is JobState.SUSPENDING) is is_suspended


def test_a_resumed_job_is_spared_for_a_minute_unless_it_grows(guard: Guard) -> None:
    guard.start()
    second, third = guard.start(), guard.start()
    guard.read(110.0, job1=8.0, job2=6.0, job3=8.0)
    guard.read(111.0, job1=8.0, job2=6.0, job3=9.8)
    assert guard.state(third) is JobState.SUSPENDING
    with guard.queue_db.store.transaction():
        guard.transitions.move_suspension(third, JobEvent.CONTINUE, 112.0)
    guard.read(130.0, job1=8.0, job2=6.0, job3=9.3)
    assert guard.read(131.0, job1=8.0, job2=6.4, job3=9.3)
    assert guard.state(second) is JobState.SUSPENDING


def resume(guard: Guard, job_id: int, at: float) -> None:
    with guard.queue_db.store.transaction():
        guard.transitions.move_suspension(job_id, JobEvent.RESUME, at)
        guard.transitions.move_suspension(job_id, JobEvent.CONTINUE, at)


def test_memory_that_was_put_back_is_no_growth(guard: Guard) -> None:
    guard.start()
    second = guard.start()
    guard.read(110.0, job1=14.0, job2=8.0)
    guard.read(111.0, job1=14.0, job2=9.8)
    guard.read(111.5, job1=14.0, job2=0.0)  # while it is moved out
    guard.move_out(second, 112.0)
    guard.read(112.5, job1=14.0, job2=0.0)
    resume(guard, second, 113.0)
    assert not guard.read(113.1, job1=14.0, job2=9.8)
    assert guard.state(second) is JobState.RUNNING


def test_a_job_is_spared_for_a_minute_from_when_it_was_resumed(guard: Guard) -> None:
    guard.start()
    second, third = guard.start(), guard.start()
    guard.read(110.0, job1=8.0, job2=6.0, job3=8.0)
    guard.read(111.0, job1=8.0, job2=6.0, job3=9.8)
    guard.move_out(third, 112.0)
    guard.read(300.0, job1=8.0, job2=6.0, job3=0.0)
    resume(guard, third, 300.5)
    guard.read(301.0, job1=8.0, job2=6.0, job3=9.6)
    assert guard.read(302.0, job1=8.0, job2=6.03, job3=9.6), "slowly enough to move any of them out"
    assert (guard.state(second), guard.state(third)) == (JobState.SUSPENDING, JobState.RUNNING)


def test_nothing_happens_if_a_job_has_ended_since_the_alarm(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = guard.start(), guard.start()
    guard.read(110.0, job1=8.0, job2=14.0)
    act = guard.guard.act
    monkeypatch.setattr(guard.guard, "act", lambda *_: None)
    assert guard.read(111.0, job1=8.0, job2=15.8)
    with guard.queue_db.store.transaction():
        guard.transitions.end(second, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), 111.2)
        act(RULES, 111.2)
    assert guard.state(first) is JobState.RUNNING
