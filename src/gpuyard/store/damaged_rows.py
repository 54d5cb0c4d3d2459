"""Find rows of the queue's database that cannot be read, and set them aside: all other jobs go on.

Readers of rows do not check them. Where one fails, the daemon calls `set_aside`, which reads every row of every table
as its readers do. It replaces what cannot be read by a value that can, or deletes the row, in one transaction.

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
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
# Columns that only people read: what can be read of them stays, and their jobs go on.
_SHOWN = {"jobs": {"reason", "command", "name"}, "events": {"kind", "text"}, "specs": {"command"}}
_LOST = json.dumps({"kind": "lost", "reason": "its record in queue.db could not be read"})
_DEFAULTS: dict[str, dict[str, Any]] = {
    "jobs": {"details": json.dumps({"command": UNREADABLE}), "user": "", "tag": "", "failures": 0, "priority": 0},
    "attempts": {"keeper_pid": 0, "suspended_s": 0.0, "engine": ""},
    "submissions": {"is_complete": 1},
    "specs": {"command": " ".join(UNREADABLE)},
}
# In these tables a row without these columns is of no use.
_NEEDED = {"events": {"job", "at"}, "submissions": {"first_id", "last_id"}, "attempts": {"job", "number"}}
_MENDED = frozenset({"jobs", "attempts", "specs", "events", "submissions"})
# Tables before those that are mended with their help.
_ORDER = ("settings", "specs", "secrets", "submissions", "attempts", "jobs")
T = TypeVar("T")


class _BadText(bytes):
    """A text that is not UTF-8."""


class _Row(NamedTuple):
    """A row with columns that cannot be read. `key` is its primary key."""

    table: str
    key: dict[str, Any]
    values: dict[str, Any]
    bad: tuple[str, ...]

    @property
    def job(self) -> int | None:
        job = self.values.get("id" if self.table == "jobs" else "job")
        return job if isinstance(job, int) else None

    @property
    def text(self) -> str:
        number = next((each for each in self.key.values() if isinstance(each, int)), "")
        return f"{self.table} {number}".rstrip() + f" ({', '.join(self.bad)})"


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
        found.append(_Row("settings", {"name": "next_id"}, {}, ("value",)))
    return sorted(found, key=lambda row: _ORDER.index(row.table) if row.table in _ORDER else len(_ORDER))


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _BadText(value)


def _find_in(connection: sqlite3.Connection, table: str) -> Iterator[_Row]:
    # A generated column is hidden.
    columns = [each[1:] for each in connection.execute(f"PRAGMA table_xinfo({table})").fetchall() if each[6] == 0]
    names = [each[0] for each in columns]
    wanted = [_TYPES[kind] if needed or key else (*_TYPES[kind], type(None)) for _, kind, needed, _, key, _ in columns]
    keys = [name for name, *_, key, _ in columns if key]
    specs, lanes = _ids(connection, "id FROM specs"), _ids(connection, "id FROM lanes")
    live = _ids(connection, "job FROM attempts WHERE ended_at IS NULL")
    for row in connection.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall():  # noqa: S608 - of the schema
        values = dict(zip(names, row, strict=True))
        bad = {name for name, value, types in zip(names, row, wanted, strict=True) if not isinstance(value, types)}
        bad |= {name for name, check in _CHECKS.get(table, {}).items() if name not in bad and not check(values)}
        if table == "jobs":
            bad |= {name for name, known in (("spec", specs), ("lane", lanes)) if values[name] not in known}
            bad |= {"state"} if (values["state"] in LIVE) != (values["id"] in live) else set()
        if bad:
            yield _Row(table, {name: values[name] for name in keys}, values, tuple(sorted(bad)))


def _ids(connection: sqlite3.Connection, query: str) -> set[int]:
    return {number for (number,) in connection.execute(f"SELECT {query}")}


def _can(read: Callable[[T], object], value: T) -> bool:
    try:
        read(value)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError):
        return False
    return True


def _json(column: str, kind: Any) -> Callable[[Mapping[str, Any]], bool]:
    """Return a check of a column that may be NULL, and holds JSON of this type."""

    def read(text: str) -> object:
        return msgspec.convert(json.loads(text), kind)

    return lambda row: row[column] is None or _can(read, row[column])


def _one_of(column: str, kind: Any) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: row[column] is None or _can(kind, row[column])


def _is_due(row: Mapping[str, Any]) -> bool:
    return row["state"] not in _STATES or (row["state"] == JobState.DELAYED) == (row["due_at"] is not None)


def _is_ended(row: Mapping[str, Any]) -> bool:
    return row["state"] not in _STATES or (row["state"] in FINISHED) == (row["ended_at"] is not None)


def _is_setting(row: Mapping[str, Any]) -> bool:
    kind = _SETTINGS.get(row["name"])
    return kind is None or _can(lambda text: msgspec.convert(json.loads(text), kind), row["value"])


class _Details(msgspec.Struct):
    command: tuple[str, ...] | None = None
    values: dict[str, str] | None = None


_STATES = frozenset(map(str, JobState))
_SETTINGS: dict[Any, Any] = {
    "next_id": int, "generation": int, "stopped_tags": list[str], "asleep": tuple[str | None, float],
}  # fmt: skip
# Each gets a row, and returns whether the column can be read. Columns with a wrong type are not checked.
_CHECKS: dict[str, dict[str, Callable[[Mapping[str, Any]], bool]]] = {
    "settings": {"value": _is_setting},
    "specs": {"body": lambda row: _can(row_codec.spec_from_text, row["body"])},
    "secrets": {"body": _json("body", dict[str, str])},
    "lanes": {"body": lambda row: _can(lambda text: row_codec.lane_from_text(0, text), row["body"])},
    "profiles": {"body": _json("body", Profile)},
    "batches": {"body": _json("body", dict[str, Any])},
    "dependencies": {
        "kind": lambda row: row["kind"] in {"ok", "any", "failed"},
        "on_job": lambda row: isinstance(row["job"], int) and row["on_job"] < row["job"],
    },
    "jobs": {
        "state": _one_of("state", JobState),
        "due_at": _is_due,
        "ended_at": _is_ended,
        "details": _json("details", _Details),
        "outcome": _json("outcome", Outcome),
        "growth": _json("growth", Growth),
    },
    "attempts": {
        "handed_over_at": lambda row: (row["handed_over_at"] is None) == (row["started_at"] is not None),
        "outcome": lambda row: _json("outcome", Outcome)(row) and (row["outcome"] is None) == (row["ended_at"] is None),
        "lack": _json("lack", MemoryLack),
        "request": _json("request", SiteRequest),
        "usage": _json("usage", Usage),
        "stopping": _one_of("stopping", OutcomeKind),
        "parked": _one_of("parked", SuspendedBy),
        "cpus": lambda row: _can(lambda text: [int(each) for each in (text or "").split()], row["cpus"]),
    },
}


# Keep


def _keep(found: Sequence[_Row], path: str) -> None:
    try:
        with open(open_own(path), "a", encoding="utf-8") as file:
            for row in found:
                names = row.key if row.table == "secrets" else row.values  # secrets are kept in no other place
                values = {name: _shown(row.values.get(name)) for name in names}
                file.write(json.dumps({"at": time.time(), "table": row.table, "bad": row.bad, "row": values}) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}") from error


def _shown(value: object) -> object:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


# Mend


class _Mending:
    """One mending. Tables are mended in the order in which they refer to each other."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute
        self._store = JobStore(Database(connection))
        self._lost: dict[int, set[str]] = {}  # what was lost of each job
        self._notes: list[str] = []
        newest = "SELECT max(at) FROM events WHERE typeof(at) IN ('real', 'integer')"
        self._now = float(self._execute(newest).fetchone()[0] or 0.0)  # in queue time; no clock is needed

    def mend(self, found: Sequence[_Row]) -> list[str]:
        for row in found:
            self._mend(row)
        lanes = [row.key["id"] for row in found if row.table == "lanes"]
        for lane in {*lanes, *(row.values["lane"] for row in found if row.table == "jobs" and "lane" in row.bad)}:
            self._make_lanes_anew(lane)
        for lane in lanes:
            self._execute("DELETE FROM lanes WHERE id = ?", (lane,))
        for job_id, names in sorted(self._lost.items()):
            self._note_loss(job_id, names)
        return self._notes

    def _mend(self, row: _Row) -> None:
        """Mend a row, or delete it."""
        if row.table == "lanes":
            return
        if row.table not in _MENDED or _NEEDED.get(row.table, set()) & set(row.bad):
            self._delete(row)
        else:
            self._update(row)
        lost = set(row.bad) - _SHOWN.get(row.table, set())
        if row.table == "specs" and lost:
            self._lose_all("spec", row.key["id"], "command")
        elif row.table in {"jobs", "dependencies"} and row.job is not None and lost - {"lane"}:
            self._lost.setdefault(row.job, set()).update(lost - {"lane"})

    def _delete(self, row: _Row) -> None:
        where = " AND ".join(f"{name} IS {_mark(value)}" for name, value in row.key.items())
        self._execute(f"DELETE FROM {row.table} WHERE {where}", tuple(row.key.values()))  # noqa: S608 - of the schema
        if row.table == "settings":
            self._reset_setting(row.key["name"])
        elif row.table == "submissions":
            self._execute(
                "UPDATE jobs SET group_id = NULL, group_limit = NULL WHERE group_id IS NOT NULL "
                "AND group_id NOT IN (SELECT first_id FROM submissions)"
            )
        elif row.table == "secrets":
            self._execute("INSERT OR IGNORE INTO dropped_secrets VALUES (?)", (row.key["spec"],))
            self._lose_all("spec", row.key["spec"], "secret variables")
        elif row.table == "spec_code":
            with contextlib.suppress(ValueError, TypeError, msgspec.ValidationError):
                self._store.specs.code.add(row.key["spec"], self._store.spec(row.key["spec"]).code)

    def _reset_setting(self, name: Any) -> None:
        if name == "next_id":
            query = (
                "INSERT INTO settings SELECT 'next_id', CAST(1 + max((SELECT coalesce(max(id), 0) FROM jobs), "
                "(SELECT coalesce(max(last_id), 0) FROM submissions WHERE typeof(last_id) = 'integer')) AS TEXT)"
            )
            self._execute(query)
        elif name == "stopped_tags":
            self._execute("INSERT OR REPLACE INTO settings VALUES ('paused', '1')")
            self._notes.append(
                "which tags were stopped could not be read, so the queue is paused: stop them again with `gpuyard "
                "workspace stop`, then `gpuyard unpause`"
            )

    def _update(self, row: _Row) -> None:
        new = {name: self._mended(row, name) for name in row.bad if (row.table, name) != ("jobs", "lane")}
        if row.table == "jobs" and row.values["state"] in _STATES:
            new["state"] = row.values["state"]  # whether it fits is seen when its attempts are mended
        if row.table == "jobs":
            new |= self._job_values({**row.values, **new}, row.bad)
        elif row.table == "attempts":
            new |= _attempt_values({**row.values, **new}, self._now)
        columns = ", ".join(f"{name} = ?" for name in new)
        where = " AND ".join(f"{name} IS {_mark(value)}" for name, value in row.key.items())
        query = f"UPDATE {row.table} SET {columns} WHERE {where}"  # noqa: S608 - names of the schema
        self._execute(query, (*new.values(), *row.key.values()))

    def _mended(self, row: _Row, name: str) -> Any:
        if name in _SHOWN.get(row.table, ()) and isinstance(row.values[name], bytes):
            return _shown(row.values[name])
        if row.table == "specs" and name == "body":
            return row_codec.spec_to_text(_unreadable_spec(*self._names(row.key["id"])))
        return _DEFAULTS.get(row.table, {}).get(name)

    def _names(self, spec: int) -> tuple[str | None, str]:
        """Return the name and the tag of the jobs with this spec, as far as they can be read."""
        with contextlib.suppress(sqlite3.OperationalError):
            for name, tag in self._execute("SELECT name, tag FROM jobs WHERE spec = ? LIMIT 1", (spec,)).fetchall():
                return name if isinstance(name, str) else None, tag if isinstance(tag, str) else ""
        return None, ""

    def _job_values(self, job: dict[str, Any], bad: Sequence[str]) -> dict[str, Any]:
        """Return the columns that follow from others, so that the job is consistent."""
        new: dict[str, Any] = {}
        if "spec" in bad:
            new["spec"] = self._store.add_spec(_unreadable_spec(job["name"], job["tag"]))
        if "submitted_at" in bad:
            new["submitted_at"] = self._now
        if "attempts" in bad:
            count = self._execute("SELECT max(number) FROM attempts WHERE job = ?", (job["id"],)).fetchone()[0]
            new["attempts"] = count if isinstance(count, int) else 0
        state = self._state(job)
        ended_at = (job["ended_at"] or self._now) if state in FINISHED else None
        due_at = (job["due_at"] or self._now) if state is JobState.DELAYED else None
        return {**new, "state": state, "due_at": due_at, "ended_at": ended_at}

    def _state(self, job: Mapping[str, Any]) -> JobState:
        """Return the state of the job, or the one that fits what is known of it."""
        live = self._execute(
            "SELECT typeof(started_at) FROM attempts WHERE job = ? AND ended_at IS NULL", (job["id"],)
        ).fetchone()
        if job["state"] in _STATES and (job["state"] in LIVE) == (live is not None):
            return JobState(job["state"])
        if live is not None:
            return JobState.PENDING if live[0] == "null" else JobState.RUNNING
        if job["ended_at"] is None:
            return JobState.HELD
        kind = json.loads(job["outcome"])["kind"] if job["outcome"] else None
        return JobState(kind) if kind in {JobState.SUCCEEDED, JobState.CANCELLED} else JobState.FAILED

    def _make_lanes_anew(self, lane: Any) -> None:
        """Put the jobs of a lane into lanes that are made from the jobs."""
        known: dict[tuple[Any, ...], int] = {}
        alike = "spec, priority, user, group_id, group_limit, growth IS NULL"
        number = lane if isinstance(lane, int) else 0
        query = f"SELECT id, {alike} FROM jobs WHERE lane = ? OR lane NOT IN (SELECT id FROM lanes)"  # noqa: S608
        for job_id, *key in self._execute(query, (number,)).fetchall():
            if tuple(key) not in known and (job := self._store.job(job_id)) is not None:
                new = row_codec.lane_of(job)
                new = replace(new, sizes_each=new.sizes_each or bool(job.growth.count))
                known[tuple(key)] = self._store.ensure_lane(new)
            self._execute("UPDATE jobs SET lane = ? WHERE id = ?", (known[tuple(key)], job_id))

    # What was lost

    def _lose_all(self, column: str, number: Any, what: str) -> None:
        query = f"SELECT id FROM jobs WHERE {column} = ? AND typeof(state) = 'text' AND ended_at IS NULL"  # noqa: S608
        for (job_id,) in self._execute(query, (number,)).fetchall():
            self._lost.setdefault(job_id, set()).add(what)

    def _note_loss(self, job_id: int, names: set[str]) -> None:
        """Hold the job if it waits, and note the loss in its history."""
        row = self._execute("SELECT state FROM jobs WHERE id = ?", (job_id,)).fetchone()
        if row is None or row[0] in FINISHED:
            return
        lost = f"its record in queue.db could not be read ({', '.join(sorted(names))})"
        is_waiting = row[0] in WAITING
        if is_waiting:
            reason = f"{lost}: `gpuyard cancel {job_id}`, and submit it again"
            if not names & {"command", "spec", "details"}:
                reason = f"{lost}: `gpuyard show {job_id}`, then `gpuyard release {job_id}` runs it as it is"
            query = "UPDATE jobs SET state = 'held', due_at = NULL, reason = ? WHERE id = ?"
            self._execute(query, (reason, job_id))
            self._notes.append(f"job {job_id} is held: {lost}")
        query = "INSERT INTO events (job, at, kind, text) VALUES (?, ?, ?, ?)"
        self._execute(query, (job_id, self._now, "held" if is_waiting else "damaged", lost))


