"""Which jobs the keeper gets in advance, and which it may start in the place of others."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, cast

import pytest
from msgspec.structs import replace

from gpuyard.control.engine_set import EngineSet
from gpuyard.control.successors import Successors
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.dependencies import Dependency
from gpuyard.core.job.job import Attempt, Outcome, OutcomeKind, Started, SuspendedBy
from gpuyard.core.job.lifecycle import JobEvent, JobState
from gpuyard.core.lease import Claim, FixedMemory, Holder, HostShare, Lease, Need
from gpuyard.core.scheduling.closed_devices import closed_devices
from gpuyard.core.scheduling.device_shares import share_of
from gpuyard.core.scheduling.machine import Machine
from gpuyard.core.scheduling.plan import Start
from gpuyard.core.scheduling.planner import decide
from gpuyard.core.scheduling.world import RunningJob, SchedulingLimits, WaitingLane, World
from gpuyard.core.snapshot import Device, Sample
from gpuyard.ports import Followed, Launch
from tests.simulation.simulated_daemon import RULES
from tests.unit.core.scheduling.test_placement import GB, card, machine, ticket
from tests.unit.store import QueueDb

ME = Holder(uid=1, user="me", pid=7)
SHARED = Need(devices=1, memory=FixedMemory(8 * GB))
CPU = Need(devices=0)
NOW = 200.0
SHORT_S = 0.01
MOVES = (JobEvent.MOVED_OUT, JobEvent.RESUME, JobEvent.CONTINUE)


class Keeper:
    """Has the launches that were put, in their order, and starts none."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def put(self, launch: Launch) -> bool:
        self.launches.append(launch)
        return True

    def prefetched(self) -> frozenset[int]:
        return frozenset(launch.job_id for launch in self.launches)

    def take_back(self, most: int | None = None) -> None:
        del self.launches[:most]

    def followed(self) -> list[Followed]:
        return []


class ShortJobs:
    """A queue of many jobs of 10 ms, of which some run."""

    def __init__(self, queue_db: QueueDb, need: Need, **fields: Any) -> None:
        self.transitions, self.keeper, self.need = JobTransitions(queue_db.store), Keeper(), need
        self.successors = Successors(self.transitions, cast("EngineSet", self.keeper), lambda _: need)
        self.change_view: Callable[[World], World] = lambda view: view
        self.limits = SchedulingLimits(cpu_jobs=2)
        self.devices: Sequence[Device] = (card(0), card(1))
        self._db = queue_db
        before, *self.queued = queue_db.add(500, need=need, command=("true",), **fields)
        self._begin(before, None, NOW - 1)
        self.end(before)

    def _begin(self, job_id: int, device_id: str | None, at: float) -> None:
        devices = () if device_id is None else (device_id,)
        attempt = Attempt(
            job_id=job_id,
            number=1,
            phase=Started(at=at, keeper_pid=9),
            boot_id="b",
            devices=devices,
            lease_id=f"lease {job_id}" if devices else None,
        )
        self.transitions.start(self._db.job(job_id), attempt)

    def end(self, job_id: int) -> None:
        self.transitions.end(job_id, Outcome(kind=OutcomeKind.SUCCEEDED, status=0), NOW - 1 + SHORT_S)

    def start(self, device_id: str | None = None, leased_at: float = NOW, at: float = NOW) -> tuple[int, int]:
        """Start the next job. Return it, and the group that the keeper gets to know."""
        job = self._db.job(self.queued.pop(0))
        lane = self._db.store.lane_of(job.id)
        start = Start(job_id=job.id, lane=lane, claim=self._claim(device_id), need=self.need)
        launch = Launch(job_id=job.id, attempt=1, command=job.argv, cwd="/", environment={})
        group = self.successors.with_group(launch, start, job, leased_at).group
        self._begin(job.id, device_id, at)
        return job.id, group

    def _claim(self, device_id: str | None) -> Claim:
        return Claim(shares=() if device_id is None else (share_of(self.need, card(int(device_id[1:]))),))

    def view(self) -> World:
        live = self.transitions.live.values()
        leases = [
            Lease(
                id=each.attempt.lease_id or "",
                holder=replace(ME, label=f"job {each.job.id}"),
                shares=tuple(share_of(self.need, card(int(device_id[1:]))) for device_id in each.attempt.devices),
                since=NOW - 1,
            )
            for each in live
            if each.attempt.lease_id is not None
        ]
        running = [
            RunningJob(
                job_id=each.job.id,
                user="me",
                tag=each.job.spec.tag,
                devices=len(each.attempt.devices),
                started_at=NOW - 1,
                group=each.job.group,
                lease_id=each.attempt.lease_id,
                device_ids=each.attempt.devices,
            )
            for each in live
        ]
        measured = {(lease.id, share.device_id): 0.0 for lease in leases for share in lease.shares}
        snapshot, lanes = machine(*self.devices), self.successors.without_prefetched(self._db.store.ready_queues())
        first = [WaitingLane(lane=each.lane, jobs=tuple(islice(each.jobs, 64))) for each in lanes]
        view = World(
            now=NOW,
            machine=Machine(now=NOW, snapshot=snapshot, leases=tuple(leases), measured=measured),
            lanes=tuple(first),
            holder=ME,
            limits=self.limits,
            running=tuple(running),
        )
        return self.change_view(view)

    def plan(self) -> list[int]:
        """Make a plan, as each new sample does. Return the groups of the launches that the keeper has then."""
        self.successors.leave_out_stopping()
        view = self.view()
        sample = Sample(snapshot=view.machine.snapshot)
        self.successors.note_plan(decide(view), view, sample, RULES)
        self.successors.leave_out_stopping()
        self.successors.fill(NOW)
        return sorted({launch.group for launch in self.keeper.launches})


