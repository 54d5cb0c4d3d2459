"""One life of the daemon: the real controller, requests and store over simulated ports, until it ends or is killed."""

import os

from gpuyard.control.controller import Controller
from gpuyard.control.requests import Requests
from gpuyard.control.words import Look, Rules, Step
from gpuyard.core.lifecycle import JobState
from gpuyard.core.model import Holder
from gpuyard.core.policy import Limits
from gpuyard.store.catalogue import Catalogue
from gpuyard.store.database import Database
from gpuyard.store.jobs import JobStore
from tests.simulation.engine import SimulatedEngine
from tests.simulation.gaps import Gaps, LeasesPort, Port, StorePort, Thread
from tests.simulation.leases import SimulatedBook
from tests.simulation.world import World

LIMITS = Limits(cpu_jobs=2, tags={"night": 1})


class Life:
    def __init__(self, world: World, database: Database, gaps: Gaps, trouble: float) -> None:
        self.number = world.number("life")
        self.thread = Thread(gaps)
        self.me = Holder(
            uid=os.getuid(), user="me", pid=20_000 + self.number, pid_started=world.now, boot_id=f"boot-{world.boot}"
        )
        self._world = world
        self._database = database
        self._book = SimulatedBook(world, self.me, f"life {self.number}", trouble)
        self._engine = SimulatedEngine(world, self._book.descriptors, trouble)
        self._store = store = JobStore(database)
        store_port = StorePort(store, self.thread, lambda: world.random("disk").random() < trouble / 2)
        clock = Port("clock", world.clock, self.thread)
        self.controller = Controller(
            store_port,  # type: ignore[arg-type]
            LeasesPort("leases", self._book, self.thread),
            Port("engine", self._engine, self.thread),
            clock,
            rules=Rules(limits=LIMITS),
            me=self.me,
        )
        self.requests = Requests(self.controller, store_port, Catalogue(database, store), clock)  # type: ignore[arg-type]

    def step(self) -> Step:
        return self.controller.step(Look(snapshot=self._world.snapshot()))

    def explain(self, job_id: int) -> None:
        job = self._store.job(job_id)
        if job is not None and job.state is JobState.QUEUED:
            self.controller.explain(job, Look(snapshot=self._world.snapshot()))

    def is_called(self) -> bool:
        return self._engine.is_readable()

    def others_are_in_the_way(self) -> bool:
        """As the daemon tells whether to watch the ledger."""
        holds = self.controller.plan.holds
        holders = [holder for hold in holds for reason in hold.reasons for holder in reason.holders]
        return any(holder.pid != self.me.pid for holder in holders)

    def die(self) -> None:
        """As by kill -9: what the kernel lets go of is let go of, and nothing else is done."""
        self.thread.is_cut = True
        self._database.undo()
        self._book.die()
        self._engine.die()
