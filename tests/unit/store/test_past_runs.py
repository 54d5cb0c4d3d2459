"""Past runs, by the time in which they ran."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.model.job import HandedOver, Outcome, OutcomeKind, Started, SuspendedBy
from gpuyard.model.lifecycle import JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.store.database import open_database, open_reader
from gpuyard.store.job_store import JobStore
from gpuyard.store.past_attempts import PastRun, finished_since, runs_between
from tests.unit.store import QueueDb, end_attempt
from tests.unit.store.sample_queue import SPEC, SUCCEEDED, attempt, like, submit


class Queue:
    def __init__(self, store: JobStore, path: Path) -> None:
        self.store = store
        self._path = path

    def run(self, begins: float | None, ends: float, *elements: ArrayElement, outcome: Outcome = SUCCEEDED) -> int:
        spec = replace(SPEC, command=("train", "--lr", "{lr}"), name="big")
        with self.store.transaction():
            job_id = submit(self.store, like(spec), elements or (ArrayElement(),))
            phase = HandedOver(at=0.0) if begins is None else Started(at=begins)
            self.store.start_attempt(replace(attempt(job_id), phase=phase, reserved_mb=512.0))
            end_attempt(self.store, job_id, 1, outcome, ends)
        return job_id

    def between(self, since: float, until: float, limit: int = 100) -> tuple[list[PastRun], int]:
        with closing(open_reader(self._path)) as reader:
            return runs_between(reader, since, until, limit)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    database, _ = open_database(tmp_path / "queue.db")
    with closing(database):
        yield Queue(JobStore(database), database.path)


def test_attempts_that_overlap_the_time_are_found(queue: Queue) -> None:
    first, second, third = queue.run(10, 20), queue.run(15, 40), queue.run(30, 35)
    queue.run(50, 60)
    assert [run.job for run in queue.between(20, 45)[0]] == [second, third]
    assert [run.job for run in queue.between(12, 16)[0]] == [second, first]
    assert [run.job for run in queue.between(60, 100)[0]] == []


def test_an_attempt_that_never_started_is_neither_found_nor_counted(queue: Queue) -> None:
    queue.run(None, 20)
    ran = queue.run(10, 15)
    found, left_out = queue.between(0, 100, limit=1)
    assert ([run.job for run in found], left_out) == ([ran], 0)


def test_beyond_the_limit_the_last_are_returned_and_the_rest_counted(queue: Queue) -> None:
    jobs = [queue.run(begins, begins + 1) for begins in range(6)]
    found, left_out = queue.between(0, 100, limit=4)
    assert ([run.job for run in found], left_out) == (jobs[:1:-1], 2)
    assert queue.between(0, 100, limit=6)[1] == 0


def test_a_run_has_its_own_command_devices_and_outcome(queue: Queue) -> None:
    queue.run(1, 2, ArrayElement(values={"lr": "0.1"}), outcome=Outcome(kind=OutcomeKind.TIMED_OUT))
    ((run,), _) = queue.between(0, 9)
    assert (run.command, run.name, run.user, run.outcome) == ("train --lr 0.1", "big", "me", OutcomeKind.TIMED_OUT)
    assert (run.devices, run.reserved_mb, run.attempt, run.moves) == (("GPU-a", "GPU-b"), 512.0, 1, ())


def test_a_suspended_run_has_the_times_of_its_moves(queue: Queue) -> None:
    job_id = queue.run(1, 9)
    with queue.store.transaction():
        for at, kind in ((2.0, "suspending"), (3.0, "suspended"), (4.0, "priority"), (5.0, "resumed")):
            queue.store.add_event(job_id, at, kind)
        (run_once,) = queue.store.attempts(job_id)
        queue.store.update_attempt(replace(run_once, parked=SuspendedBy.FOR_ROOM, suspended_s=3.0))
    ((run,), _) = queue.between(0, 99)
    assert run.moves == ((2.0, "suspending"), (5.0, "resumed"))


def test_the_cause_is_the_error_else_how_the_attempt_ended_else_what_became_of_the_job() -> None:
    queue, kind = QueueDb(), OutcomeKind.FAILED
    ended: list[tuple[Outcome | None, str | None]] = [
        (Outcome(kind=kind, reason="exit status 1", error_line="KeyError: 'a'"), "exit status 1; not retried"),
        (Outcome(kind=kind, reason="exit status 3"), "exit status 3; not retried"),
        (None, "the machine was restarted while it ran"),
        (None, None),
    ]
    for job_id, (outcome, reason) in zip(queue.add(4), ended, strict=True):
        queue.store.change_state(job_id, JobState.FAILED, ended_at=120.0, outcome=outcome, reason=reason)
    counts, failed = finished_since(queue.db.connection, 110.0)
    assert counts == {JobState.FAILED: 4}
    assert [cause for _, cause in failed] == [
        "KeyError: 'a'", "exit status 3", "the machine was restarted while it ran", "failed",
    ]  # fmt: skip
