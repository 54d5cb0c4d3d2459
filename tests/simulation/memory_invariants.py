"""Invariants of memory, suspension and preemption, checked after every step of a scenario and at its end."""

from collections.abc import Sequence

from gpuyard.model.job import Attempt, Job, OutcomeKind, SuspendedBy
from gpuyard.model.job_spec import OnPreempt
from gpuyard.model.lifecycle import JobState
from gpuyard.policy.numbers import MOST_RERUNS
from gpuyard.queue.step import Controller
from gpuyard.store.job_store import JobStore
from tests.simulation.behaviors import EVERYTHING, MEMORY_MB
from tests.simulation.keeper import REPORT_WITHIN_S
from tests.simulation.programs import Program
from tests.simulation.suspender import SimulatedSuspender
from tests.simulation.world import Granted, World

# A device counts as empty if foreign processes hold at most this part of it.
_NEARLY_EMPTY = 0.05
_COUNTED = {
    OutcomeKind.FAILED, OutcomeKind.CANNOT_START, OutcomeKind.TIMED_OUT, OutcomeKind.LOST, OutcomeKind.NOT_RESTORED,
}  # fmt: skip


def check_shares(world: World) -> None:
    """Assert that each program that holds memory on a device has a share of it in the ledger."""
    for program in world.programs:
        granted = world.granted.get(program.lease_id or "")
        if program.is_running and granted is not None:
            held = [device_id for device_id, memory_mb in program.memory_mb.items() if memory_mb]
            without = [device_id for device_id in held if granted.lease.on(device_id) is None]
            assert not without, f"{program.name} holds memory on {without} without a share in its lease"


def check_live(live: Sequence[tuple[Job, Attempt]]) -> None:
    for job, attempt in live:
        assert job.growth.count <= MOST_RERUNS, f"job {job.id} was run again too often"
        if job.state in (JobState.SUSPENDING, JobState.SUSPENDED, JobState.RESUMING):
            assert attempt.parked is not None, f"job {job.id} is {job.state} without a recorded cause"
            assert attempt.suspended_at is not None, f"the time of job {job.id} runs while it is {job.state}"
            if attempt.parked is SuspendedBy.MEMORY_GUARD:
                _check_guarded(job, attempt)
        elif job.state is JobState.RUNNING:
            assert attempt.suspended_at is None, f"the time of job {job.id} stands still while it runs"


def _check_guarded(job: Job, attempt: Attempt) -> None:
    """Assert that the memory guard suspends only jobs of unknown memory, or which hold more than they declared."""
    assert job.spec.on_preempt is OnPreempt.SUSPEND, f"job {job.id} must not be suspended for other jobs"
    known = job.spec.need.required_mb
    if attempt.usage is not None and attempt.predicted_mb is None and known is not None and not job.growth.count:
        assert (attempt.usage.peak_mb or 0.0) > known, f"job {job.id} stayed within the {known} MB that it declared"


def check_after_step(
    world: World, store: JobStore, suspender: SimulatedSuspender, controller: Controller, *, asked_ledger: bool
) -> None:
    """Assert that the suspender works on jobs in transition, and that suspended jobs hold nothing in the ledger."""
    queued = {queue.lane.id for queue in controller.suspend_control.queues(float("inf"))}
    running = {program.name: program for program in world.programs if program.is_running}
    for job, attempt in store.live_attempts():
        program, granted = running.get((job.id, attempt.number)), world.granted.get(attempt.lease_id or "")
        # A new daemon first has to read from the ledger what was granted.
        may_move = job.state is JobState.SUSPENDING or (job.state is JobState.RESUMING and asked_ledger)
        if may_move and program is not None:
            assert suspender.is_at_work_on(attempt), f"job {job.id} is {job.state}, and no helper works on it"
        if job.state is JobState.RESUMING and program is not None and granted is not None:
            _check_held(program, granted)
        elif job.state is JobState.SUSPENDED:
            is_known = attempt.parked is SuspendedBy.BY_PERSON or -job.id in queued
            assert is_known, f"job {job.id} is suspended and forgotten"
            is_empty = granted is None or not granted.lease.shares
            assert is_empty or not asked_ledger, f"job {job.id} is suspended, and its lease has shares"
    for preempt in controller.plan.preempts:
        victim, urgent = store.job(preempt.job_id), store.job(preempt.for_job)
        assert victim is not None
        assert urgent is not None
        assert victim.spec.on_preempt is not OnPreempt.NEVER, f"job {victim.id} must never be preempted"
        assert victim.priority < urgent.priority, f"job {victim.id} was preempted by a job of no higher priority"


