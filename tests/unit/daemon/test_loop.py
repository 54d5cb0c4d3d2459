"""The scheduler loop in this process: what makes it step, what a step wakes, and which failures it survives."""

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuyard.client import paths
from gpuyard.client.fast_http import render_request
from gpuyard.daemon import loop as loop_module
from gpuyard.daemon.api.routes import Routes
from gpuyard.daemon.api.slow_requests import run_in_pieces
from gpuyard.daemon.api.submit import SubmissionHandler
from gpuyard.daemon.api.wait import JobWaits
from gpuyard.daemon.job_code import CodeSnapshots, CodeWatch
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.loop_wakeups import StepTimer
from gpuyard.daemon.monitor.sampling import SamplingThread
from gpuyard.daemon.server.connection import serve
from gpuyard.engines.local.engine import LocalEngine
from gpuyard.engines.suspend.suspender import LocalSuspender
from gpuyard.errors import StoreFault
from gpuyard.ledger.ledger import QueueLedger, open_ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.model.lease import Holder
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Device, Host, Problem, Sample, Snapshot, Vendor
from gpuyard.model.selection import JobSelection
from gpuyard.model.submission import SubmissionRequest, parse_submission
from gpuyard.queue.step import Step
from gpuyard.store import checkpoints as checkpoint_thread
from gpuyard.store.checkpoints import CheckpointThread, WalCheckpoints
from gpuyard.store.database import open_database
from gpuyard.system.processes import this_process
from tests.fakes.clock import FakeClock
from tests.unit.ledger import take

DEADLINE_S = 30.0
CARD = Device(
    id="G0", vendor=Vendor.NVIDIA, index=0, memory_total_mb=24576.0, memory_used_mb=0.0, memory_free_mb=24576.0
)
OTHER_PROCESS = Holder(uid=os.getuid(), user="me", pid=1)


