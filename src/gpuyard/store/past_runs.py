"""Read finished attempts by the time in which they ran, with the times at which they were suspended."""

import sqlite3
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.core.job.job import Outcome, OutcomeKind

_FINISHED = """
SELECT attempts.job, number, attempts.started_at, attempts.ended_at, devices, attempts.outcome, reserved_mb,
    suspended_s > 0 OR suspended_at IS NOT NULL, engine, jobs.name, user,
    coalesce(jobs.command, specs.command)
FROM attempts INDEXED BY attempts_ended CROSS JOIN jobs ON jobs.id = attempts.job CROSS JOIN specs ON specs.id = spec
WHERE attempts.ended_at IS NOT NULL AND attempts.ended_at > ? AND attempts.started_at < ?
ORDER BY attempts.ended_at DESC LIMIT ?
"""
_COUNT = "SELECT count(*) FROM attempts WHERE ended_at IS NOT NULL AND ended_at > ? AND started_at < ?"
_MOVES = "SELECT at, kind FROM events WHERE job = ? AND kind IN ('suspending', 'resumed') ORDER BY id"


class PastRun(Struct, frozen=True, kw_only=True):
    """A finished attempt. `moves` are the times at which its job was suspended and resumed."""

    job: int
    attempt: int
    begins: float
    ends: float
    devices: tuple[str, ...]
    outcome: OutcomeKind
    reserved_mb: float | None
    engine: str
    name: str | None
    user: str
    command: str
    moves: tuple[tuple[float, str], ...]


def runs_between(connection: sqlite3.Connection, since: float, until: float, limit: int) -> tuple[list[PastRun], int]:
    """Return the finished attempts that ran in this time, the last ended first, and how many the limit left out.

    An attempt that never started has no start time, so no comparison finds it.
    """
    rows = connection.execute(_FINISHED, (since, until, limit)).fetchall()
    left_out = 0
    if len(rows) == limit:
        left_out = max(0, connection.execute(_COUNT, (since, until)).fetchone()[0] - limit)
    return [_run(row, _moves(connection, row[0]) if row[7] else ()) for row in rows], left_out


def _moves(connection: sqlite3.Connection, job_id: int) -> tuple[tuple[float, str], ...]:
    return tuple((at, kind) for at, kind in connection.execute(_MOVES, (job_id,)))


def _run(row: tuple[Any, ...], moves: tuple[tuple[float, str], ...]) -> PastRun:
    job, number, begins, ends, devices, outcome, reserved_mb, _, engine, name, user, command = row
    return PastRun(
        job=job,
        attempt=number,
        begins=begins,
        ends=ends,
        devices=tuple(devices.split()) if devices else (),
        outcome=msgspec.json.decode(outcome, type=Outcome).kind,
        reserved_mb=reserved_mb,
        engine=engine,
        name=name,
        user=user,
        command=command,
        moves=moves,
    )