def _unreadable_spec(name: str | None, tag: str) -> JobSpec:
    return JobSpec(command=UNREADABLE, cwd="/", environment={}, need=Need(), name=name, tag=tag)


def _mark(value: object) -> str:
    return "CAST(? AS TEXT)" if isinstance(value, _BadText) else "?"


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
    states = "SELECT state, count(*) FROM jobs GROUP BY state"
    true = {**dict.fromkeys(map(str, JobState), 0), **_texts(connection.execute(states).fetchall())}
    known = _texts(connection.execute("SELECT state, jobs FROM counts").fetchall())
    groups = "SELECT group_id, state, count(*) FROM jobs WHERE group_id IS NOT NULL GROUP BY group_id, state"
    counted = "SELECT group_id, state, jobs FROM group_counts WHERE jobs > 0"
    no_time = "SELECT 1 FROM group_counts WHERE typeof(ended_at) IN ('text', 'blob') LIMIT 1"
    is_wrong = set(connection.execute(groups).fetchall()) != set(connection.execute(counted).fetchall())
    if is_wrong or connection.execute(no_time).fetchone() is not None:
        connection.execute("DELETE FROM group_counts")
        connection.execute(
            "INSERT INTO group_counts SELECT group_id, state, count(*), max(ended_at) FROM jobs "
            "WHERE group_id IS NOT NULL GROUP BY group_id, state"
        )
        is_wrong = True
    if known == true:
        return is_wrong
    for state in JobState:
        connection.execute("INSERT OR IGNORE INTO counts VALUES (?, 0)", (state,))
        connection.execute("UPDATE counts SET jobs = ? WHERE state = ?", (true[state], state))
    connection.execute("DELETE FROM counts WHERE state NOT IN (SELECT value FROM json_each(?))", (_ALL_STATES,))
    return True


_ALL_STATES = json.dumps(list(JobState))


def _texts(rows: Sequence[tuple[Any, Any]]) -> dict[str, int]:
    return {state: jobs for state, jobs in rows if isinstance(state, str)}