@pytest.fixture
def on_gpus(queue_db: QueueDb) -> ShortJobs:
    return ShortJobs(queue_db, SHARED)


@pytest.fixture
def on_cpus(queue_db: QueueDb) -> ShortJobs:
    return ShortJobs(queue_db, CPU)


def test_the_keeper_gets_the_next_jobs_of_the_group_that_runs(on_cpus: ShortJobs) -> None:
    (_, group), (_, other) = on_cpus.start(), on_cpus.start()
    assert group == other > 0
    assert on_cpus.plan() == [group]
    launches = on_cpus.keeper.launches
    assert [launch.job_id for launch in launches] == on_cpus.queued[: len(launches)]


def test_a_request_takes_back_what_the_keeper_has_and_nothing_is_put_until_it_is_answered(on_cpus: ShortJobs) -> None:
    (_, group), _ = on_cpus.start(), on_cpus.start()
    assert on_cpus.plan() == [group]
    on_cpus.successors.begin_change()
    assert not on_cpus.keeper.launches
    assert on_cpus.plan() == []
    on_cpus.successors.end_change()
    assert on_cpus.plan() == [group]


@pytest.mark.parametrize("moves", range(len(MOVES) + 1))
def test_no_job_follows_one_that_is_suspended_or_resumes(on_gpus: ShortJobs, moves: int) -> None:
    started = [on_gpus.start("G0") for _ in range(3)] + [on_gpus.start("G1") for _ in range(2)]
    job_id, group = started[0]
    assert on_gpus.plan() == [group]
    on_gpus.transitions.suspend(job_id, SuspendedBy.BY_PERSON, NOW, "by hand")
    on_gpus.successors.leave_out_stopping()
    assert not on_gpus.keeper.launches
    for event in MOVES[:moves]:
        on_gpus.transitions.move_suspension(job_id, event, NOW)
        on_gpus.successors.leave_out_stopping()
    _, next_group = on_gpus.start("G1")
    assert next_group not in (0, group)
    assert on_gpus.plan() == [next_group]


def test_no_job_follows_one_that_is_stopped(on_cpus: ShortJobs) -> None:
    (job_id, group), _ = on_cpus.start(), on_cpus.start()
    assert on_cpus.plan() == [group]
    on_cpus.transitions.stop(job_id, OutcomeKind.TIMED_OUT, NOW)
    on_cpus.successors.leave_out_stopping()
    assert not on_cpus.keeper.launches
    assert on_cpus.plan() == []