class LoopFixture:
    """A loop, its steps as they complete, and whether it has requested a sample."""

    def __init__(self, scheduler: SchedulerLoop, clock: FakeClock) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.steps: asyncio.Queue[Step] = asyncio.Queue()
        self.sample_requested = asyncio.Event()
        scheduler.listeners.append(self.steps.put_nowait)

    async def step(self) -> Step:
        """Return the next step that completes."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.steps.get()

    async def submit(self, *, token: str = "", **options: object) -> int:
        """Return the job id. A new handler each time: only the database remembers earlier submissions."""
        asked = SubmissionRequest(cwd="/", environment={}, command=("true",), options=options, token=token)
        snapshots = CodeSnapshots(self.scheduler, Path("/nonexistent"))
        handler = SubmissionHandler(self.scheduler, CodeWatch(self.scheduler), snapshots)
        return (await handler.take(parse_submission(asked))).first


@contextlib.asynccontextmanager
async def open_loop(home: Path) -> AsyncIterator[LoopFixture]:
    """Yield a loop after its first step: on a machine with one GPU, and paused, so that nothing starts."""
    clock, me = FakeClock(), this_process("test")
    database, _ = open_database(home / "queue.db")
    engine = LocalEngine(home)
    suspender = LocalSuspender(home / "suspending", engine.queue)
    scheduler = SchedulerLoop(database, QueueLedger(open_ledger(), me), engine, clock, me, suspender=suspender)
    scheduler.requests.set_paused(paused=True)
    fixture = LoopFixture(scheduler, clock)
    latest = Sample(snapshot=Snapshot(taken_at=None, host=Host(), devices=(CARD,)))

    async def fresh(within_s: float) -> Sample:
        return latest

    sampling: Any = SimpleNamespace(
        latest=latest, age=lambda: 0.0, request=fixture.sample_requested.set, fresh=fresh, close=lambda: None,
        watch=lambda *_: None,
    )  # fmt: skip
    scheduler.start(cast("SamplingThread", sampling))
    try:
        await fixture.step()
        yield fixture
    finally:
        scheduler.close()
        database.close()


def run(home: Path, scenario: Callable[[LoopFixture], Coroutine[Any, Any, None]]) -> None:
    async def run_scenario() -> None:
        async with open_loop(home) as fixture:
            await scenario(fixture)

    home.mkdir()
    asyncio.run(run_scenario())


def test_the_keeper_starts_and_samples_while_many_jobs_are_stored(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        scheduler = fixture.scheduler
        engines, store = scheduler.controller.engines, scheduler.requests.submit
        start, starts = engines.is_ready, list[bool]()
        seen: list[tuple[bool, bool]] = []

        def is_ready() -> bool:
            starts.append(True)
            return start()

        def submit(*submission: Any) -> Any:
            seen.append((fixture.sample_requested.is_set(), bool(starts)))
            return store(*submission)

        monkeypatch.setattr(engines, "is_ready", is_ready)
        monkeypatch.setattr(scheduler.requests, "submit", submit)
        cast("Any", scheduler.sampling).age = lambda: 1.0
        await fixture.submit(array="1-100", hold=True)
        assert seen.pop() == (False, False), "the queue is paused"
        scheduler.requests.set_paused(paused=False)
        await fixture.submit(hold=True)  # no step has to start it
        assert seen.pop() == (False, False), "a single job is stored at once"
        await fixture.submit(array="1-100", hold=True)
        assert seen.pop() == (True, True)

    run(own_home, scenario)


def test_a_submission_is_followed_by_a_step(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_thread, "_LOOK_S", 10 * DEADLINE_S)  # a step follows each checkpoint, too

    async def scenario(fixture: LoopFixture) -> None:
        await fixture.submit(gpus=0)
        await fixture.step()

    run(own_home, scenario)


def test_a_submission_is_answered_before_the_step_that_starts_its_job(own_home: Path) -> None:
    body = {"command": ["true"], "cwd": "/", "environment": {}, "options": {"gpus": "0"}}
    is_answered: list[bool] = []

    async def scenario(fixture: LoopFixture) -> None:
        async with sent_request(fixture, "/submissions", body) as client:
            fixture.scheduler.listeners.append(lambda _: is_answered.append(has_data(client)))
            await fixture.step()

    run(own_home, scenario)
    assert is_answered == [True]


@contextlib.asynccontextmanager
async def sent_request(fixture: LoopFixture, path: str, body: Any) -> AsyncIterator[socket.socket]:
    """Yield the connection of a client that has sent a request. It does not block."""
    routes = Routes(fixture.scheduler, lambda _: None, 0.0)
    server = await serve(Path(paths.socket_path()), routes.handle)
    with contextlib.closing(routes), contextlib.closing(server), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.path))
        client.sendall(render_request("POST", path, None, body, {}))
        client.setblocking(False)
        yield client


def has_data(client: socket.socket) -> bool:
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("path", "body"),
    [("/jobs/cancel", {"ids": "1"}), ("/tags/stop", {"tag": "night"})],
    ids=["a cancelled job", "a stopped tag"],
)
def test_an_answer_follows_the_disk(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, str]
) -> None:
    sync, has_disk = WalCheckpoints.sync, threading.Event()

    async def scenario(fixture: LoopFixture) -> None:
        await fixture.submit(gpus=0)
        loop, is_reached = asyncio.get_running_loop(), asyncio.Event()

        def wait(files: WalCheckpoints) -> None:
            loop.call_soon_threadsafe(is_reached.set)
            assert has_disk.wait(DEADLINE_S)
            sync(files)

        monkeypatch.setattr(WalCheckpoints, "sync", wait)
        async with sent_request(fixture, path, body) as client, asyncio.timeout(DEADLINE_S):
            answer = asyncio.create_task(loop.sock_recv(client, 4096))
            reached = asyncio.create_task(is_reached.wait())
            await asyncio.wait({answer, reached}, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(10):
                await asyncio.sleep(0)
            is_early = answer.done()
            has_disk.set()
            assert not is_early
            assert (await answer).startswith(b"HTTP/1.1 200 ")

    run(own_home, scenario)


def test_a_submission_waits_for_a_probe_that_has_not_answered_since_the_start(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        sampling, answered = fixture.scheduler.sampling, asyncio.get_running_loop().create_future()
        answered.set_result(sampling.latest)
        problem = Problem(source="nvidia", kind="timeout", message="no answer yet")
        early = Sample(snapshot=Snapshot(taken_at=None, host=Host(), problems=(problem,)))

        async def fresh(within_s: float) -> Sample:
            return early

        vars(sampling).update(fresh=fresh, request=lambda: answered)
        job = fixture.scheduler.store.job(await fixture.submit(gpus=1))
        assert job is not None
        assert job.state is JobState.QUEUED

    run(own_home, scenario)


def test_a_closed_loop_does_not_step(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        fixture.scheduler.close()
        fixture.scheduler.wake()
        for _ in range(3):
            await asyncio.sleep(0)
        assert (fixture.steps.empty(), fixture.scheduler.problem) == (True, None)

    run(own_home, scenario)


def test_a_submission_sent_twice_creates_one_job(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        first = await fixture.submit(token="sent twice", gpus=0)
        assert await fixture.submit(token="sent twice", gpus=0) == first
        assert await fixture.submit(token="another", gpus=0) == first + 1
        assert fixture.scheduler.queries.last_id() == first + 1

    run(own_home, scenario)


def test_a_client_that_waits_for_a_job_is_woken_by_the_step_after_its_end(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        scheduler, job = fixture.scheduler, await fixture.submit(gpus=0)
        await fixture.step()
        waiting = JobWaits(scheduler.queries, scheduler.store, [(job, job)])
        waits = asyncio.create_task(scheduler.finish_signal.wait(waiting.is_over, timeout_s=10 * DEADLINE_S))
        await asyncio.sleep(0)
        change = scheduler.requests.change(JobSelection(ranges=((job, job),)), scheduler.requests.cancel)
        await run_in_pieces(change, scheduler.checkpoints.may_write)
        scheduler.wake()
        async with asyncio.timeout(DEADLINE_S):
            await waits
        assert waiting.answer().done

    run(own_home, scenario)


def test_a_listener_that_raises_stops_neither_other_listeners_nor_the_next_step(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        def fail(_: Step) -> None:
            raise ZeroDivisionError

        fixture.scheduler.listeners.insert(0, fail)
        for _ in range(2):
            fixture.scheduler.wake()
            await fixture.step()

    run(own_home, scenario)


def test_a_changed_configuration_applies_and_an_unreadable_one_changes_nothing(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        cpu_jobs: list[int] = []
        fixture.scheduler.config_listeners.append(
            lambda: cpu_jobs.append(fixture.scheduler.controller.rules.limits.cpu_jobs)
        )
        for at, line in enumerate(("cpu_jobs = 7", "cpu_jobs =", "cpu_jobs = 9"), 1):
            (own_home / "config.toml").write_text(f"[queue]\n{line}\n")
            os.utime(own_home / "config.toml", (at, at))  # two changes within one clock tick would look the same
            fixture.clock.time += 60.0
            fixture.scheduler.wake()
            await fixture.step()
        assert cpu_jobs == [7, 9]

    run(own_home, scenario)


def test_only_a_damaged_database_ends_the_loop_no_full_disk(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        scheduler = fixture.scheduler
        faults = [StoreFault("the disk is full"), StoreFault("it is damaged", is_damage=True)]
        monkeypatch.setattr(loop_module, "_RETRY_S", 0.0)
        step = scheduler.controller.step

        def fail_at_first(sample: Sample, **options: bool) -> Step:
            if faults:
                raise faults.pop(0)
            return step(sample, **options)

        monkeypatch.setattr(scheduler.controller, "step", fail_at_first)
        scheduler.wake()
        async with asyncio.timeout(DEADLINE_S):
            fault = await scheduler.fatal_fault
        assert fault.is_damage
        assert scheduler.problem == "the disk is full"

    run(own_home, scenario)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "the queue cannot go on: Too many open files (raise the limit"),
        (ValueError("x"), "a step failed, which is a bug: ValueError: x"),
    ],
)
def test_a_limit_that_fails_a_step_is_no_bug_and_the_loop_goes_on(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        scheduler, problems = fixture.scheduler, list[str]()
        monkeypatch.setattr(loop_module, "_RETRY_S", 0.0)
        step = scheduler.controller.step

        def fail_at_first(sample: Sample, **options: bool) -> Step:
            if scheduler.problem is None and not problems:
                raise error
            problems.extend(scheduler.all_notices())
            return step(sample, **options)

        monkeypatch.setattr(scheduler.controller, "step", fail_at_first)
        scheduler.wake()
        async with asyncio.timeout(DEADLINE_S):
            await fixture.steps.get()
        assert problems[0].startswith(problem)
        assert scheduler.problem is None

    run(own_home, scenario)


def test_the_end_of_another_processs_lease_is_noticed_at_once(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTimer, "set", lambda *_: None)  # no sample by timer

    async def scenario(fixture: LoopFixture) -> None:
        scheduler = fixture.scheduler
        held = scheduler.ledger.claim(OTHER_PROCESS, take("G0"), DEADLINE_S)
        assert held is not None
        scheduler.requests.set_paused(paused=False)
        await fixture.submit()
        while not (await fixture.step()).waits_for_devices:
            pass  # the keeper starts first
        fixture.sample_requested.clear()
        held.release()
        async with asyncio.timeout(DEADLINE_S):
            await fixture.sample_requested.wait()

    run(own_home, scenario)


def lock_and_unlock(folder: Path) -> None:
    with hold_mutex(folder, DEADLINE_S):
        pass


def test_the_loop_goes_on_while_another_has_the_ledger_locked_and_gets_its_turn_after_it(own_home: Path) -> None:
    async def scenario(fixture: LoopFixture) -> None:
        scheduler = fixture.scheduler
        with hold_mutex(scheduler.ledger.folder, DEADLINE_S):
            await fixture.submit(gpus=1)
            await fixture.step()
            assert scheduler.controller.plan.head is None  # nothing is decided yet
        while not scheduler.controller.waiting:
            await fixture.step()
        await asyncio.to_thread(lock_and_unlock, scheduler.ledger.folder)  # once the turn is over

    run(own_home, scenario)


def test_a_turn_at_the_ledger_is_left_during_a_checkpoint(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_put_off = threading.Semaphore(0), threading.Event()

    def is_paused(_: CheckpointThread) -> bool:
        if threading.current_thread() is threading.main_thread():
            return is_put_off.is_set()
        asked.release()
        return True  # from its first question on: it could not be stopped between the answer and the mutex

    async def scenario(fixture: LoopFixture) -> None:
        scheduler = fixture.scheduler
        monkeypatch.setattr(CheckpointThread, "is_paused", property(is_paused))
        with hold_mutex(scheduler.ledger.folder, DEADLINE_S):
            await fixture.submit(gpus=1)
            while "ledger mutex" not in {each.name for each in threading.enumerate()}:
                await fixture.step()
            is_put_off.set()
        while asked.acquire(blocking=False):  # what was asked before
            pass
        for _ in range(3):
            assert await asyncio.to_thread(asked.acquire, timeout=DEADLINE_S)
            lock_and_unlock(scheduler.ledger.folder)
        assert not scheduler.controller.waiting
        monkeypatch.undo()
        while not scheduler.controller.waiting:
            await fixture.step()

    run(own_home, scenario)


def test_the_loop_rests_after_a_long_step_although_attempts_ended(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"an end that no step takes")
    monkeypatch.setattr(LocalEngine, "fileno", lambda _: reading)
    monkeypatch.setattr(loop_module, "_LONG_STEP_S", -1.0)
    monkeypatch.setattr(loop_module, "_FOR_OTHERS_S", 0.05)

    async def scenario(fixture: LoopFixture) -> None:
        loop, pauses = asyncio.get_running_loop(), list[float]()
        call_later = loop.call_later

        def note_pause(delay: float, *callback: Any) -> asyncio.TimerHandle:
            pauses.append(delay)
            return call_later(delay, *callback)

        monkeypatch.setattr(loop, "call_later", note_pause)
        await fixture.step()
        before = len([each for each in pauses if each <= 0.05])
        await fixture.step()
        assert len([each for each in pauses if each <= 0.05]) == before + 1

    run(own_home, scenario)
    os.close(reading)
    os.close(writing)


def test_a_step_waits_until_a_checkpoint_ends_and_follows_it(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_reached, goes_on = threading.Event(), threading.Event()
    empty = WalCheckpoints.empty

    def wait(files: WalCheckpoints, generation: int, *, is_truncated: bool) -> bool:
        is_reached.set()
        return goes_on.wait(DEADLINE_S) and empty(files, generation, is_truncated=is_truncated)

    async def scenario(fixture: LoopFixture) -> None:
        monkeypatch.setattr(WalCheckpoints, "empty", wait)
        monkeypatch.setattr(checkpoint_thread, "_LOG_LIMIT", 0)
        await fixture.submit(gpus=0)
        await asyncio.to_thread(is_reached.wait, DEADLINE_S)
        while not fixture.steps.empty():
            fixture.steps.get_nowait()
        fixture.scheduler.wake()
        for _ in range(10):
            await asyncio.sleep(0)
        assert fixture.steps.empty()
        monkeypatch.setattr(checkpoint_thread, "_LOG_LIMIT", 1 << 30)
        goes_on.set()
        await fixture.step()

    run(own_home, scenario)
