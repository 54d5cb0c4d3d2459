"""The invariants after every turn of a scenario and at its end, checked against the database and the world."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gpuyard.engines.common.program_outcome import StartContext, outcome_of
from gpuyard.engines.common.spawn_program import BEGAN
from gpuyard.model.dependencies import DependencyKind, DependencyOutlook, outlook, outlook_of_all
from gpuyard.model.job import Attempt, Job, OutcomeKind, SuspendedBy
from gpuyard.model.lifecycle import FINISHED, LIVE, JobState
from gpuyard.model.retry import REBOOTED
from gpuyard.policy.queue_order import current_priority
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from gpuyard.store.row_codec import lane_of
from tests.simulation import memory_invariants
from tests.simulation.clients import Clients
from tests.simulation.pace_invariants import PaceWatch
from tests.simulation.programs import Program
from tests.simulation.simulated_daemon import LIMITS, SimulatedDaemon
from tests.simulation.slice_invariants import SliceWatch
from tests.simulation.world import World

_STATE_OF = {
    JobState.SUCCEEDED: {OutcomeKind.SUCCEEDED},
    JobState.FAILED: {
        OutcomeKind.FAILED,
        OutcomeKind.CANNOT_START,
        OutcomeKind.TIMED_OUT,
        OutcomeKind.LOST,
        OutcomeKind.OUT_OF_MEMORY,
        OutcomeKind.NOT_RESTORED,
    },
}


class Checker:
    def __init__(self, world: World, database: Database, clients: Clients) -> None:
        self._world = world
        self._execute = database.execute
        self._database = database
        self._clients = clients
        self._ends: dict[int, set[JobState]] = {}
        self._checked_entries = 0
        self._queued: dict[int, Job] = {}
        self._was_paused = False
        self._paces = PaceWatch(world, database)
        self.slices = SliceWatch(world, database)

    def watch(self, daemon: SimulatedDaemon) -> None:
        """Check a new daemon from its first step on."""
        self._paces.watch(daemon.controller)

    @property
    def launches(self) -> int:
        """Return how many runs of batches were started."""
        return self._paces.launches

    # After every turn

    def check(self, transitions: JobTransitions | None = None) -> None:
        assert not self._execute("PRAGMA foreign_key_check").fetchall()
        store = JobStore(self._database)  # a new one each time: it caches nothing
        states = self._states()
        self._check_counts(states)
        self._check_live(store, states)
        self._note_ends(states)
        self._check_begun(store)
        self.slices.check()
        self._check_blocked(store, states)
        if transitions is not None:
            known = [*transitions.live.values(), *transitions.upcoming.values()]
            in_memory = [(live.job, live.attempt) for live in known]
            assert _without_usage(in_memory) == _without_usage(store.live_attempts()), (
                "the live jobs in memory differ from those in the store"
            )

    def _check_counts(self, states: dict[int, JobState]) -> None:
        counted = Counter(states.values())
        recorded = dict(self._execute("SELECT state, jobs FROM counts WHERE state <> 'arriving'").fetchall())
        assert recorded == {state: counted.get(JobState(state), 0) for state in recorded}, (
            "the counts of jobs are wrong"
        )

    def _check_live(self, store: JobStore, states: dict[int, JobState]) -> None:
        live = store.live_attempts()
        memory_invariants.check_live(live)
        memory_invariants.check_shares(self._world)
        alive = {job_id for job_id, state in states.items() if state in LIVE}
        assert {job.id for job, _ in live} == alive, "live attempts and states do not agree"
        assert len({job.id for job, _ in live}) == len(live), "two live attempts of one job"
        # The program before another one in a slice counts until its end is recorded.
        ended = {program.after.name for program in self._world.begun if program.after is not None}
        started = [(job, attempt) for job, attempt in live if not attempt.awaits_turn]
        self._check_limits([job for job, attempt in started if (job.id, attempt.number) not in ended])
        recorded = {(attempt.job_id, attempt.number, attempt.keeper_pid) for _, attempt in started}
        upcoming = {(attempt.job_id, attempt.number) for _, attempt in live if attempt.awaits_turn}
        running = [program for program in self._world.programs if program.is_running]
        assert len({program.job_id for program in running}) == len(running), "a program runs twice at the same time"
        commands = {job.id: job.argv for job, _ in live}
        for program in running:
            is_recorded = (*program.name, program.pid) in recorded or program.name in upcoming
            assert is_recorded, f"{program.name} runs and is not recorded"
            assert commands[program.job_id] == program.command, f"{program.name} runs the command of another job"

    def _check_limits(self, jobs: Sequence[Job]) -> None:
        groups = Counter(job.group for job in jobs if job.group_limit is not None)
        most = {job.group: job.group_limit for job in jobs}
        assert all(count <= (most[group] or 0) for group, count in groups.items()), (
            "more jobs of an array than its limit"
        )
        tags = Counter(job.spec.tag for job in jobs)
        assert all(tags[tag] <= most for tag, most in LIMITS.tags.items()), "more jobs of a tag than its limit"
        without_devices = sum(not job.spec.need.devices and job.spec.pace is None for job in jobs)
        assert without_devices <= LIMITS.cpu_jobs, "more jobs without devices than their limit"

    def _note_ends(self, states: dict[int, JobState]) -> None:
        for job_id, state in states.items():
            if state in FINISHED:
                self._ends.setdefault(job_id, set()).add(state)

    def _check_begun(self, store: JobStore) -> None:
        """Assert that programs that started since the last check were allowed to."""
        new = [what for _, kind, what in self._world.log[self._checked_entries :] if kind == "begins"]
        self._checked_entries = len(self._world.log)
        self._paces.check_begun()
        for job_id, _ in new:
            assert job_id not in self._clients.frozen, f"job {job_id} runs after {self._clients.frozen[job_id]}"
            may_fail: list[bool] = []
            for other, kind, _ in store.dependencies(job_id):
                was_met = any(outlook(kind, end) is DependencyOutlook.MET for end in self._ends.get(other, ()))
                if kind is DependencyKind.FAILED:
                    may_fail.append(was_met)
                else:
                    assert was_met, f"job {job_id} runs before job {other} has ended as it should"
            assert not may_fail or any(may_fail), f"job {job_id} runs before one of its dependencies has failed"

    def _check_blocked(self, store: JobStore, states: dict[int, JobState]) -> None:
        if store.unsettled(revives=False):  # the next steps, or the next daemon, settle the rest
            return
        arriving = self._arriving()
        for job_id, state in states.items():
            if state is JobState.BLOCKED and job_id not in arriving:
                assert outlook_of_all(store.dependencies(job_id))[0] is DependencyOutlook.PENDING, (
                    f"job {job_id} waits for dependencies that cannot be met"
                )

    # Around a step

    def before_step(self) -> None:
        store = JobStore(self._database)
        self._was_paused = bool(store.setting("paused"))
        rows = self._execute("SELECT id FROM jobs WHERE state = 'queued'").fetchall()
        arriving = self._arriving()
        jobs = [store.job(job_id) for (job_id,) in rows if job_id not in arriving]
        self._queued = {job.id: job for job in jobs if job is not None}

    def after_step(self, daemon: SimulatedDaemon, started: int) -> list[int]:
        """Return the jobs that started ahead of the head of the queue; only short jobs may (backfilling)."""
        store = JobStore(self._database)
        memory_invariants.check_after_step(
            self._world, store, daemon.suspender, daemon.controller, asked_ledger=daemon.asked_ledger
        )
        plan = daemon.controller.plan
        self._paces.check_plan(plan)
        head = None if plan.head is None else plan.head.job_id
        assert not (self._was_paused and started), "the queue is paused, and a job has started"
        states = self._states()
        begun = [job for job in self._queued.values() if states[job.id] in (JobState.RUNNING, JobState.PENDING)]
        waiting = [job for job in self._queued.values() if states[job.id] is JobState.QUEUED]
        for job in waiting if head is None else [job for job in waiting if job.id == head]:
            for other in begun:
                assert not self._is_before(job, other), f"job {other.id} was started before job {job.id}"
        first = self._queued.get(head or 0)
        return [] if first is None else [job.id for job in begun if self._rank(job) > self._rank(first)]

    def _is_before(self, job: Job, other: Job) -> bool:
        """Return whether the job comes before the other: only among jobs that differ only in their positions."""
        mine, others = lane_of(job), lane_of(other)
        is_alike = (mine.user, mine.tag, mine.need, mine.preempts, mine.pace) == (
            others.user, others.tag, others.need, others.preempts, others.pace,
        )  # fmt: skip
        is_sized = mine.sizes_each or others.sizes_each or job.growth.count or other.growth.count
        if not is_alike or is_sized or mine.group_limit is not None:
            return False
        return self._rank(job) < self._rank(other)

    def _rank(self, job: Job) -> tuple[int, int]:
        since = job.queued_at or job.submitted_at
        return -current_priority(job.priority, since, self._world.now), job.id

    # At the end

    def check_end(self) -> None:
        self.check()
        store = JobStore(self._database)
        assert not self._world.granted, "a lease is left"
        assert not self._world.tickets, "a ticket is left"
        assert not self._arriving(), "a submission is incomplete"
        self._check_submissions()
        recorded = {job_id: store.attempts(job_id) for job_id in self._states()}
        limits = {job_id: job.spec.time_limit_s for job_id in recorded if (job := store.job(job_id)) is not None}
        self._check_runs([attempt for attempts in recorded.values() for attempt in attempts], limits)
        for job_id, attempts in recorded.items():
            job = store.job(job_id)
            assert job is not None
            numbers = [attempt.number for attempt in attempts]
            assert numbers == list(range(1, job.attempts + 1)), "the count of attempts is wrong"
            self._check_verdict(job, attempts)
            memory_invariants.check_job_at_end(self._world, job, attempts, self._clients.retried)

    def _check_submissions(self) -> None:
        for token, sent in self._clients.sent.items():
            count = self._execute("SELECT count(*) FROM jobs WHERE name = ?", (token,)).fetchone()[0]
            if sent.ids is not None:
                first, last = self._execute("SELECT min(id), max(id) FROM jobs WHERE name = ?", (token,)).fetchone()
                assert (first, last) == sent.ids, f"{token} was acknowledged as {sent.ids}"
                assert count == sent.count, f"{token} has {count} jobs instead of {sent.count}"
            else:
                assert count in (0, sent.count), f"{token} was never acknowledged, and a part of it is stored"

    def _check_runs(self, attempts: Sequence[Attempt], limits: Mapping[int, float | None]) -> None:
        begun = {_key(program): program for program in self._world.programs if program.began_at is not None}
        unbegun = {_key(program): program for program in self._world.programs if program.began_at is None}
        recorded = {
            (attempt.job_id, attempt.number, attempt.keeper_pid, attempt.boot_id): attempt for attempt in attempts
        }
        assert begun.keys() <= recorded.keys(), f"ran unrecorded: {sorted(begun.keys() - recorded.keys())}"
        for key, attempt in recorded.items():
            if key in begun:
                _check_outcome(attempt, begun[key])
                memory_invariants.check_time(attempt, begun[key], limits[attempt.job_id])
            else:
                assert key in unbegun
                stopped_before_it_began = attempt.stopping is not None or unbegun[key].fate == "lost"
                restarted_before_it_left = attempt.outcome == REBOOTED and unbegun[key].fate == "rebooted"
                assert stopped_before_it_began or restarted_before_it_left

    def _check_verdict(self, job: Job, attempts: Sequence[Attempt]) -> None:
        outcome = attempts[-1].outcome if attempts else None
        if job.state in _STATE_OF:
            assert outcome is not None
            assert outcome.kind in _STATE_OF[job.state]
        if job.state is JobState.REJECTED:
            dependencies = self._execute("SELECT on_job, kind FROM dependencies WHERE job = ?", (job.id,)).fetchall()
            assert self._is_unmeetable(dependencies) or "cannot be passed" in (job.reason or "")

    def _is_unmeetable(self, dependencies: list[tuple[int, str]]) -> bool:
        return any(
            outlook(DependencyKind(kind), end) is DependencyOutlook.NEVER
            for other, kind in dependencies
            for end in self._ends.get(other, ())
        )

    def check_nothing_is_left(self) -> None:
        """Assert that the database is empty after all jobs were deleted."""
        for table in ("jobs", "attempts", "dependencies", "events", "specs", "batches"):
            left = self._execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            assert not left, f"{left} {table} are left though all jobs were deleted"
        self.check()

    # Contents of the database

    def is_all_finished(self) -> bool:
        return all(state in FINISHED for state in self._states().values())

    def held(self) -> list[int]:
        return [job_id for job_id, state in self._states().items() if state is JobState.HELD]

    def suspended_by_hand(self) -> list[int]:
        query = "SELECT job FROM attempts WHERE ended_at IS NULL AND parked = ?"
        by_hand = {job_id for (job_id,) in self._execute(query, (SuspendedBy.BY_PERSON,)).fetchall()}
        return [job_id for job_id, state in self._states().items() if state is JobState.SUSPENDED and job_id in by_hand]

    def unfinished(self) -> dict[int, str]:
        return {job_id: str(state) for job_id, state in self._states().items() if state not in FINISHED}

    def names(self) -> dict[int, str]:
        """Return the names of jobs; those of an array have an index, such as `big.3`."""
        rows = self._execute("SELECT id, name, array_index FROM jobs ORDER BY id").fetchall()
        return {job_id: name if index is None else f"{name}.{index}" for job_id, name, index in rows}

    def states_by_name(self) -> dict[str, str]:
        states = self._states()
        return {name: str(states[job_id]) for job_id, name in self.names().items()}

    def _states(self) -> dict[int, JobState]:
        return {job_id: JobState(state) for job_id, state in self._execute("SELECT id, state FROM jobs").fetchall()}

    def _arriving(self) -> set[int]:
        query = "SELECT first_id, last_id FROM submissions WHERE NOT is_complete"
        return {job_id for first, last in self._execute(query).fetchall() for job_id in range(first, last + 1)}


def _without_usage(live: Sequence[tuple[Job, Attempt]]) -> dict[int, tuple[JobState, int, Attempt]]:
    """Return the attempt without its usage, which is stored only now and then."""
    return {job.id: (job.state, job.failures, replace(attempt, usage=None)) for job, attempt in live}


def _key(program: Program) -> tuple[Any, ...]:
    return *program.name, program.pid, f"boot-{program.boot}"


def _check_outcome(attempt: Attempt, program: Program) -> None:
    """Assert that the recorded outcome is what happened to the program."""
    outcome = attempt.outcome
    assert outcome is not None, f"{program.name} has no outcome"
    if attempt.stopping is not None:
        makes_way = attempt.stopping in (OutcomeKind.PREEMPTED, OutcomeKind.MEMORY_GUARD, OutcomeKind.HOST_GUARD)
        has_succeeded = makes_way and program.journal_entry == "0"
        assert outcome.kind is (OutcomeKind.SUCCEEDED if has_succeeded else attempt.stopping)
    elif outcome == REBOOTED:
        assert program.journal_entry != "0", f"{program.name} had succeeded before the machine was restarted"
    elif program.shortage is not None:
        assert outcome.kind is OutcomeKind.OUT_OF_MEMORY, f"{program.name} ran out of memory, and this was not recorded"
    elif outcome.kind is OutcomeKind.OUT_OF_MEMORY:
        assert program.journal_entry in ("134", "139"), (
            f"{program.name} did not crash, and left {program.journal_entry}"
        )
    else:
        expected = outcome_of(
            program.journal_entry or (BEGAN if program.began_at is not None else None), StartContext()
        )
        assert (outcome.kind, outcome.status) == (expected.kind, expected.status), (
            f"{program.name} left {program.journal_entry}"
        )
