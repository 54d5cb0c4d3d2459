"""Read past attempts and jobs for the timeline, reports and summaries.

A report may read very many rows: only the columns that it needs, and what attempts have in common only once.
"""

import sqlite3
from collections.abc import Iterator
from functools import lru_cache

import msgspec
from msgspec import Struct

from gpuyard.model.energy import EnergyUse
from gpuyard.model.job import Outcome, OutcomeKind
from gpuyard.model.lease import Need, WholeDevice
from gpuyard.model.lifecycle import JobState
from gpuyard.report.chart_rows import suspensions
from gpuyard.report.usage_report import GroupBy, PastAttempt


def finished_since(connection: sqlite3.Connection, since: float) -> tuple[dict[JobState, int], list[tuple[int, str]]]:
    """Return how many jobs ended in each state, and those that failed, each with its cause: its error, else how its
    attempt ended, else what became of the job."""
    ended = "FROM jobs INDEXED BY jobs_finished WHERE ended_at IS NOT NULL AND ended_at > ?"
    counts = connection.execute(f"SELECT state, count(*) {ended} GROUP BY state", (since,)).fetchall()
    causes = ("json_extract(outcome, '$.error_line')", "json_extract(outcome, '$.reason')", "reason")
    cause = ", ".join(f"nullif({each}, '')" for each in causes)
    query = f"SELECT id, coalesce({cause}, 'failed') {ended} AND state = ? ORDER BY id"
    failed = connection.execute(query, (since, JobState.FAILED)).fetchall()
    return {JobState(state): count for state, count in counts}, failed


UNKNOWN = "-"
_MOVES = "SELECT at, kind FROM events WHERE job = ? AND kind IN ('suspending', 'resumed') ORDER BY id"

# The timeline: the columns are in the order of the fields of PastRun.
_ENDED_BETWEEN = "attempts.ended_at IS NOT NULL AND attempts.ended_at > ? AND attempts.started_at < ?"
_RUNS = f"""
SELECT attempts.job, number, attempts.started_at, attempts.ended_at, devices, json_extract(attempts.outcome, '$.kind'),
    reserved_mb, engine, jobs.name, user, coalesce(jobs.command, specs.command),
    suspended_s > 0 OR suspended_at IS NOT NULL
FROM attempts INDEXED BY attempts_ended CROSS JOIN jobs ON jobs.id = attempts.job CROSS JOIN specs ON specs.id = spec
WHERE {_ENDED_BETWEEN} ORDER BY attempts.ended_at DESC LIMIT ?
"""  # noqa: S608 - our own condition


class PastRun(Struct, frozen=True, kw_only=True):
    """An attempt. `moves` are the times at which its job was suspended and resumed; `state` is the job's while the
    attempt runs."""

    job: int
    attempt: int
    begins: float
    ends: float | None
    devices: tuple[str, ...]
    outcome: OutcomeKind | None
    reserved_mb: float | None
    engine: str
    name: str | None
    user: str
    command: str
    moves: tuple[tuple[float, str], ...]
    state: str = "ended"


def runs_between(connection: sqlite3.Connection, since: float, until: float, limit: int) -> tuple[list[PastRun], int]:
    """Return the finished attempts that ran in this time, the last ended first, and how many the limit left out. An
    attempt that never started has no start time, so no comparison finds it."""
    rows = connection.execute(_RUNS, (since, until, limit)).fetchall()
    left_out = 0
    if len(rows) == limit:
        query = f"SELECT count(*) FROM attempts WHERE {_ENDED_BETWEEN}"  # noqa: S608
        left_out = max(0, connection.execute(query, (since, until)).fetchone()[0] - limit)
    runs = []
    for *values, was_suspended in rows:
        fields = dict(zip(PastRun.__struct_fields__, values, strict=False))
        moves = connection.execute(_MOVES, (fields["job"],)).fetchall() if was_suspended else ()
        fields |= {"devices": (fields["devices"] or "").split(), "moves": moves}
        runs.append(msgspec.convert(fields, PastRun))
    return runs, left_out


