"""The daemon's loop in this process: what makes it step, who is woken by a step, and what does not stop it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuyard.control.step import Step
from gpuyard.core.job.selection import JobSelection
from gpuyard.core.job.submission import SubmissionRequest, parse_submission
from gpuyard.core.lease import Holder
from gpuyard.core.sample import Sample
from gpuyard.core.snapshot import Device, Host, Snapshot, Vendor
from gpuyard.daemon import loop as loop_module
from gpuyard.daemon.api.submit import SubmissionHandler
from gpuyard.daemon.api.wait_for_jobs import JobWaits
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor.sampling import SamplingThread
from gpuyard.daemon.server.chunked_work import run_in_pieces
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.errors import StoreFault
from gpuyard.leases.ledger import open_ledger
from gpuyard.leases.queue_ledger import QueueLedger
from gpuyard.store.database import open_database
from gpuyard.system.process_identity import this_process
from tests.fakes.clock import FakeClock
from tests.unit.leases import take

DEADLINE_S = 30.0
CARD = Device(
    id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=24576.0, memory_used_mb=0.0, memory_free_mb=24576.0
)
SOMEBODY = Holder(uid=os.getuid(), user="me", pid=1)


class Bench:
    """A loop, whether it has asked for a look, and its steps as they are done."""

    def __init__(self, scheduler: SchedulerLoop, clock: FakeClock) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.steps: asyncio.Queue[Step] = asyncio.Queue()
        self.look_asked = asyncio.Event()
        scheduler.listeners.append(self.steps.put_nowait)

    async def step(self) -> Step:
        """The next one that is done."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.steps.get()

    async def submit(self, *, token: str = "", **options: object) -> int:
        """The id of the job. Each time by a newcomer: nothing but the database remembers what was sent before."""
        asked = SubmissionRequest(cwd="/", environment={}, command=("true",), options=options, token=token)
        return int((await SubmissionHandler(self.scheduler).take(parse_submission(asked)))["first"])


@contextlib.asynccontextmanager
async def bench(home: Path) -> AsyncIterator[Bench]:
    """A loop that has done its first step. It sees a machine with one card, and is paused, so that nothing starts."""
    clock, me = FakeClock(), this_process("test")
    database, _ = open_database(home / "queue.db")
    engine = LocalEngine(home)
    suspender = LocalSuspender(home / "suspending", engine.queue)
    scheduler = SchedulerLoop(database, QueueLedger(open_ledger(), me), engine, clock, me, suspender=suspender)
    scheduler.requests.set_paused(paused=True)
    there = Bench(scheduler, clock)
    latest = Sample(snapshot=Snapshot(taken_at=None, host=Host(), devices=(CARD,)))

    async def fresh(within_s: float) -> Sample:
        return latest

    sampling: Any = SimpleNamespace(
        latest=latest, age=lambda: 0.0, request=there.look_asked.set, fresh=fresh, close=lambda: None
    )
    scheduler.start(cast("SamplingThread", sampling))
    try:
        await there.step()
        yield there
    finally:
        scheduler.close()
        database.close()


def play(home: Path, story: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        async with bench(home) as there:
            await story(there)

    home.mkdir()
    asyncio.run(told())


def test_a_submission_is_followed_by_a_step(own_home: Path) -> None:
    async def story(there: Bench) -> None:
        await there.submit(gpus=0)
        await there.step()

    play(own_home, story)


def test_nothing_that_happens_after_its_end_makes_it_step(own_home: Path) -> None:
    async def story(there: Bench) -> None:
        there.scheduler.close()
        there.scheduler.wake()
        for _ in range(3):
            await asyncio.sleep(0)
        assert (there.steps.empty(), there.scheduler.problem) == (True, None)

    play(own_home, story)


def test_a_submission_that_is_sent_again_counts_once(own_home: Path) -> None:
    async def story(there: Bench) -> None:
        first = await there.submit(token="sent twice", gpus=0)
        assert await there.submit(token="sent twice", gpus=0) == first
        assert await there.submit(token="another", gpus=0) == first + 1
        assert there.scheduler.queries.last_id() == first + 1

    play(own_home, story)


def test_whoever_waits_for_a_job_is_woken_by_the_step_that_sees_its_end(own_home: Path) -> None:
    async def story(there: Bench) -> None:
        scheduler, job = there.scheduler, await there.submit(gpus=0)
        await there.step()
        waiting = JobWaits(scheduler.queries, scheduler.store, [(job, job)])
        waits = asyncio.create_task(scheduler.finish_signal.wait(waiting, timeout_s=10 * DEADLINE_S))
        await asyncio.sleep(0)
        await run_in_pieces(scheduler.requests.cancel(JobSelection(ranges=((job, job),))))
        scheduler.wake()
        async with asyncio.timeout(DEADLINE_S):
            await waits
        assert waiting.answer()["done"]

    play(own_home, story)


def test_a_listener_that_fails_keeps_neither_others_nor_the_next_step_from_going_on(own_home: Path) -> None:
    async def story(there: Bench) -> None:
        def fail(_: Step) -> None:
            raise ZeroDivisionError

        there.scheduler.listeners.insert(0, fail)
        for _ in range(2):
            there.scheduler.wake()
            await there.step()

    play(own_home, story)


def test_a_changed_configuration_counts_from_then_on_and_one_that_cannot_be_read_changes_nothing(
    own_home: Path,
) -> None:
    async def story(there: Bench) -> None:
        followed: list[int] = []
        there.scheduler.config_listeners.append(
            lambda: followed.append(there.scheduler.controller.rules.limits.cpu_jobs)
        )
        for at, said in enumerate(("cpu_jobs = 7", "cpu_jobs =", "cpu_jobs = 9"), 1):
            (own_home / "config.toml").write_text(f"[queue]\n{said}\n")
            os.utime(own_home / "config.toml", (at, at))  # changes of one moment would be one
            there.clock.time += 60.0
            there.scheduler.wake()
            await there.step()
        assert followed == [7, 9]

    play(own_home, story)


def test_a_damaged_database_ends_the_loop_and_a_full_disk_does_not(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(there: Bench) -> None:
        scheduler = there.scheduler
        faults = [StoreFault("the disk is full"), StoreFault("it is damaged", is_damage=True)]
        monkeypatch.setattr(loop_module, "_TRY_AGAIN_S", 0.0)
        step = scheduler.controller.step

        def fail_at_first(look: Sample, **options: bool) -> Step:
            if faults:
                raise faults.pop(0)
            return step(look, **options)

        monkeypatch.setattr(scheduler.controller, "step", fail_at_first)
        scheduler.wake()
        async with asyncio.timeout(DEADLINE_S):
            told = await scheduler.fatal_fault
        assert told.is_damage
        assert scheduler.problem == "the disk is full"

    play(own_home, story)


def test_the_end_of_somebody_elses_lease_is_noticed_at_once(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerLoop, "_sleep", lambda *_: None)  # it never looks again by itself

    async def story(there: Bench) -> None:
        scheduler = there.scheduler
        held = scheduler.ledger.claim(SOMEBODY, take("G0"), DEADLINE_S)
        assert held is not None
        scheduler.requests.set_paused(paused=False)
        await there.submit()
        step = await there.step()
        assert step.waits_for_devices
        there.look_asked.clear()
        held.release()
        async with asyncio.timeout(DEADLINE_S):
            await there.look_asked.wait()

    play(own_home, story)
