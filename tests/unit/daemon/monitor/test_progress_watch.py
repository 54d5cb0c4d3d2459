"""The thread that reads progress: beside the loop, bounded, and not held up by a disk that hangs."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuyard.control.live_jobs import Live, LiveJobs
from gpuyard.core.job.job import (
    Attempt,
    Job,
    JobSpec,
    Outcome,
    OutcomeKind,
    Over,
    PublishedEvent,
    PublishedEventKind,
    Started,
)
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.lease import Need
from gpuyard.core.progress.job_progress import ProgressReading
from gpuyard.core.progress.log_reader import WorkDone
from gpuyard.daemon.loop import SchedulerLoop
from gpuyard.daemon.monitor import progress_watch
from gpuyard.daemon.monitor.progress_watch import ProgressWatch
from gpuyard.daemon.monitor.read_progress import AttemptProgress, ProgressSource

DEADLINE_S = 30.0
READING = ProgressReading(amount=WorkDone(done=1, total=2, unit=""))


class Queue:
    """As much of a scheduler as the watch sees."""

    def __init__(self, logs: dict[int, str]) -> None:
        spec = JobSpec(command=("x",), cwd="/", environment={}, need=Need())
        self.live = LiveJobs(
            Live(
                job=Job(id=number, spec=spec, state=JobState.RUNNING, priority=0, user="me", submitted_at=0),
                attempt=Attempt(job_id=number, number=1, phase=Started(at=0.0), log=log),
            )
            for number, log in logs.items()
        )
        self.noted: list[int] = []
        self.last: list[int] = []
        tracker = SimpleNamespace(
            note=lambda job_id, *_: self.noted.append(job_id), note_last=lambda job_id, *_: self.last.append(job_id)
        )
        transitions = SimpleNamespace(live=self.live, in_step=nullcontext)
        self.scheduler: Any = SimpleNamespace(
            listeners=[],
            controller=SimpleNamespace(transitions=transitions, progress_tracker=tracker),
            store=SimpleNamespace(transaction=nullcontext),
            checkpoints=SimpleNamespace(when_writable=lambda act: act()),
            clock=SimpleNamespace(now=lambda: 10.0),
            wake=lambda: None,
        )

    def step(self, *events: PublishedEvent) -> None:
        for listener in self.scheduler.listeners:
            listener(SimpleNamespace(events=events))

    def end(self, job_id: int, ran_s: float = 5.0) -> PublishedEvent:
        live = self.live.take(job_id) if job_id in self.live else next(iter(self.live.values()))
        over = Over(before=Started(at=0.0), at=ran_s, outcome=Outcome(kind=OutcomeKind.SUCCEEDED))
        attempt = Attempt(job_id=job_id, number=1, phase=over, log=live.attempt.log)
        return PublishedEvent(kind=PublishedEventKind.ENDED, job=live.job, at=ran_s, attempt=attempt)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "_EVERY_S", 0.01)
    monkeypatch.setattr(progress_watch, "_SOON_S", 0.01)


def watch(
    queue: Queue,
    read: Callable[[AttemptProgress, ProgressSource], ProgressReading | None],
    until: Callable[[], bool],
    *events: PublishedEvent,
    logs: Path = Path("/logs"),
) -> None:
    async def run() -> None:
        ProgressWatch(cast("SchedulerLoop", queue.scheduler), [logs], read)
        queue.step(*events)
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


def test_an_attempt_that_has_ended_is_read_once_more() -> None:
    queue = Queue({1: "/a/1.log"})
    sources: list[ProgressSource] = []

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading:
        sources.append(source)
        return READING

    watch(queue, read, lambda: queue.last == [1], queue.end(1))
    assert [source.is_over for source in sources] == [True]


def test_of_very_many_short_jobs_few_are_read_at_their_end() -> None:
    queue = Queue({1: "/a/1.log"})
    ends = [queue.end(job_id, ran_s=0.01) for job_id in range(100, 1100)]
    watch(queue, lambda _, __: READING, lambda: bool(queue.last), *ends)
    assert len(queue.last) <= 32


def test_a_short_job_that_has_written_nothing_is_not_read_at_its_end(tmp_path: Path) -> None:
    paths = {number: tmp_path / f"{number}.1.log" for number in (1, 2)}
    paths[1].touch()
    paths[2].write_text("half of it")
    queue = Queue({number: str(path) for number, path in paths.items()})
    ends = [queue.end(number, ran_s=0.01) for number in (1, 2)]
    watch(queue, lambda _, __: READING, lambda: bool(queue.last), *ends, logs=tmp_path)
    assert queue.last == [2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_reading_one_job_does_not_end_the_reading() -> None:
    queue, calls = Queue({1: "/a/1.log"}), []

    def read(_: AttemptProgress, source: ProgressSource) -> ProgressReading:
        calls.append(source)
        if len(calls) == 1:
            raise ZeroDivisionError
        return READING

    watch(queue, read, lambda: 1 in queue.noted)
