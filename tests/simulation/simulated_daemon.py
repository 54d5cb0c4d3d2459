"""A daemon until it is killed: the real controller, requests and store over simulated ports."""

import os

from gpuyard.model.job import Attempt
from gpuyard.model.lease import Holder
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Sample
from gpuyard.policy.world import SchedulingLimits
from gpuyard.queue.configured_rules import Rules
from gpuyard.queue.step import Controller, Step
from gpuyard.queue.user_requests import UserRequests
from gpuyard.store.database import Database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from tests.simulation.crash_points import CrashPoints, LeasesPort, Port, StorePort, Thread
from tests.simulation.engine import SimulatedEngine
from tests.simulation.keeper import CALM, KeeperHabits
from tests.simulation.ledger import SimulatedLedger
from tests.simulation.suspender import SimulatedSuspender
from tests.simulation.world import World

LIMITS = SchedulingLimits(cpu_jobs=2, tags={"night": 1})
RULES = Rules(limits=LIMITS)
# A sample is used again for this long, as in the daemon.
FRESH_S = 0.25


class SimulatedDaemon:
    def __init__(
        self,
        world: World,
        database: Database,
        crash_points: CrashPoints,
        *,
        rules: Rules,
        trouble: float,
        moves_fail: float,
        habits: KeeperHabits = CALM,
        late_samples: float = 0.0,
        late_reads: float = 0.0,
    ) -> None:
        """`late_samples` is how often a new sample takes a while, `late_reads` how often reading an attempt's output
        does."""
        self.number = world.number("daemon")
        self.thread = Thread(crash_points)
        self.me = Holder(
            uid=os.getuid(), user="me", pid=20_000 + self.number, pid_started=world.now, boot_id=f"boot-{world.boot}"
        )
        self._world = world
        self.database = database
        self._ledger = SimulatedLedger(world, self.me, f"daemon {self.number}", trouble)
        self.engine = SimulatedEngine(world, self._ledger.descriptors, trouble, habits)
        self.suspender = SimulatedSuspender(world, moves_fail)
        self._latest: Sample | None = None
        self._wants_new_sample = False
        self._late_samples = late_samples
        self._late_reads = late_reads
        self._late_until = 0.0
        self.store = store = JobStore(database)
        store_port = StorePort(store, self.thread, lambda: world.random("disk").random() < trouble / 2)
        clock = Port("clock", world.clock, self.thread)
        self.controller = Controller(
            store_port,  # type: ignore[arg-type]
            LeasesPort("leases", self._ledger, self.thread),
            Port("engine", self.engine, self.thread),
            clock,
            rules=rules,
            me=self.me,
            suspender=Port("suspender", self.suspender, self.thread),
        )
        self.controller.progress_tracker.read_rest = self._read_rest
        self._being_read: dict[tuple[int, int], float] = {}  # attempts that are over, and until when
        self.requests = UserRequests(self.controller, store_port, QueueQueries(database, store), clock)  # type: ignore[arg-type]

    @property
    def asked_ledger(self) -> bool:
        """Whether the last call of the ledger succeeded."""
        return not self._ledger.has_failed

    def step(self) -> Step:
        """Do a step, and another one if its sample turned out to be older than what it recorded."""
        for key in [key for key, until in self._being_read.items() if until <= self._world.now]:
            del self._being_read[key]
            self.controller.progress_tracker.note_rest(key, None)
        sample = self._sample_for_step()
        step = self.controller.step(sample, is_fresh=self.has_fresh_sample)
        if step.is_outdated:
            self._latest = None
            step = self.controller.step(self.sample())
        while self.requests.drop_refused() or self.requests.revive_more():
            pass
        return step

    def sample(self) -> Sample:
        """Return the latest sample if it is fresh enough, else a new one."""
        if self._latest is None or not self.has_fresh_sample:
            self._wants_new_sample = False
            self._latest = Sample(snapshot=self._world.snapshot(), ram_mb=self._world.ram_mb())
        return self._latest

    @property
    def has_fresh_sample(self) -> bool:
        taken_at = self._latest.snapshot.taken_at if self._latest is not None else None
        return taken_at is not None and self._world.now - taken_at <= (0.0 if self._wants_new_sample else FRESH_S)

    def _sample_for_step(self) -> Sample:
        """Return a fresh sample, or the latest one while a new one is late."""
        world = self._world
        if (
            self._late_samples
            and self._latest is not None
            and not self.has_fresh_sample
            and world.now >= self._late_until
        ):
            random = world.random("late sample")
            if self._late_until == 0.0 and random.random() < self._late_samples:
                self._late_until = world.now + random.uniform(0.01, 0.6)
        if self._latest is not None and world.now < self._late_until:
            return self._latest
        self._late_until = 0.0
        return self.sample()

    def _read_rest(self, attempt: Attempt) -> bool:
        """Read the output of some attempts in a thread, which takes a while."""
        random = self._world.random("output")
        if random.random() >= self._late_reads:
            return True
        self._being_read[attempt.job_id, attempt.number] = self._world.now + random.uniform(0.0, 0.5)
        return False

    def wake_at(self) -> float | None:
        """Return when the daemon wakes because the output of an attempt was read, or for a sample."""
        return min((at for at in (*self._being_read.values(), self._sample_due()) if at is not None), default=None)

    def _sample_due(self) -> float | None:
        """Return when it wakes for a sample that is late."""
        return self._late_until if self._late_until > self._world.now else None

    # Requests

    def begin_change(self) -> None:
        self.controller.slices.begin_change()

    def end_change(self) -> None:
        self.controller.slices.end_change()

    @property
    def has_upcoming(self) -> bool:
        """Whether jobs wait for their turn in a slice."""
        return self.controller.slices.has_upcoming

    def wants_sample(self) -> bool:
        """Return whether a run of a batch waits only for a new sample."""
        self._wants_new_sample = self.controller.batch_gates.wants_sample(self._world.now)
        return self._wants_new_sample

    def explain(self, job_id: int) -> None:
        job = self.store.job(job_id)
        if job is not None and job.state in (JobState.QUEUED, JobState.SUSPENDED):
            self.controller.explain(job, self.sample())

    def has_events(self) -> bool:
        return self.engine.is_readable() or self.suspender.is_readable()

    def measures(self) -> bool:
        """Return whether a job runs on a device, so that samples are taken now and then."""
        live = self.controller.transitions.live.values()
        return any(each.attempt.devices and each.job.state is not JobState.SUSPENDED for each in live)

    def is_blocked_by_others(self) -> bool:
        """Return whether the daemon would watch the ledger: leases of others block its jobs."""
        holds = self.controller.plan.waiting
        holders = [holder for hold in holds for reason in hold.reasons for holder in reason.holders]
        return any(holder.pid != self.me.pid for holder in holders)

    def die(self) -> None:
        """End as by kill -9: only what the kernel releases is released."""
        self.thread.is_cut = True
        self.database.rollback()
        self._ledger.die()
        self.engine.die()