def _check_held(program: Program, granted: Granted) -> None:
    """Assert that the ledger holds the measured memory of a job before the job is resumed."""
    for device_id, stashed in (program.stash_mb or {}).items():
        share = granted.lease.on(device_id)
        assert share is not None, f"{program.name} is resumed without a share of {device_id} in its lease"
        known = min(stashed, program.measured_mb.get(device_id, 0.0))
        is_held = share.is_exclusive or (share.memory_mb or 0.0) >= known
        assert is_held, f"{program.name} is resumed with {share.memory_mb} MB, and holds more: {known}"


def check_job_at_end(world: World, job: Job, attempts: Sequence[Attempt], retried: int) -> None:
    kinds = [attempt.outcome.kind for attempt in attempts if attempt.outcome is not None]
    assert job.failures <= sum(kind in _COUNTED for kind in kinds), (
        f"job {job.id} has more failures than attempts that failed"
    )
    short = kinds.count(OutcomeKind.OUT_OF_MEMORY)
    assert short <= (1 + MOST_RERUNS) * (1 + retried), f"job {job.id} ran out of memory {short} times"
    was_preempted = not {OutcomeKind.PREEMPTED, OutcomeKind.MEMORY_GUARD, OutcomeKind.HOST_GUARD}.isdisjoint(kinds)
    assert kinds.count(OutcomeKind.HOST_GUARD) <= 3, f"job {job.id} made way again and again"
    assert not was_preempted or job.spec.on_preempt is not OnPreempt.NEVER, f"job {job.id} must never be preempted"
    if job.state is JobState.FAILED and kinds[-1] is OutcomeKind.OUT_OF_MEMORY:
        _check_given_up(world, job, attempts[-1])


def _check_given_up(world: World, job: Job, last: Attempt) -> None:
    """Assert that only a job that fits on no device is given up."""
    assert job.growth.count == MOST_RERUNS, f"job {job.id} was given up after {job.growth.count} reruns"
    program = next(one for one in world.programs if (*one.name, one.pid) == (job.id, last.number, last.keeper_pid))
    peak = max((program.target_mb(climb) for climb in range(len(program.behavior.climbs))), default=0.0)
    would_fit = peak != EVERYTHING and peak <= (1.0 - _NEARLY_EMPTY) * MEMORY_MB
    assert world.had_foreign_memory or not would_fit, f"job {job.id} was given up, and would fit on a device"


def _is_known_late(program: Program) -> bool:
    """Return whether the end was not reported at once, because the keeper was stopped or is dead."""
    if program.keeper is None or program.exited_at is None:
        return False
    has_told = program.known_at is not None and program.known_at <= program.exited_at + REPORT_WITHIN_S + 1e-6
    return not has_told


def check_time(attempt: Attempt, program: Program, limit_s: float | None) -> None:
    """Assert that the time limit does not count the time for which a job was suspended."""
    if attempt.stopping is OutcomeKind.TIMED_OUT and limit_s is not None and not _is_known_late(program):
        # That of a successor counts from the end of the program before it.
        stood_s = (program.began_at or 0.0) - program.born_at if program.after is not None else 0.0
        assert program.ran_s >= limit_s - stood_s - 1e-3, (
            f"{program.name} ran for {program.ran_s} s, below its limit of {limit_s} s"
        )