# Attempts are found by the time of their end and read in storage order, as rows are long and many. (The LIMIT keeps
# SQLite from ignoring the ORDER BY of the subquery.)
_ATTEMPTS = """
WITH wanted (job, number) AS MATERIALIZED (
    SELECT job, number FROM attempts INDEXED BY attempts_ended WHERE ended_at > ?
    UNION ALL SELECT job, number FROM attempts INDEXED BY one_live_attempt WHERE ended_at IS NULL
    ORDER BY job, number LIMIT -1
)
SELECT attempts.job, attempts.number, attempts.started_at, attempts.ended_at, attempts.outcome, devices, reserved_mb,
    peaks_mb, json_extract(lack, '$.shortage.where'), suspended_at, suspended_s, engine, jobs.state, jobs.submitted_at,
    jobs.queued_at, jobs.lane, jobs.spec, energy,
    CASE ? WHEN 'user' THEN jobs.user WHEN 'workspace' THEN jobs.tag ELSE jobs.name END
FROM wanted
CROSS JOIN attempts ON attempts.job = wanted.job AND attempts.number = wanted.number
CROSS JOIN jobs ON jobs.id = wanted.job
"""


class _LaneNeed(Struct, frozen=True):
    need: Need


_read_peaks = msgspec.json.Decoder(dict[str, float]).decode
_read_energy = msgspec.json.Decoder(EnergyUse).decode
_read_outcome = lru_cache(maxsize=1024)(msgspec.json.Decoder(Outcome).decode)
_read_devices = lru_cache(maxsize=1024)(lambda text: tuple(text.split()))
_read_lane = msgspec.json.Decoder(_LaneNeed).decode


def attempts_since(connection: sqlite3.Connection, since: float, by: GroupBy) -> Iterator[PastAttempt]:
    """Yield all attempts that ended after `since` and all live attempts, by job."""
    reader = _AttemptReader(connection, by)
    for row in connection.execute(_ATTEMPTS, (since, by)):
        yield reader.attempt(*row)


class _AttemptReader:
    def __init__(self, connection: sqlite3.Connection, by: GroupBy) -> None:
        self._execute = connection.execute
        query = "SELECT body FROM lanes WHERE id = ?"
        find = connection.execute
        self._lane = lru_cache(maxsize=None)(lambda lane_id: _read_lane(find(query, (lane_id,)).fetchone()[0]))
        self._workspaces: dict[str, str] = {}
        self._by = by

    def attempt(  # noqa: PLR0913, PLR0917 - the columns
        self, job: int, number: int, started_at: float | None, ended_at: float | None, outcome: str | None,
        devices: str | None, reserved_mb: float | None, peaks: str | None, lacked: str | None,
        suspended_at: float | None, suspended_s: float, engine: str, state: str,
        submitted_at: float, queued_at: float | None, lane_id: int, spec: int, energy: str | None, group: str | None,
    ) -> PastAttempt:  # fmt: skip
        lane = self._lane(lane_id)
        held = _read_devices(devices) if devices else ()
        ended = None if outcome is None else _read_outcome(outcome)
        was_suspended = started_at is not None and (suspended_s or suspended_at is not None)
        moves = self._execute(_MOVES, (job,)).fetchall() if was_suspended else []
        return PastAttempt(
            job=job,
            group=UNKNOWN if not group else self._workspace(group, spec) if self._by is GroupBy.WORKSPACE else group,
            started_at=started_at,
            ended_at=ended_at,
            queued_at=None
            if number > 1 or started_at is None
            else self._waited_since(job, started_at, submitted_at, queued_at),
            devices=held,
            gpus=lane.need.devices if engine else len(held),
            reserved_mb=reserved_mb,
            is_alone=reserved_mb is None or isinstance(lane.need.memory, WholeDevice),
            peaks_mb=_read_peaks(peaks) if peaks else {},
            outcome=None if ended is None else ended.kind,
            status=None if ended is None else ended.status,
            lacked=lacked,
            is_healed=state == JobState.SUCCEEDED,
            suspended=tuple(suspensions(moves, started_at or 0.0, ended_at)),
            energy=_read_energy(energy) if energy else None,
            error_line=None if ended is None else ended.error_line,
        )

    def _workspace(self, tag: str, spec: int) -> str:
        """Return the workspace of the jobs with this tag, or the tag. Each workspace has a tag of its own."""
        if tag not in self._workspaces:
            query = "SELECT json_extract(body, '$.task.workspace') FROM specs WHERE id = ?"
            self._workspaces[tag] = self._execute(query, (spec,)).fetchone()[0] or tag
        return self._workspaces[tag]

    def _waited_since(self, job: int, started_at: float, submitted_at: float, queued_at: float | None) -> float:
        """Return when the job was queued before this start. `queued_at` is the last time it was queued: if that was
        later, the job's history has the time."""
        if queued_at is None or queued_at <= started_at:
            return submitted_at if queued_at is None else queued_at
        query = "SELECT max(at) FROM events WHERE job = ? AND kind = ? AND at <= ?"
        at: float | None = self._execute(query, (job, JobState.QUEUED, started_at)).fetchone()[0]
        return submitted_at if at is None else at
