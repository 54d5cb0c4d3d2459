"""Shared by tests of the store: a queue in memory, and the query plans and costs of SQLite."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gpuyard.model.job import Attempt, Job, Outcome, Over, Started
from gpuyard.model.job_spec import JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.placeholders import ArrayElement
from gpuyard.store.database import Database, open_database
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.store.row_codec import lane_of

SPEC = JobSpec(command=("run", "{index}"), cwd="/", environment={}, need=Need())


def attempt_of(job_id: int, at: float = 110.0, *, number: int = 1, **fields: Any) -> Attempt:
    """Return a running attempt of this boot, `b`."""
    phase = Started(at=at, keeper_pid=9)
    return Attempt(job_id=job_id, number=number, **{"phase": phase, "boot_id": "b", **fields})


def end_attempt(store: JobStore, job_id: int, number: int, outcome: Outcome, at: float) -> None:
    attempt = store.attempts(job_id)[number - 1]
    store.set_phase(replace(attempt, phase=Over(before=attempt.last_live_phase, at=at, outcome=outcome)))


class QueueDb:
    """A queue in memory, or in a file, with helpers for tests."""

    def __init__(self, path: Path | None = None) -> None:
        self.db: Database = open_database(path)[0]
        self.store = JobStore(self.db)
        self.queries = QueueQueries(self.db, self.store)

    def add(self, count: int = 1, *, batch: bool = False, complete: bool = True, **fields: Any) -> list[int]:
        """Add equal jobs in one submission and return their ids. `fields` are fields of the spec or of the job."""
        return self.add_each([ArrayElement()] * count, batch=batch, complete=complete, **fields)

    def add_each(
        self, elements: Sequence[ArrayElement], *, batch: bool = False, complete: bool = True, **fields: Any
    ) -> list[int]:
        spec_fields = {name: value for name, value in fields.items() if name in JobSpec.__struct_fields__}
        like = Job(
            id=0, spec=replace(SPEC, **spec_fields), state=JobState.QUEUED, priority=0, user="me", submitted_at=100.0
        )
        like = replace(like, **{name: value for name, value in fields.items() if name not in spec_fields})
        number, first = self.store.start_submission("", len(elements))
        like = replace(like, id=first, group=first if like.spec.is_array else None)
        lane = self.store.ensure_lane(lane_of(like, number if batch else None))
        self.store.add_jobs(like, self.store.add_spec(like.spec), lane, first, elements)
        if complete:
            self.store.complete_submission(number)
        return list(range(first, first + len(elements)))

    def job(self, job_id: int) -> Job:
        job = self.store.job(job_id)
        assert job is not None
        return job

    def ready(self) -> list[list[int]]:
        return [[each.job_id for each in queue.jobs] for queue in self.store.ready_queues()]

    def run(self, job_id: int, number: int = 1) -> Attempt:
        attempt = attempt_of(job_id, 110.0, number=number, devices=("G0", "G1"))
        self.store.start_attempt(attempt)
        return attempt

    def finish(self, job_id: int, at: float, state: JobState = JobState.SUCCEEDED) -> None:
        self.store.change_state(job_id, state, ended_at=at)

    def statements(self, act: Callable[[], object]) -> list[str]:
        """Return the SQL statements of `act`, with their values."""
        seen: list[str] = []
        self.db.connection.set_trace_callback(seen.append)
        act()
        self.db.connection.set_trace_callback(None)
        return seen

    def plan_of(self, act: Callable[[], object]) -> list[str]:
        """Return the query plans of all statements of `act`."""
        return [
            row[3]
            for statement in self.statements(act)
            for row in self.db.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
        ]

    def effort_of(self, act: Callable[[], object]) -> int:
        """Return the number of SQLite's virtual machine instructions that `act` takes."""
        steps = [0]

        def count() -> int:
            steps[0] += 1
            return 0

        self.db.connection.set_progress_handler(count, 1)
        act()
        self.db.connection.set_progress_handler(None, 0)
        return steps[0]


def full_scans(plan: Sequence[str]) -> list[str]:
    tables = r"SCAN (jobs|attempts|events|dependencies|specs|lanes|submissions)"
    return [step for step in plan if re.fullmatch(tables, step) or "TEMP B-TREE" in step]
