"""What the queue recorded, read from its database after the run, and what the clients were told."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct


class AttemptRecord(Struct, frozen=True, kw_only=True):
    job: int
    number: int
    keeper_pid: int
    kind: str | None
    status: int | None
    reason: str
    reserved_mb: float | None = None
    pid: int | None = None

    @property
    def name(self) -> str:
        return f"{self.job}.{self.number}"


class JobRecord(Struct, frozen=True, kw_only=True):
    id: int
    name: str
    state: str
    reason: str = ""


class Records(Struct, frozen=True, kw_only=True):
    jobs: dict[int, JobRecord]
    attempts: dict[tuple[int, int], AttemptRecord]
    problems: list[str] = []  # of the database itself


class Submission(Struct, kw_only=True):
    """A submission, and its answer: the ids if it was accepted, none if it was refused; `unknown` if a fault came in
    between, so that it may count or not."""

    name: str
    count: int = 1
    plan: str = "ok"
    limit_s: float | None = None
    is_capped: bool = False
    is_valid: bool = True
    answer: Literal["accepted", "refused", "unknown"] = "unknown"
    ids: tuple[int, ...] = ()
    text: str = ""


class Happened(Struct, kw_only=True):
    """What the torture run did itself, so that its consequences are not taken for violations."""

    killed_keepers: set[int] = set()
    killed_jobs: set[int] = set()  # pids
    removed_logs: set[str] = set()  # file names
    cancelled: set[int] = set()  # jobs
    removed_leases: list[float] = []  # when leases of the queue were removed
    suspended: list[float] = []  # when the machine seemed to be suspended
    recoveries: list[tuple[str, float]] = []  # seconds from the end of a fault to the next start of a job
    observed: list[str] = []  # violations seen during the run


def read_records(database: Path) -> Records:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        query = connection.execute
        jobs = {
            row[0]: JobRecord(id=row[0], name=row[1] or "", state=row[2], reason=row[3] or "")
            for row in query("SELECT id, name, state, reason FROM jobs")
        }
        attempts = {
            (row[0], row[1]): _attempt(row)
            for row in query("SELECT job, number, keeper_pid, outcome, reserved_mb, pid FROM attempts")
        }
        problems = [f"integrity_check: {text}" for (text,) in query("PRAGMA integrity_check") if text != "ok"]
        problems += [f"foreign_key_check: {row}" for row in query("PRAGMA foreign_key_check")]
        counted = dict(query("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
        kept = {state: jobs for state, jobs in query("SELECT state, jobs FROM counts") if jobs}
        if kept != counted:
            problems.append(f"the counts {kept} are not those of the jobs {counted}")
    return Records(jobs=jobs, attempts=attempts, problems=problems)


def _attempt(row: tuple[Any, ...]) -> AttemptRecord:
    job, number, keeper_pid, outcome, reserved_mb, pid = row
    fields = json.loads(outcome) if outcome else {}
    return AttemptRecord(
        job=job,
        number=number,
        keeper_pid=keeper_pid,
        kind=fields.get("kind"),
        status=fields.get("status"),
        reason=fields.get("reason") or "",
        reserved_mb=reserved_mb,
        pid=pid,
    )
