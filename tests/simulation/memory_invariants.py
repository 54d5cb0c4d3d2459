"""What must hold of memory, suspension and making room, after every step of a story and at its end."""

from collections.abc import Sequence

from gpuyard.control.controller import Controller
from gpuyard.core.job.job import Attempt, Job, OnPreempt, OutcomeKind, SuspendedBy
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.memory.sizing import MOST_RERUNS
from gpuyard.store.job_store import JobStore
from tests.simulation.moving import SimulatedSuspender
from tests.simulation.natures import EVERYTHING, MEMORY_MB
from tests.simulation.programs import Program
from tests.simulation.world import Granted, World

# A card of which strangers hold no more than this is as good as empty.
_AS_GOOD_AS_EMPTY = 0.05
_COUNTED = {
    OutcomeKind.FAILED, OutcomeKind.CANNOT_START, OutcomeKind.TIMED_OUT, OutcomeKind.LOST, OutcomeKind.NOT_RESTORED,
}  # fmt: skip


def check_shares(world: World) -> None:
    """Whatever holds memory on a device holds a share of it in the ledger."""
    for program in world.programs:
        granted = world.granted.get(program.lease_id or "")
        if program.is_running and granted is not None:
            held = [device_id for device_id, memory_mb in program.memory_mb.items() if memory_mb]
            without = [device_id for device_id in held if granted.lease.on(device_id) is None]
            assert not without, f"{program.name} holds memory on {without}, and its lease is for nothing there"


def check_live(live: Sequence[tuple[Job, Attempt]]) -> None:
    for job, attempt in live:
        assert job.growth.count <= MOST_RERUNS, f"job {job.id} was run again too often"
        if job.state in (JobState.SUSPENDING, JobState.SUSPENDED, JobState.RESUMING):
            assert attempt.parked is not None, f"job {job.id} is {job.state}, and nobody knows why"
            assert attempt.suspended_at is not None, f"the time of job {job.id} runs while it is {job.state}"
        elif job.state is JobState.RUNNING:
            assert attempt.suspended_at is None, f"the time of job {job.id} stands still while it runs"


def check_after_step(
    world: World, store: JobStore, suspender: SimulatedSuspender, controller: Controller, *, asked_ledger: bool
) -> None:
    """Whoever is on the way out or back is being moved, and whoever is out takes nothing up."""
    queued = {queue.lane.id for queue in controller.suspend_control.queues(float("inf"))}
    running = {program.name: program for program in world.programs if program.is_running}
    for job, attempt in store.live_attempts():
        program, granted = running.get((job.id, attempt.number)), world.granted.get(attempt.lease_id or "")
        # A new daemon has to hear from the ledger first what was granted.
        may_move = job.state is JobState.SUSPENDING or (job.state is JobState.RESUMING and asked_ledger)
        if may_move and program is not None:
            assert suspender.is_at_work_on(attempt), f"job {job.id} is {job.state}, and nobody is at it"
        if job.state is JobState.RESUMING and program is not None and granted is not None:
            _check_held(program, granted)
        elif job.state is JobState.SUSPENDED:
            is_known = attempt.parked is SuspendedBy.BY_PERSON or -job.id in queued
            assert is_known, f"job {job.id} is suspended and forgotten"
            is_empty = granted is None or not granted.lease.shares
            assert is_empty or not asked_ledger, f"job {job.id} is suspended, and its lease is for something"
    for preempt in controller.plan.preempts:
        victim, urgent = store.job(preempt.job_id), store.job(preempt.for_job)
        assert victim is not None
        assert urgent is not None
        assert victim.spec.on_preempt is not OnPreempt.NEVER, f"job {victim.id} is never to make room"
        assert victim.priority < urgent.priority, f"job {victim.id} made room for one of no higher priority"


def _check_held(program: Program, granted: Granted) -> None:
    """What is to be brought back is held in the ledger before it is, as far as anybody has seen how much that is."""
    for device_id, stashed in (program.stash_mb or {}).items():
        share = granted.lease.on(device_id)
        assert share is not None, f"{program.name} is brought back, and its lease is for nothing on {device_id}"
        known = min(stashed, program.seen_mb.get(device_id, 0.0))
        is_held = share.is_exclusive or (share.memory_mb or 0.0) >= known
        assert is_held, f"{program.name} is brought back with {share.memory_mb} MB, and holds more: {known}"


def check_job_at_end(world: World, job: Job, attempts: Sequence[Attempt], retried: int) -> None:
    kinds = [attempt.outcome.kind for attempt in attempts if attempt.outcome is not None]
    assert job.failures <= sum(kind in _COUNTED for kind in kinds), f"job {job.id} had no such many failures"
    short = kinds.count(OutcomeKind.OUT_OF_MEMORY)
    assert short <= (1 + MOST_RERUNS) * (1 + retried), f"job {job.id} ran out of memory {short} times"
    made_room = OutcomeKind.PREEMPTED in kinds
    assert not made_room or job.spec.on_preempt is not OnPreempt.NEVER, f"job {job.id} was never to make room"
    if job.state is JobState.FAILED and kinds[-1] is OutcomeKind.OUT_OF_MEMORY:
        _check_given_up(world, job, attempts[-1])


def _check_given_up(world: World, job: Job, last: Attempt) -> None:
    """Only what no card could hold is given up."""
    assert job.growth.count == MOST_RERUNS, f"job {job.id} was given up after {job.growth.count} reruns"
    program = next(one for one in world.programs if (*one.name, one.pid) == (job.id, last.number, last.keeper_pid))
    peak = max((program.target_mb(climb) for climb in range(len(program.nature.climbs))), default=0.0)
    would_fit = peak != EVERYTHING and peak <= (1.0 - _AS_GOOD_AS_EMPTY) * MEMORY_MB
    assert world.had_strangers or not would_fit, f"job {job.id} was given up, and would fit on a card"


def check_time(attempt: Attempt, program: Program, limit_s: float | None) -> None:
    """While it is suspended, its time does not run."""
    if attempt.stopping is OutcomeKind.TIMED_OUT and limit_s is not None:
        assert program.ran_s >= limit_s - 1e-3, f"{program.name} ran for {program.ran_s} s, and might for {limit_s}"
