"""Find rows of the queue's database that cannot be read, and set them aside: all other jobs go on.

Readers of rows do not check them. Where one fails, the daemon calls `set_aside`, which reads every row as its readers
do, and mends or deletes those that cannot be read, in one transaction.
- The row as it was is kept in a file that only this user can read, and is shown nowhere: it may hold an environment.
- A job keeps its id and what can be read of it. If it waits, it is held, with the reason; so is a job whose live
  attempt is lost. Rows of all other tables but `specs` are deleted, and counts and lanes made anew.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault, GpuyardError, UnreadableRow
from gpuyard.model.job import Growth, MemoryLack, Outcome, OutcomeKind, SiteRequest, SuspendedBy, Usage
from gpuyard.model.job_spec import UNREADABLE, JobSpec
from gpuyard.model.lease import Need
from gpuyard.model.lifecycle import FINISHED, LIVE, WAITING, JobState
from gpuyard.model.units import format_count
from gpuyard.policy.estimates import Profile
from gpuyard.store import row_codec
from gpuyard.store.database import Database, convert_sqlite_errors
from gpuyard.store.job_store import JobStore
from gpuyard.system.private_files import open_own

KEPT_ROWS = "queue.db.damaged-rows"
_TYPES: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}
_STATES = frozenset(map(str, JobState))
# What takes the place of a column of `jobs` or `specs` that cannot be read; NULL for all others.
_DEFAULTS: dict[str, Any] = {
    "details": json.dumps({"command": UNREADABLE}), "user": "", "tag": "", "failures": 0, "priority": 0, "command": "",
}  # fmt: skip
_LIVE_ATTEMPT = "its live attempt"


class _BadText(bytes):
    """A text that is not UTF-8."""


class _Row(NamedTuple):
    """A row with columns that cannot be read. `key` is its primary key."""

    table: str
    key: dict[str, Any]
    values: dict[str, Any]
    bad: frozenset[str]

    @property
    def text(self) -> str:
        number = next((each for each in self.key.values() if isinstance(each, int)), "")
        return f"{self.table} {number}".rstrip() + f" ({', '.join(sorted(self.bad))})"


def may_be_a_row(error: Exception) -> bool:
    """Whether the error may come from a row that cannot be read, and not from gpuyard or the system."""
    return isinstance(error, UnreadableRow) or not isinstance(error, GpuyardError | OSError | MemoryError)


def set_aside_in(database: Path) -> list[str]:
    """Set rows aside in a database that no daemon has open."""
    with convert_sqlite_errors(), contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        notes = set_aside(connection, str(database.with_name(KEPT_ROWS)))
        connection.execute("COMMIT")
    return notes


def set_aside(connection: sqlite3.Connection, kept: str) -> list[str]:
    """Mend or delete all rows that cannot be read, after writing them to the file `kept`. Return what was done, for
    people; nothing if all rows can be read. Call it in a transaction."""
    connection.text_factory = _text
    connection.execute("PRAGMA defer_foreign_keys = ON")
    try:
        mending = _Mending(connection)
        tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name <> 'jobs'").fetchall()
        found = mending.mend([row for (name,) in tables for row in _find_in(connection, name)], kept)
        has_counted = _count_anew(connection)
        # Whether a job fits depends on its attempts and its spec.
        found += mending.mend(list(_find_in(connection, "jobs")), kept)
        if found:
            mending.finish()
            _count_anew(connection)
    finally:
        connection.text_factory = str
    if not found:
        return ["the numbers of jobs per state were wrong, and were counted anew"] if has_counted else []
    names = [row.text for row in found[:5]] + ["…"] * (len(found) > 5)
    rows = f"{format_count(len(found), 'row')} of the queue's database"
    return [f"{rows} could not be read, and set aside in {kept}: {'; '.join(names)}", *mending.notes]


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _BadText(value)


def _find_in(connection: sqlite3.Connection, table: str) -> Iterator[_Row]:
    # A generated column is hidden.
    columns = [each[1:] for each in connection.execute(f"PRAGMA table_xinfo({table})").fetchall() if each[6] == 0]
    optional = type(None)
    wanted = {name: _TYPES[kind] + (() if needed or key else (optional,)) for name, kind, needed, _, key, _ in columns}
    keys = [name for name, *_, key, _ in columns if key]
    specs, lanes, live = (
        {number for (number,) in connection.execute(f"SELECT {query}")}
        for query in ("id FROM specs", "id FROM lanes", "job FROM attempts WHERE ended_at IS NULL")
    )
    for row in connection.execute(f"SELECT {', '.join(wanted)} FROM {table}").fetchall():  # noqa: S608 - of the schema
        values = dict(zip(wanted, row, strict=True))
        bad = {name for name, value in values.items() if not isinstance(value, wanted[name])}
        bad |= {name for name, value in values.items() if not (name in bad or _can_read(table, name, value, values))}
        if not bad:
            bad = {name for name, fits in _FITS.get(table, {}).items() if not fits(values)}
        if table == "jobs":
            bad |= {name for name, known in (("spec", specs), ("lane", lanes)) if values[name] not in known}
            bad |= {"state"} if (values["state"] in LIVE) != (values["id"] in live) else set()
        if bad:
            yield _Row(table, {name: values[name] for name in keys}, values, frozenset(bad))


def _can_read(table: str, column: str, value: Any, row: Mapping[str, Any]) -> bool:
    name = f"{row['name']!s}.value" if (table, column) == ("settings", "value") else f"{table}.{column}"
    read = _READERS.get(name)
    try:
        if read is not None and value is not None:
            read(value)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return False
    return True


def _json(kind: Any) -> Callable[[Any], object]:
    return lambda text: msgspec.convert(json.loads(text), kind)


class _Details(msgspec.Struct):
    command: tuple[str, ...] | None = None
    values: dict[str, str] | None = None


# How columns are read that are more than a number or a text; of settings, their values.
_READERS: dict[str, Callable[[Any], object]] = {
    "next_id.value": int, "generation.value": int, "stopped_tags.value": _json(list[str]),
    "asleep.value": _json(tuple[str | None, float]), "specs.body": row_codec.spec_from_text,
    "secrets.body": _json(dict[str, str]), "lanes.body": lambda text: row_codec.lane_from_text(0, text),
    "profiles.body": _json(Profile), "batches.body": _json(dict[str, Any]),
    "dependencies.kind": ("ok", "any", "failed").index, "jobs.state": JobState, "counts.state": JobState,
    "jobs.details": _json(_Details), "jobs.outcome": _json(Outcome),
    "jobs.growth": _json(Growth), "attempts.outcome": _json(Outcome), "attempts.lack": _json(MemoryLack),
    "attempts.request": _json(SiteRequest), "attempts.usage": _json(Usage), "attempts.stopping": OutcomeKind,
    "attempts.parked": SuspendedBy, "attempts.cpus": lambda text: list(map(int, text.split())),
}  # fmt: skip
# What holds between columns that can be read.
_FITS: dict[str, dict[str, Callable[[Mapping[str, Any]], bool]]] = {
    "dependencies": {"on_job": lambda row: bool(row["on_job"] < row["job"])},
    "jobs": {
        "due_at": lambda row: (row["state"] == JobState.DELAYED) == (row["due_at"] is not None),
        "ended_at": lambda row: (row["state"] in FINISHED) == (row["ended_at"] is not None),
    },
    "attempts": {
        "handed_over_at": lambda row: (row["handed_over_at"] is None) == (row["started_at"] is not None),
        "outcome": lambda row: (row["outcome"] is None) == (row["ended_at"] is None),
    },
}


def _keep(found: Sequence[_Row], path: str) -> None:
    try:
        with open(open_own(path), "a", encoding="utf-8") as file:
            for row in found:
                names = row.key if row.table == "secrets" else row.values  # secrets are kept in no other place
                values = {name: row.values.get(name) for name in names}
                shown = {"at": time.time(), "table": row.table, "bad": sorted(row.bad), "row": values}
                file.write(json.dumps(shown, default=lambda text: text.decode(errors="backslashreplace")) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error


class _Mending:
    """`notes` says for people what was done."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.notes: list[str] = []
        self._execute = connection.execute
        self._store = JobStore(Database(connection))
        self._lost: dict[int, set[str]] = {}  # what was lost of each job
        newest = "SELECT max(at) FROM events WHERE typeof(at) IN ('real', 'integer')"
        self._now = float(self._execute(newest).fetchone()[0] or 0.0)  # in queue time; no clock is needed

    def mend(self, found: list[_Row], kept: str) -> list[_Row]:
        """Write the rows to the file `kept`, mend or delete them, and return them."""
        if found:
            _keep(found, kept)
        mends = {"jobs": self._mend_job, "specs": self._mend_spec}
        for row in found:
            mends.get(row.table, self._delete)(row)
        return found

    def finish(self) -> None:
        """Make anew what follows from other rows, and hold the jobs of which anything was lost."""
        last = "SELECT max(last_id) FROM submissions"
        query = f"SELECT 1 + max(coalesce(max(id), 0), coalesce(({last}), 0)) FROM jobs"  # noqa: S608
        next_id = str(self._execute(query).fetchone()[0])
        self._execute("INSERT OR IGNORE INTO settings VALUES ('next_id', ?)", (next_id,))
        known = "SELECT first_id FROM submissions"
        self._execute(f"UPDATE jobs SET group_id = NULL, group_limit = NULL WHERE group_id NOT IN ({known})")  # noqa: S608
        query = "SELECT id FROM jobs WHERE lane NOT IN (SELECT id FROM lanes)"
        for job in filter(None, [self._store.job(job_id) for (job_id,) in self._execute(query).fetchall()]):
            lane = row_codec.lane_of(job)
            lane_id = self._store.ensure_lane(replace(lane, sizes_each=lane.sizes_each or bool(job.growth.count)))
            self._execute("UPDATE jobs SET lane = ? WHERE id = ?", (lane_id, job.id))
        for job_id, names in sorted(self._lost.items()):
            self._note_loss(job_id, names)

    def _delete(self, row: _Row) -> None:
        marks = (f"{name} IS {'CAST(? AS TEXT)' if isinstance(v, _BadText) else '?'}" for name, v in row.key.items())
        self._execute(f"DELETE FROM {row.table} WHERE {' AND '.join(marks)}", (*row.key.values(),))  # noqa: S608
        if row.key == {"name": "stopped_tags"}:
            self._execute("INSERT OR REPLACE INTO settings VALUES ('paused', '1')")
            text = "which workspaces were stopped could not be read: stop them again, then `gpuyard unpause`"
            self.notes.append(text)
        elif row.table == "secrets":
            self._execute("INSERT OR IGNORE INTO dropped_secrets VALUES (?)", (row.key["spec"],))
            self._lose("spec", row.key["spec"], "secret variables")
        elif row.table == "spec_code":
            self._lose("spec", row.key["spec"], "code")
        elif row.table == "dependencies":
            self._lose("id", row.values["job"], "dependencies")

    def _mend_spec(self, row: _Row) -> None:
        if "body" in row.bad:
            body = row_codec.spec_to_text(self._unreadable(row.key["id"]))
            self._execute("UPDATE specs SET body = ? WHERE id = ?", (body, row.key["id"]))
            self._lose("spec", row.key["id"], "command")
        if "command" in row.bad:
            self._execute("UPDATE specs SET command = '' WHERE id = ?", (row.key["id"],))

    def _unreadable(self, spec: int) -> JobSpec:
        """Return a spec in place of one that cannot be read, with the name and the tag of its jobs."""
        names = self._execute("SELECT name, tag FROM jobs WHERE spec = ? LIMIT 1", (spec,)).fetchone() or (None, "")
        name, tag = (each if isinstance(each, str) else None for each in names)
        return JobSpec(command=UNREADABLE, cwd="/", environment={}, need=Need(), name=name, tag=tag or "")

    def _mend_job(self, row: _Row) -> None:
        """Replace what cannot be read, and what does not fit the rest."""
        job_id, job = row.key["id"], {**row.values, **{name: _DEFAULTS.get(name) for name in row.bad}}
        attempts = "FROM attempts WHERE job = ?"
        live = self._execute(f"SELECT started_at IS NULL {attempts} AND ended_at IS NULL", (job_id,)).fetchone()
        state = row.values["state"]
        if state not in _STATES or (state in LIVE) != (live is not None):
            state = JobState.HELD if job["ended_at"] is None else JobState.FAILED
            if live is not None:
                state = JobState.PENDING if live[0] else JobState.RUNNING
        new = {name: job[name] for name in row.bad - {"lane"}} | {
            "state": state,
            "due_at": (job["due_at"] or self._now) if state == JobState.DELAYED else None,
            "ended_at": (job["ended_at"] or self._now) if state in FINISHED else None,
        }
        if "spec" in row.bad:
            new["spec"] = self._store.add_spec(self._unreadable(row.values["spec"]))
        if "submitted_at" in row.bad:
            new["submitted_at"] = self._now
        if "attempts" in row.bad:
            new["attempts"] = self._execute(f"SELECT max(number) {attempts}", (job_id,)).fetchone()[0] or 0
        columns = ", ".join(f"{name} = ?" for name in new)
        self._execute(f"UPDATE jobs SET {columns} WHERE id = ?", (*new.values(), job_id))  # noqa: S608
        is_left = row.values["state"] in LIVE and state is JobState.HELD
        # The loss of the others changes nothing of what a job does.
        self._lose("id", job_id, *([_LIVE_ATTEMPT] if is_left else row.bad - {"reason", "command", "name", "lane"}))

    def _lose(self, column: str, number: Any, *names: str) -> None:
        """Note what was lost of the jobs with this value, if they have not ended."""
        query = f"SELECT id FROM jobs WHERE {column} = ? AND ended_at IS NULL"  # noqa: S608
        for (job_id,) in self._execute(query, (number,)).fetchall() if names else ():
            self._lost.setdefault(job_id, set()).update(names)

    def _note_loss(self, job_id: int, names: set[str]) -> None:
        """Hold the job if it waits, and note the loss in its history."""
        row = self._execute("SELECT state FROM jobs WHERE id = ? AND ended_at IS NULL", (job_id,)).fetchone()
        if row is None:
            return
        lost = f"its record in queue.db could not be read ({', '.join(sorted(names))})"
        if row[0] in WAITING:
            again = f"`gpuyard release {job_id}` runs it"
            what_to_do = f"`gpuyard cancel {job_id}` and submit it again, or {again} as it is"
            if _LIVE_ATTEMPT in names:
                what_to_do = f"its program may still run; once it has ended, {again} again"
            query = "UPDATE jobs SET state = 'held', due_at = NULL, reason = ? WHERE id = ?"
            self._execute(query, (f"{lost}: {what_to_do}", job_id))
            self.notes.append(f"job {job_id} is held: {lost}")
        self._store.add_event(job_id, self._now, "held" if row[0] in WAITING else "damaged", lost)


def _count_anew(connection: sqlite3.Connection) -> bool:
    """Count the jobs of each state and of each group anew; return whether the numbers were wrong."""
    execute, before = connection.execute, connection.total_changes
    connection.executemany("INSERT OR IGNORE INTO counts VALUES (?, 0)", [(state,) for state in _STATES])
    counted = "SELECT each.state AS name, count(id) AS n FROM counts AS each LEFT JOIN jobs USING (state) GROUP BY 1"
    execute(f"UPDATE counts SET jobs = n FROM ({counted}) WHERE state = name AND jobs <> n")  # noqa: S608
    groups = "FROM jobs WHERE group_id IS NOT NULL GROUP BY group_id, state"
    true = execute(f"SELECT group_id, state, count(*) {groups}").fetchall()
    if set(true) != set(execute("SELECT group_id, state, jobs FROM group_counts WHERE jobs > 0").fetchall()):
        execute("DELETE FROM group_counts")
        execute(f"INSERT INTO group_counts SELECT group_id, state, count(*), max(ended_at) {groups}")
    return connection.total_changes != before