def test_a_limit_below_what_runs_takes_back_what_the_keeper_has(on_cpus: ShortJobs) -> None:
    on_cpus.start()
    _, group = on_cpus.start()
    assert on_cpus.plan() == [group]
    on_cpus.limits = SchedulingLimits(cpu_jobs=1)
    assert on_cpus.plan() == []
    on_cpus.limits = SchedulingLimits(cpu_jobs=2)
    assert on_cpus.plan() == [group]


def test_where_one_device_is_taken_from_outside_jobs_follow_on_the_others_later(on_gpus: ShortJobs) -> None:
    groups = {on_gpus.start(device_id)[1] for device_id in ("G0", "G0", "G0", "G1", "G1", "G1")}
    assert on_gpus.plan() == sorted(groups)
    on_gpus.devices = card(0, used=20 * GB), card(1)
    assert on_gpus.plan() == []
    for job_id in on_gpus.transitions.live.on_device["G1"].copy():
        on_gpus.end(job_id)
    (later,) = {on_gpus.start("G1")[1] for _ in range(3)}
    assert later not in groups
    assert on_gpus.plan() == [later]


def depend(queue_db: QueueDb, *on_jobs: int) -> int:
    """Add a job of higher priority that waits for others."""
    (job_id,) = queue_db.add(priority=50, need=CPU, state=JobState.BLOCKED)
    queue_db.store.add_pairs([(job_id, Dependency(job_id=on_job)) for on_job in on_jobs])
    return job_id


def test_nothing_is_put_from_a_job_on_whose_end_unblocks_another(queue_db: QueueDb, on_cpus: ShortJobs) -> None:
    (_, group), (other, _) = on_cpus.start(), on_cpus.start()
    awaited = on_cpus.queued[5]
    depend(queue_db, awaited)
    assert on_cpus.plan() == [group]
    assert [launch.job_id for launch in on_cpus.keeper.launches] == on_cpus.queued[:5]
    on_cpus.keeper.launches.clear()
    queue_db.store.change_states(on_cpus.queued[:5], JobState.CANCELLED, NOW, reason=None)
    del on_cpus.queued[:5]
    on_cpus.end(other)
    assert on_cpus.start()[0] == awaited
    assert on_cpus.plan() == []
    on_cpus.end(awaited)
    on_cpus.start()
    assert on_cpus.plan() == [group]


def test_nothing_is_put_while_a_job_runs_that_another_has_come_to_depend_on(
    queue_db: QueueDb, on_cpus: ShortJobs
) -> None:
    (job_id, group), _ = on_cpus.start(), on_cpus.start()
    assert on_cpus.plan() == [group]
    depend(queue_db, job_id)
    assert on_cpus.plan() == []


def test_a_job_that_waits_for_a_whole_array_holds_up_only_its_last_jobs(queue_db: QueueDb, on_cpus: ShortJobs) -> None:
    (job_id, group), _ = on_cpus.start(), on_cpus.start()
    depend(queue_db, job_id, *on_cpus.queued)
    assert on_cpus.plan() == [group]
    queue_db.store.change_states(on_cpus.queued[20:], JobState.CANCELLED, NOW, reason=None)
    assert on_cpus.plan() == []


def close(jobs: ShortJobs, *device_ids: str) -> None:
    """Ban devices in the configuration."""
    closed = closed_devices(machine(*jobs.devices), (), device_ids)
    jobs.change_view = lambda view: replace(view, machine=replace(view.machine, closed=closed))


def test_a_closed_device_does_not_matter_to_jobs_without_one(on_cpus: ShortJobs) -> None:
    (_, group), _ = on_cpus.start(), on_cpus.start()
    close(on_cpus, "G0", "G1")
    assert on_cpus.plan() == [group]


