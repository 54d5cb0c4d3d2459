"""Attempts as a report reads them: row by row, and of each no more than it needs.

What an attempt used is a long text, of which only the peaks are decoded; what jobs of one lane or one tag have in
common is looked up once.
"""

import sqlite3
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from gpuyard.core.job.job import Outcome
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.report.timeline_rows import suspensions
from gpuyard.core.report.usage_report import PastAttempt

UNKNOWN = "-"


class GroupBy(StrEnum):
    """What jobs are grouped by: a task's workspace, or any other job's tag; the name, which an array has in common."""

    USER = "user"
    WORKSPACE = "workspace"
    NAME = "name"


_COLUMNS = {GroupBy.USER: "jobs.user", GroupBy.WORKSPACE: "jobs.tag", GroupBy.NAME: "jobs.name"}
# They are found by the time of their end, and read in the order in which they are stored: rows are long, and many.
# (SQLite would leave out an order that nothing depends on; a limit does.)
_ATTEMPTS = """
WITH wanted (job, number) AS MATERIALIZED (
    SELECT job, number FROM attempts INDEXED BY attempts_ended WHERE ended_at > ?
    UNION ALL SELECT job, number FROM attempts INDEXED BY one_live_attempt WHERE ended_at IS NULL
    ORDER BY job, number LIMIT -1
)
SELECT attempts.job, attempts.number, attempts.started_at, attempts.ended_at, attempts.outcome, devices, reserved_mb,
    usage, shortage, suspended_at, suspended_s, engine, place, jobs.state, jobs.submitted_at, jobs.queued_at, jobs.lane,
    jobs.spec, {group}
FROM wanted
CROSS JOIN attempts ON attempts.job = wanted.job AND attempts.number = wanted.number
CROSS JOIN jobs ON jobs.id = wanted.job
"""
_PEAKS_FIRST = '{"peaks_mb":{'


class _Need(Struct, frozen=True):
    devices: int = 1
    is_exclusive: bool = True


class _LaneNeed(Struct, frozen=True):
    need: _Need
    sizes_each: bool = False


class _Usage(Struct, frozen=True):
    peaks_mb: dict[str, float] = {}


class _Shortage(Struct, frozen=True):
    where: str


class _Lack(Struct, frozen=True):
    shortage: _Shortage


_decode_usage = msgspec.json.Decoder(_Usage).decode
_read_outcome = lru_cache(maxsize=1024)(msgspec.json.Decoder(Outcome).decode)
_read_devices = lru_cache(maxsize=1024)(lambda text: tuple(text.split()))
_read_lack = msgspec.json.Decoder(_Lack).decode
_read_lane = msgspec.json.Decoder(_LaneNeed).decode


def _read_peaks(text: str) -> dict[str, float]:
    """They stand at its beginning, before a curve that is a hundred times as long."""
    if text.startswith(_PEAKS_FIRST):
        try:
            return _decode_usage(f"{text[: text.index('}')]}}}}}").peaks_mb
        except msgspec.DecodeError:  # a brace in a device's name
            return _decode_usage(text).peaks_mb
    return _decode_usage(text).peaks_mb


def attempts_since(connection: sqlite3.Connection, since: float, by: GroupBy) -> Iterator[PastAttempt]:
    """All that ended after that, and all that live, in the order of their jobs."""
    reading = _AttemptReader(connection, by)
    for row in connection.execute(_ATTEMPTS.format(group=_COLUMNS[by]), (since,)):
        yield reading.ran(*row)


class _AttemptReader:
    def __init__(self, connection: sqlite3.Connection, by: GroupBy) -> None:
        self._execute = connection.execute
        self._lane = lru_cache(maxsize=None)(self._find_lane)
        self._tasks: dict[str, str] = {}
        self._by = by

    def ran(  # noqa: PLR0913, PLR0917 - the columns
        self, job: int, number: int, started_at: float, ended_at: float | None, outcome: str | None,
        devices: str | None, reserved_mb: float | None, usage: str | None, shortage: str | None,
        suspended_at: float | None, suspended_s: float, engine: str, place: str | None, state: str,
        submitted_at: float, queued_at: float | None, lane_id: int, spec: int, group: str | None,
    ) -> PastAttempt:  # fmt: skip
        lane = self._lane(lane_id)
        held = _read_devices(devices) if devices else ()
        ended = None if outcome is None else _read_outcome(outcome)
        is_first = number == 1
        return PastAttempt(
            job=job,
            group=self._group(group, spec),
            started_at=started_at,
            ended_at=ended_at,
            queued_at=self._waited_since(job, started_at, submitted_at, queued_at) if is_first else None,
            has_started=not engine or place is not None,
            devices=held,
            gpus=lane.need.devices if engine else len(held),
            reserved_mb=reserved_mb,
            is_alone=reserved_mb is None or (lane.need.is_exclusive and not lane.sizes_each),
            peaks_mb=_read_peaks(usage) if usage else {},
            outcome=None if ended is None else ended.kind,
            status=None if ended is None else ended.status,
            lacked=_read_lack(shortage).shortage.where if shortage else None,
            is_healed=state == JobState.SUCCEEDED,
            suspended=self._suspended(job, started_at, ended_at) if suspended_s or suspended_at is not None else (),
        )

    def _group(self, value: str | None, spec: int) -> str:
        if not value:
            return UNKNOWN
        return self._task(value, spec) if self._by is GroupBy.WORKSPACE else value

    def _task(self, tag: str, spec: int) -> str:
        """The workspace whose tag it is: no two have the same."""
        if tag not in self._tasks:
            self._tasks[tag] = self._find_workspace(spec) or tag
        return self._tasks[tag]

    def _find_workspace(self, spec: int) -> str | None:
        query = "SELECT json_extract(body, '$.task.workspace') FROM specs WHERE id = ?"
        row: tuple[Any] | None = self._execute(query, (spec,)).fetchone()
        return None if row is None else row[0]

    def _find_lane(self, lane_id: int) -> _LaneNeed:
        return _read_lane(self._execute("SELECT body FROM lanes WHERE id = ?", (lane_id,)).fetchone()[0])

    def _waited_since(self, job: int, started_at: float, submitted_at: float, queued_at: float | None) -> float:
        """`queued_at` is of its last waiting: of one that was queued again, the story tells of its first."""
        if queued_at is None or queued_at <= started_at:
            return submitted_at if queued_at is None else queued_at
        query = "SELECT max(at) FROM events WHERE job = ? AND kind = ? AND at <= ?"
        told: float | None = self._execute(query, (job, JobState.QUEUED, started_at)).fetchone()[0]
        return submitted_at if told is None else told

    def _suspended(self, job: int, since: float, until: float | None) -> tuple[tuple[float, float | None], ...]:
        query = "SELECT at, kind FROM events WHERE job = ? AND kind IN ('suspending', 'resumed') ORDER BY id"
        return tuple(suspensions(self._execute(query, (job,)).fetchall(), since, until))
