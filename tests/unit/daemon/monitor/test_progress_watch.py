"""The thread that reads progress: beside the loop, bounded, and not held up by a disk that hangs."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor import job_progress_watch as progress_watch
from gpuyard.daemon.monitor.job_progress_watch import AttemptProgress, ProgressSource, ProgressWatch
from gpuyard.model.job import Attempt, Job, PublishedEvent, Started
from gpuyard.model.job_progress import ProgressReading, WorkDone
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.queue.live_attempts import Live, LiveJobs
from gpuyard.queue.measure_usage import ProgressTracker

DEADLINE_S = 30.0
READING = ProgressReading(amount=WorkDone(done=1, total=2, unit=""))


class Queue:
    """As much of a scheduler as the watch sees, with the real tracker."""

    def __init__(self, logs: dict[int, str], started: float = 0.0) -> None:
        spec = JobSpec(command=("x",), cwd="/", environment={}, need=Need())
        self.live = LiveJobs(
            Live(
                job=Job(id=number, spec=spec, state=JobState.RUNNING, priority=0, user="me", submitted_at=0),
                attempt=Attempt(job_id=number, number=1, phase=Started(at=started), log=log),
            )
            for number, log in logs.items()
        )
        self.noted: list[int] = []
        transitions: Any = SimpleNamespace(live=self.live, note_usage=lambda job_id, _: self.noted.append(job_id))
        self.tracker = ProgressTracker(transitions)
        self.scheduler: Any = SimpleNamespace(
            listeners=[], controller=SimpleNamespace(transitions=transitions, progress_tracker=self.tracker),
            clock=SimpleNamespace(now=lambda: 10.0), wake=lambda: None,
        )  # fmt: skip

    def step(self, *events: PublishedEvent) -> None:
        for listener in self.scheduler.listeners:
            listener(SimpleNamespace(events=events))

    def is_read(self, job_id: int) -> bool:
        """Return whether the end of this job can be recorded."""
        return self.tracker.is_read(self.live[job_id].attempt)

    def last_of(self, job_id: int) -> bool:
        """Return whether the last reading of this job says something."""
        before = len(self.noted)
        self.tracker.add_rest(self.live[job_id], 10.0)
        return len(self.noted) > before


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "_EVERY_S", 0.01)


def watch(
    queue: Queue,
    read: Callable[[AttemptProgress, ProgressSource], ProgressReading | None],
    until: Callable[[], bool],
    logs: Path = Path("/logs"),
) -> None:
    async def run() -> None:
        ProgressWatch(cast("SchedulerLoop", queue.scheduler), [logs], read)
        queue.step()
        async with asyncio.timeout(DEADLINE_S):
            while not until():  # noqa: ASYNC110 - it follows from what threads and the loop did
                await asyncio.sleep(0.005)

    asyncio.run(run())


def test_each_running_job_is_read_again_and_again() -> None:
    queue = Queue({1: "/a/1.log", 2: "/b/2.log"})
    watch(queue, lambda _, __: READING, lambda: min(map(queue.noted.count, (1, 2))) >= 3)


def test_a_disk_that_hangs_holds_up_neither_the_loop_nor_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "_HUNG_S", 0.05)
    queue, answers, in_hung = Queue({1: "/hung/1.log", 2: "/b/2.log"}), threading.Event(), []

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading:
        if source.job_id == 1 and not answers.is_set():
            in_hung.append(threading.current_thread())
            answers.wait(DEADLINE_S)
        return READING

    def is_done() -> bool:
        if queue.noted.count(2) >= 5:
            answers.set()
        return queue.noted.count(1) >= 2

    # The queue's own folder, that of progress files, is another one for each job here.
    monkeypatch.setattr(progress_watch, "progress_file_of", lambda _, key: f"/own/{key}/progress")
    watch(queue, read, is_done)
    assert len(in_hung) == 1


def test_the_end_of_an_attempt_waits_until_the_rest_of_its_output_was_read() -> None:
    queue, may_read, read_rest = Queue({1: "/a/1.log"}), threading.Event(), list[ProgressSource]()

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading | None:
        if not source.is_over:
            return None
        may_read.wait(DEADLINE_S)
        read_rest.append(source)
        return READING

    def is_done() -> bool:
        is_read = queue.is_read(1)
        assert read_rest or not is_read
        may_read.set()
        return is_read

    watch(queue, read, is_done)
    assert queue.last_of(1)


def test_a_reading_is_noted_at_once_although_the_thread_reads_on() -> None:
    """Its attempt may end meanwhile, and the line that says its last figure is read once."""
    queue, is_noted = Queue({1: "/a/1.log", 2: "/a/2.log"}), threading.Event()

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading | None:
        return READING if source.job_id == 1 or is_noted.wait(DEADLINE_S) else None

    watch(queue, read, lambda: 1 in queue.noted)
    is_noted.set()


def test_attempts_that_are_over_are_read_before_the_others() -> None:
    queue, begun, may_go_on = Queue({number: f"/a/{number}.log" for number in range(1, 6)}), [], threading.Event()

    def read(_: AttemptProgress, source: ProgressSource) -> None:
        begun.append((source.job_id, source.is_over))
        may_go_on.wait(DEADLINE_S)

    def is_done() -> bool:
        is_read = bool(begun) and queue.is_read(5)
        if begun:
            may_go_on.set()
        return is_read

    watch(queue, read, is_done)
    assert begun[1] == (5, True)


def test_a_disk_that_hangs_holds_up_no_end_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "_HUNG_S", 0.05)
    monkeypatch.setattr(progress_watch, "progress_file_of", lambda _, key: f"/own/{key}/progress")
    queue, answers, done = Queue({1: "/hung/1.log", 2: "/hung/2.log", 3: "/b/3.log"}), threading.Event(), set[int]()

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading:
        if source.job_id != 3:
            answers.wait(DEADLINE_S)
        return READING

    def is_done() -> bool:
        done.update(job_id for job_id in (1, 2, 3) if queue.is_read(job_id))
        return len(done) == 3

    watch(queue, read, is_done)
    assert [queue.last_of(job_id) for job_id in (1, 2, 3)] == [False, False, True]
    answers.set()


def test_a_short_job_is_read_without_a_thread_and_one_that_has_written_nothing_not_at_all(tmp_path: Path) -> None:
    paths = {number: tmp_path / f"{number}.1.log" for number in (1, 2)}
    paths[1].touch()
    paths[2].write_text("half of it")
    queue, sources = Queue({number: str(path) for number, path in paths.items()}, started=9.5), []

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading:
        sources.append((source.job_id, source.is_over, threading.current_thread() is threading.main_thread()))
        return READING

    watch(queue, read, lambda: queue.is_read(1) and queue.is_read(2), logs=tmp_path)
    assert (2, True, True) in sources
    assert not [each for each in sources if each[:2] == (1, True)]
    assert [queue.last_of(number) for number in (1, 2)] == [False, True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_reading_one_job_ends_neither_the_reading_nor_the_wait_for_its_end() -> None:
    queue, calls = Queue({1: "/a/1.log", 2: "/a/2.log"}), list[ProgressSource]()

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading:
        calls.append(source)
        if source.job_id == 1:
            raise ZeroDivisionError
        return READING

    watch(queue, read, lambda: queue.is_read(1) and 2 in queue.noted)


def test_without_threads_ends_are_recorded_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue = Queue({1: "/a/1.log"})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    watch(queue, lambda _, __: READING, lambda: queue.is_read(1))
