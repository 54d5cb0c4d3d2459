"""Find rows of the queue's database that cannot be read, and set them aside: all other jobs go on.

Readers of rows do not check them. Where one fails, the daemon calls `set_aside`, which reads every row of every table
as its readers do. In one transaction it replaces what cannot be read of a job, an attempt, a spec or a submission, and
deletes such a row of any other table.

Rules:
- The row as it was is kept in a file that only this user can read, and is shown nowhere: it may hold an environment.
- A waiting job of which anything was lost is held, with the reason. A live job goes on, and its end is recorded.
- What the queue counts or derives (counts, lanes) is made anew.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuyard.core.job.job import (
    UNREADABLE,
    Growth,
    JobSpec,
    MemoryLack,
    Outcome,
    OutcomeKind,
    SiteRequest,
    SuspendedBy,
    Usage,
)
from gpuyard.core.job.lifecycle import FINISHED, LIVE, WAITING, JobState
from gpuyard.core.lease import Need
from gpuyard.core.memory.estimates import Profile
from gpuyard.core.units import format_count
from gpuyard.errors import EnvironmentFault, GpuyardError, StoreFault, UnreadableRow
from gpuyard.store import row_codec
from gpuyard.store.database import Database, convert_sqlite_errors
from gpuyard.store.job_store import JobStore
from gpuyard.system.private_files import open_own

KEPT_ROWS = "queue.db.damaged-rows"
_MOST_NAMED = 5
# Mending one row may show that another one does not fit: a job whose live attempt is lost.
_ROUNDS = 3
_TYPES: dict[str, tuple[type, ...]] = {"INTEGER": (int,), "REAL": (float, int), "TEXT": (str,)}
_STATES = frozenset(map(str, JobState))
_LOST = json.dumps({"kind": "lost", "reason": "its record in queue.db could not be read"})
# Tables whose rows are mended, after those that they refer to; rows of others are deleted. All columns that are not in
# _DEFAULTS become NULL.
_MENDED = ("submissions", "specs", "attempts", "jobs")
# Without these columns, a row is deleted all the same.
_NEEDED = frozenset({"id", "job", "number", "first_id", "last_id"})
_DEFAULTS: dict[str, Any] = {
    "details": json.dumps({"command": UNREADABLE}), "user": "", "tag": "", "failures": 0, "priority": 0, "command": "",
    "keeper_pid": 0, "suspended_s": 0.0, "engine": "", "is_complete": 1,
}  # fmt: skip
# Columns whose loss changes nothing of what a job does.
_SHOWN = frozenset({"reason", "command", "name", "lane"})
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

    def where(self) -> str:
        marks = (f"{name} IS {_mark(value)}" for name, value in self.key.items())
        return f"{self.table} {{}} WHERE {' AND '.join(marks)}"


def may_be_a_row(error: Exception) -> bool:
    """Return whether the error may come from a row that cannot be read: it is none that gpuyard or the system raised
    for another cause."""
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
    named: list[str] = []
    notes: list[str] = []
    try:
        has_counts, found = _count_anew(connection), _find(connection)
        for _ in range(_ROUNDS):
            if found:
                _keep(found, kept)
                named += [row.text for row in found]
                notes += _Mending(connection).mend(found)
                _count_anew(connection)
                found = _find(connection)
        if found:
            raise StoreFault(f"{found[0].text} of the queue's database cannot be read", hint="restore a backup")
    finally:
        connection.text_factory = str
    if not named:
        return ["the numbers of jobs per state were wrong, and were counted anew"] if has_counts else []
    rows, what = format_count(len(named), "row"), "; ".join(named[:_MOST_NAMED] + ["…"] * (len(named) > _MOST_NAMED))
    return [f"{rows} of the queue's database could not be read, and set aside in {kept}: {what}", *notes]


# Find


def _find(connection: sqlite3.Connection) -> list[_Row]:
    tables = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
    names = [name for (name,) in tables if name not in {"counts", "group_counts"} and "sqlite_" not in name]
    found = [row for name in names for row in _find_in(connection, name)]
    if connection.execute("SELECT 1 FROM settings WHERE name = 'next_id'").fetchone() is None:
        found.append(_Row("settings", {"name": "next_id"}, {}, frozenset({"value"})))
    order = (*_MENDED, "spec_code")  # the code of a spec is read again when the spec can be
    return sorted(found, key=lambda row: order.index(row.table) if row.table in order else -1)


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _BadText(value)


def _mark(value: object) -> str:
    return "CAST(? AS TEXT)" if isinstance(value, _BadText) else "?"


def _find_in(connection: sqlite3.Connection, table: str) -> Iterator[_Row]:
    # A generated column is hidden.
    columns = [each[1:] for each in connection.execute(f"PRAGMA table_xinfo({table})").fetchall() if each[6] == 0]
    wanted = {
        name: _TYPES[kind] + (() if needed or key else (type(None),)) for name, kind, needed, _, key, _ in columns
    }
    keys = [name for name, *_, key, _ in columns if key]
    specs, lanes = _ids(connection, "id FROM specs"), _ids(connection, "id FROM lanes")
    live = _ids(connection, "job FROM attempts WHERE ended_at IS NULL")
    for row in connection.execute(f"SELECT {', '.join(wanted)} FROM {table}").fetchall():  # noqa: S608 - of the schema
        values = dict(zip(wanted, row, strict=True))
        bad = {
            name
            for name, value in values.items()
            if not isinstance(value, wanted[name]) or not _can_read(table, name, value, values)
        }
        if not bad:
            bad = {name for name, fits in _FITS.get(table, {}).items() if not fits(values)}
        if table == "jobs":
            bad |= {name for name, known in (("spec", specs), ("lane", lanes)) if values[name] not in known}
            bad |= {"state"} if (values["state"] in LIVE) != (values["id"] in live) else set()
        if bad:
            yield _Row(table, {name: values[name] for name in keys}, values, frozenset(bad))


def _ids(connection: sqlite3.Connection, query: str) -> set[int]:
    return {number for (number,) in connection.execute(f"SELECT {query}")}


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
    "dependencies.kind": ("ok", "any", "failed").index, "jobs.state": JobState,
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


# Keep


def _keep(found: Sequence[_Row], path: str) -> None:
    try:
        with open(open_own(path), "a", encoding="utf-8") as file:
            for row in found:
                names = row.key if row.table == "secrets" else row.values  # secrets are kept in no other place
                values = {name: _shown(row.values.get(name)) for name in names}
                file.write(
                    json.dumps({"at": time.time(), "table": row.table, "bad": sorted(row.bad), "row": values}) + "\n"
                )
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error


def _shown(value: object) -> object:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


# Mend


class _Mending:
    """One mending."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._store = JobStore(Database(connection))
        self._lost: dict[int, set[str]] = {}  # what was lost of each job
        self._notes: list[str] = []
        newest = "SELECT max(at) FROM events WHERE typeof(at) IN ('real', 'integer')"
        self._now = float(self._execute(newest).fetchone()[0] or 0.0)  # in queue time; no clock is needed

    def mend(self, found: Sequence[_Row]) -> list[str]:
        for row in found:
            if row.table in _MENDED and not row.bad & _NEEDED:
                self._update(row)
            else:
                self._delete(row)
        self._make_lanes_anew()
        for job_id, names in sorted(self._lost.items()):
            self._note_loss(job_id, names)
        return self._notes

    def _delete(self, row: _Row) -> None:
        self._execute(f"DELETE FROM {row.where().format('')}", (*row.key.values(),))  # noqa: S608 - of the schema
        if row.key == {"name": "next_id"}:
            last = "SELECT max(last_id) FROM submissions WHERE typeof(last_id) = 'integer'"
            query = f"SELECT 1 + max(coalesce(max(id), 0), coalesce(({last}), 0)) FROM jobs"  # noqa: S608
            self._execute("INSERT INTO settings VALUES ('next_id', ?)", (str(self._execute(query).fetchone()[0]),))
        elif row.key == {"name": "stopped_tags"}:
            self._execute("INSERT OR REPLACE INTO settings VALUES ('paused', '1')")
            self._notes.append(
                "which tags were stopped could not be read, so the queue is paused: stop them again with `gpuyard "
                "workspace stop`, then `gpuyard unpause`"
            )
        elif row.table == "submissions":
            known = "SELECT first_id FROM submissions"
            self._execute(f"UPDATE jobs SET group_id = NULL, group_limit = NULL WHERE group_id NOT IN ({known})")  # noqa: S608
        elif row.table == "secrets":
            self._execute("INSERT OR IGNORE INTO dropped_secrets VALUES (?)", (row.key["spec"],))
            self._lose("spec", row.key["spec"], {"secret variables"})
        elif row.table == "spec_code":
            with contextlib.suppress(ValueError, TypeError):
                self._store.specs.code.add(row.key["spec"], self._store.spec(row.key["spec"]).code)
        elif row.table == "dependencies":
            self._lose("id", row.values["job"], {"dependencies"})

    def _update(self, row: _Row) -> None:
        new = {name: _DEFAULTS.get(name) for name in row.bad - {"lane"}}
        if row.table == "specs":
            if "body" in row.bad:
                new["body"] = row_codec.spec_to_text(self._unreadable(row.key["id"]))
                self._lose("spec", row.key["id"], {"command"})
        elif row.table == "jobs":
            new |= self._job_values({**row.values, **new}, row)
            is_left = row.values["state"] in LIVE and new["state"] is JobState.HELD
            self._lose("id", row.key["id"], {_LIVE_ATTEMPT} if is_left else row.bad - _SHOWN)
        elif row.table == "attempts":
            new |= {"engine": self._engine(row.values["job"])} if "engine" in row.bad else {}
            new |= _attempt_values({**row.values, **new}, self._now)
        columns = ", ".join(f"{name} = ?" for name in new)
        self._execute(f"UPDATE {row.where().format(f'SET {columns}')}", (*new.values(), *row.key.values()))

    def _engine(self, job_id: int) -> str:
        """Return the engine of the job: an attempt that was taken for a local one would be started again beside it."""
        query = "SELECT spec FROM jobs JOIN specs ON specs.id = spec WHERE jobs.id = ?"
        found = self._execute(query, (job_id,)).fetchone()
        return "" if found is None else self._store.spec(found[0]).engine

    def _unreadable(self, spec: int) -> JobSpec:
        """Return a spec in place of one that cannot be read, with the name and the tag of its jobs."""
        names = self._execute("SELECT name, tag FROM jobs WHERE spec = ? LIMIT 1", (spec,)).fetchone() or (None, "")
        name, tag = (each if isinstance(each, str) else None for each in names)
        return JobSpec(command=UNREADABLE, cwd="/", environment={}, need=Need(), name=name, tag=tag or "")

    def _job_values(self, job: dict[str, Any], row: _Row) -> dict[str, Any]:
        """Return the columns that follow from others, so that the job is consistent."""
        new: dict[str, Any] = {}
        if "spec" in row.bad:
            new["spec"] = self._store.add_spec(self._unreadable(row.values["spec"]))
        if "submitted_at" in row.bad:
            new["submitted_at"] = self._now
        if "attempts" in row.bad:
            query = "SELECT max(number) FROM attempts WHERE job = ? AND typeof(number) = 'integer'"
            new["attempts"] = self._execute(query, (job["id"],)).fetchone()[0] or 0
        state = self._state({**job, "state": row.values["state"]})
        ended_at = (job["ended_at"] or self._now) if state in FINISHED else None
        due_at = (job["due_at"] or self._now) if state is JobState.DELAYED else None
        return {**new, "state": state, "due_at": due_at, "ended_at": ended_at}

    def _state(self, job: Mapping[str, Any]) -> JobState:
        """Return the state of the job, or the one that fits what is known of it."""
        query = "SELECT started_at IS NULL FROM attempts WHERE job = ? AND ended_at IS NULL"
        live = self._execute(query, (job["id"],)).fetchone()
        if job["state"] in _STATES and (job["state"] in LIVE) == (live is not None):
            return JobState(job["state"])
        if live is not None:
            return JobState.PENDING if live[0] else JobState.RUNNING
        if job["ended_at"] is None:
            return JobState.HELD
        kind = json.loads(job["outcome"])["kind"] if job["outcome"] else None
        return JobState(kind) if kind in {JobState.SUCCEEDED, JobState.CANCELLED} else JobState.FAILED

    def _make_lanes_anew(self) -> None:
        """Put jobs without a lane into lanes that are made from the jobs."""
        known: dict[tuple[Any, ...], int] = {}
        alike = "spec, priority, user, group_id, group_limit, growth IS NULL"
        query = f"SELECT id, {alike} FROM jobs WHERE lane NOT IN (SELECT id FROM lanes)"  # noqa: S608
        for job_id, *key in self._execute(query).fetchall():
            if tuple(key) not in known and (job := self._store.job(job_id)) is not None:
                new = row_codec.lane_of(job)
                new = replace(new, sizes_each=new.sizes_each or bool(job.growth.count))
                known[tuple(key)] = self._store.ensure_lane(new)
            self._execute("UPDATE jobs SET lane = ? WHERE id = ?", (known[tuple(key)], job_id))

    # What was lost

    def _lose(self, column: str, number: Any, names: AbstractSet[str]) -> None:
        """Note what was lost of the jobs with this value, if they have not ended."""
        query = f"SELECT id FROM jobs WHERE {column} = ? AND ended_at IS NULL"  # noqa: S608
        for (job_id,) in self._execute(query, (number,)).fetchall() if names else ():
            self._lost.setdefault(job_id, set()).update(names)

    def _note_loss(self, job_id: int, names: set[str]) -> None:
        """Hold the job if it waits, and note the loss in its history."""
        row = self._execute("SELECT state FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None or row[0] in FINISHED:
            return
        lost = f"its record in queue.db could not be read ({', '.join(sorted(names))})"
        is_waiting = row[0] in WAITING
        if is_waiting:
            reason = f"{lost}: `gpuyard cancel {job_id}`, and submit it again"
            if _LIVE_ATTEMPT in names:
                reason = (
                    f"{lost}: its program may still run; once it has ended, `gpuyard release {job_id}` runs it again"
                )
            elif not names & {"command", "spec", "details"}:
                reason = f"{lost}: `gpuyard show {job_id}`, then `gpuyard release {job_id}` runs it as it is"
            query = "UPDATE jobs SET state = 'held', due_at = NULL, reason = ? WHERE id = ?"
            self._execute(query, (reason, job_id))
            self._notes.append(f"job {job_id} is held: {lost}")
        query = "INSERT INTO events (job, at, kind, text) VALUES (?, ?, ?, ?)"
        self._execute(query, (job_id, self._now, "held" if is_waiting else "damaged", lost))


def _attempt_values(attempt: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the columns that make the attempt consistent."""
    started_at, handed_over_at = attempt["started_at"], attempt["handed_over_at"]
    if started_at is None and handed_over_at is None:
        started_at = attempt["ended_at"] or now
    new = {"started_at": started_at, "handed_over_at": None if started_at is not None else handed_over_at}
    if attempt["outcome"] is None and attempt["ended_at"] is None:
        return {**new, "lack": None}
    return {**new, "ended_at": attempt["ended_at"] or started_at or now, "outcome": attempt["outcome"] or _LOST}


# Count


def _count_anew(connection: sqlite3.Connection) -> bool:
    """Count the jobs of each state and of each group anew; return whether the numbers were wrong."""
    execute = connection.execute
    counted = dict(execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall())
    states = {(state, counted.get(state, 0)) for state in _STATES}
    is_wrong = set(execute("SELECT state, jobs FROM counts").fetchall()) != states
    if is_wrong:
        execute("DELETE FROM counts")
        connection.executemany("INSERT INTO counts VALUES (?, ?)", states)
    groups = "FROM jobs WHERE group_id IS NOT NULL GROUP BY group_id, state"
    true = execute(f"SELECT group_id, state, count(*), 0 {groups}").fetchall()
    no_time = "typeof(ended_at) IN ('text', 'blob')"
    known = execute(f"SELECT group_id, state, jobs, {no_time} FROM group_counts WHERE jobs IS NOT 0").fetchall()  # noqa: S608
    if set(known) == set(true):
        return is_wrong
    execute("DELETE FROM group_counts")
    execute(f"INSERT INTO group_counts SELECT group_id, state, count(*), max(ended_at) {groups}")
    return True