def test_no_job_follows_on_a_closed_device(on_gpus: ShortJobs) -> None:
    started = [on_gpus.start(device_id) for device_id in ("G0", "G0", "G0", "G1", "G1", "G1")]
    close(on_gpus, "G1")
    assert on_gpus.plan() == []
    for job_id, _ in started[:3]:
        on_gpus.end(job_id)
    (later,) = {on_gpus.start("G0")[1] for _ in range(3)}
    assert on_gpus.plan() == [later] != [started[0][1]]


TAKING = [CPU, replace(CPU, host=HostShare(ram_mb=GB)), SHARED]


def start_six(jobs: ShortJobs, at: float) -> int:
    """Start jobs on each device, if they need one. Return their group."""
    devices = ("G0", "G0", "G0", "G1", "G1", "G1") if jobs.need.devices else (None, None)
    (group,) = {jobs.start(device_id, at)[1] for device_id in devices}
    return group


@pytest.mark.parametrize("need", TAKING)
@pytest.mark.parametrize("priority", [-1, 0])
def test_while_other_programs_wait_jobs_follow_each_other_for_a_quarter_of_a_second(
    queue_db: QueueDb, need: Need, priority: int
) -> None:
    jobs, waiting = ShortJobs(queue_db, need), (ticket(Need(), priority=priority),)
    group = start_six(jobs, NOW - 0.2)
    jobs.change_view = lambda view: replace(view, tickets=waiting)
    assert jobs.plan() == [group]
    assert len(jobs.keeper.launches) * SHORT_S <= 0.05 * len(jobs.transitions.live) or need is CPU


@pytest.mark.parametrize("need", TAKING)
@pytest.mark.parametrize(("priority", "since"), [(0, NOW - 0.25), (1, NOW)])
def test_after_that_or_where_others_have_a_higher_priority_no_job_follows(
    queue_db: QueueDb, need: Need, priority: int, since: float
) -> None:
    """It may where it takes nothing from the ledger."""
    jobs, waiting = ShortJobs(queue_db, need), (ticket(Need(), priority=priority),)
    group = start_six(jobs, since)
    assert jobs.plan() == [group]
    jobs.change_view = lambda view: replace(view, tickets=waiting)
    assert jobs.plan() == ([group] if need is CPU else [])
    jobs.change_view = lambda view: view
    assert jobs.plan() == [group]


def test_where_others_wait_each_lease_has_a_turn_of_its_own(on_gpus: ShortJobs) -> None:
    started = [on_gpus.start("G0", NOW - 0.25) for _ in range(3)] + [on_gpus.start("G1") for _ in range(3)]
    on_gpus.change_view = lambda view: replace(view, tickets=(ticket(Need()),))
    assert on_gpus.plan() == []
    for job_id, _ in started[3:]:
        on_gpus.end(job_id)
    (later,) = {on_gpus.start("G1")[1] for _ in range(3)}
    assert on_gpus.plan() == [later] != [started[0][1]]


def test_no_job_waits_in_the_keeper_for_jobs_that_run_for_long(on_cpus: ShortJobs) -> None:
    """It could start elsewhere, and plans leave it out."""
    (_, group), (short, _) = on_cpus.start(at=NOW - 0.3), on_cpus.start(at=NOW - 0.2)
    assert on_cpus.plan() == [group]
    assert len(on_cpus.keeper.launches) == 0.25 / SHORT_S  # what ends beside one of them
    on_cpus.end(short)
    on_cpus.start(at=NOW - 0.3)
    assert on_cpus.plan() == []
    assert on_cpus.successors.has_taken_back
    on_cpus.end(short + 1)
    on_cpus.start()
    assert on_cpus.plan() == [group]


def test_the_first_job_is_taken_back_for_a_free_place_only_when_it_may_start(on_cpus: ShortJobs) -> None:
    """Else it would wait for a sample while the keeper starts those behind it."""
    on_cpus.start()
    job_id, _ = on_cpus.start()
    on_cpus.plan()
    on_cpus.end(job_id)
    first = on_cpus.queued[0]
    for may_start in (False, True):
        on_cpus.successors.without_prefetched((), may_start=may_start)
        assert (first in on_cpus.keeper.prefetched()) is not may_start
