"""Rows of queue.db that cannot be read: whatever is in one column of one row, all other jobs go on."""

import contextlib
import sqlite3
import traceback
from pathlib import Path

import pytest

from gpuyard.errors import UnreadableRow
from gpuyard.model.lifecycle import FINISHED, LIVE, JobState
from gpuyard.report.usage_report import GroupBy
from gpuyard.store.arrays_and_sweeps import read_folded
from gpuyard.store.backup import back_up, checked_backup, restore
from gpuyard.store.damaged_rows import KEPT_ROWS, set_aside
from gpuyard.store.database import Database, convert_sqlite_errors, open_database
from gpuyard.store.job_store import JobStore
from gpuyard.store.past_attempts import attempts_since, runs_between
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.store.search_jobs import JobFilter, PageRange, Search
from tests.unit.store.sample_queue import SPEC, fill, like, submit

SECRET = "do-not-show-me"
BAD: tuple[tuple[str, object], ...] = (
    ("bad byte", b"caf\xe9" + SECRET.encode()),
    ("blob", b"\x00\xff"),
    ("no json", "{" + SECRET),
    ("other json", '{"' + SECRET + '": []}'),
    ("number", 10**15),
    ("negative", -1),
    ("null", None),
)
TABLES = (
    "settings", "specs", "secrets", "submissions", "lanes", "jobs", "attempts", "dependencies", "events", "batches",
    "uses", "profiles", "counts", "group_counts",
)  # fmt: skip


def sample() -> bytes:
    database, _ = open_database(None)
    store = JobStore(database)
    fill(store)
    with store.transaction():
        with_secret = SPEC.environment | {"TOKEN": "t"}
        submit(store, like(type(SPEC)(command=("x",), cwd="/", environment=with_secret, need=SPEC.need,
                                      secrets=("TOKEN",))))  # fmt: skip
    return database.connection.serialize()


@pytest.fixture(scope="module")
def filled() -> bytes:
    return sample()


def connection_of(content: bytes) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.deserialize(content)
    return connection


def damage(connection: sqlite3.Connection, table: str, column: str, value: object) -> bool:
    """Write the value into the middle row of the table; return whether SQLite takes it."""
    keys = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[5]]
    rows = connection.execute(f"SELECT {', '.join(keys)} FROM {table}").fetchall()
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute("PRAGMA ignore_check_constraints = ON")
    text = isinstance(value, bytes) and value.startswith(b"caf")
    where = " AND ".join(f"{key} IS ?" for key in keys)
    try:
        connection.execute(
            f"UPDATE {table} SET {column} = {'CAST(? AS TEXT)' if text else '?'} WHERE {where}",
            (value, *rows[len(rows) // 2]),
        )
    except sqlite3.DatabaseError:  # not in this column: the key of the row, or part of a generated column
        return False
    finally:
        connection.execute("PRAGMA ignore_check_constraints = OFF")
        connection.execute("PRAGMA foreign_keys = ON")
    return True


def read_all(connection: sqlite3.Connection) -> dict[int, JobState]:
    """Read as the daemon and its requests do; return the states of all jobs."""
    store = JobStore(Database(connection))
    queries = QueueQueries(Database(connection), store)
    states = {}
    for job_id in queries.ids(1, 100):
        job = store.job(job_id)
        assert job is not None
        states[job_id] = job.state
        store.attempts(job_id)
        store.dependencies(job_id)
        store.lane_of(job_id)
        queries.events(job_id)
    live = {job.id for job, _ in store.live_attempts()}
    assert live == {job_id for job_id, state in states.items() if state in LIVE}
    for queue in store.ready_queues():
        assert list(queue.jobs)
    page = PageRange(offset=0, count=100)
    search = Search(connection)
    assert set(search.page(JobFilter(), {}, 2000.0, page, show_all=True).ids) <= states.keys()
    assert search.page(JobFilter(search="train"), {}, 2000.0, page, show_all=True) is not None
    read_folded(connection, {}, 2000.0, page, show_all=True)
    list(attempts_since(connection, 0.0, GroupBy.USER))
    runs_between(connection, 0.0, 1e9, 100)
    queries.latest_time()
    queries.last_id()
    queries.profiles(100)
    store.stopped_tags()
    store.learned.recent_use()
    assert sum(store.counts().values()) == len(states)
    assert store.counts() == {state: list(states.values()).count(state) for state in JobState}
    Database(connection).progress()
    return states


def columns(content: bytes) -> list[tuple[str, str]]:
    with contextlib.closing(connection_of(content)) as connection:
        return [(table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})")]


def test_a_sound_queue_stays_as_it_is(filled: bytes, tmp_path: Path) -> None:
    with contextlib.closing(connection_of(filled)) as connection:
        assert set_aside(connection, str(tmp_path / KEPT_ROWS)) == []
        assert connection.total_changes == 0
    assert not (tmp_path / KEPT_ROWS).exists()


@pytest.mark.parametrize(("what", "value"), BAD, ids=[what for what, _ in BAD])
def test_whatever_is_in_one_column_other_jobs_stay(filled: bytes, tmp_path: Path, what: str, value: object) -> None:
    tmp_path.chmod(0o700)
    with contextlib.closing(connection_of(filled)) as sound:
        before = read_all(sound)
    for table, column in columns(filled):
        with contextlib.closing(connection_of(filled)) as connection:
            if (table, column) == ("jobs", "id") or not damage(connection, table, column, value):
                continue
            connection.execute("BEGIN")
            notes = set_aside(connection, str(tmp_path / KEPT_ROWS))
            connection.execute("COMMIT")
            try:
                after = read_all(connection)
            except Exception as error:
                raise AssertionError(f"{table}.{column} = {value!r}: {notes}") from error
            changed = {job_id for job_id in before if after.get(job_id) is not before[job_id]}
            # Jobs of a submission share a spec.
            assert len(changed) <= 3, (table, column, notes, changed)
            assert all(before[each] not in FINISHED or table == "jobs" for each in changed), (table, column)
            if table not in {"jobs", "attempts"}:
                assert {after[each] for each in changed} <= {JobState.HELD}, (table, column)
            assert SECRET not in " ".join(notes), (what, table, column)
            reasons = connection.execute(
                "SELECT coalesce(reason, '') || coalesce(text, '') FROM jobs JOIN events ON job = jobs.id"
            )
            if (table, column) not in {("jobs", "reason"), ("events", "text")}:
                assert not any(SECRET in text for (text,) in reasons)


def live_attempts(connection: sqlite3.Connection) -> dict[int, str]:
    query = "SELECT job, engine FROM attempts WHERE ended_at IS NULL"
    return dict(connection.execute(query).fetchall())


@pytest.mark.parametrize("column", ["number", "engine"])
def test_a_job_whose_attempt_is_lost_says_that_it_may_still_run(filled: bytes, tmp_path: Path, column: str) -> None:
    tmp_path.chmod(0o700)
    with contextlib.closing(connection_of(filled)) as connection:
        job_id = min(live_attempts(connection))
        connection.execute(f"UPDATE attempts SET {column} = x'ff' WHERE job = ?", (job_id,))
        connection.execute("BEGIN")
        assert set_aside(connection, str(tmp_path / KEPT_ROWS))
        state, reason = connection.execute("SELECT state, reason FROM jobs WHERE id = ?", (job_id,)).fetchone()
        assert state == JobState.HELD
        assert f"its program may still run; once it has ended, `gpuyard release {job_id}` runs it again" in reason


def test_a_row_that_breaks_a_rule_does_not_set_the_whole_database_aside(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    database, _ = open_database(path)
    fill(JobStore(database))
    database.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert damage(connection, "jobs", "due_at", 5.0)
        assert connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",)
    database, notice = open_database(path)
    with contextlib.closing(database):
        assert notice is None
        with database.transaction():
            (note, *_) = set_aside(database.connection, str(tmp_path / KEPT_ROWS))
        assert "(due_at)" in note
        assert database.value("PRAGMA quick_check(1)") == "ok"


def test_every_row_of_a_backup_is_read_before_it_replaces_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    database, _ = open_database(path)
    fill(JobStore(database))
    database.close()
    back_up(path, tmp_path / "backup")
    with contextlib.closing(sqlite3.connect(tmp_path / "backup", isolation_level=None)) as connection:
        connection.execute("UPDATE specs SET body = '{' WHERE id = 3")
    notes: list[str] = []
    with checked_backup(tmp_path / "backup", tmp_path, notes.append) as draft:
        assert "specs 3 (body)" in notes[0]
        assert notes[1:] == ["job 3 is held: its record in queue.db could not be read (command)"]
        restore(draft, path, {})
    database, notice = open_database(path)
    with contextlib.closing(database):
        job = JobStore(database).job(3)
        assert job is not None
        assert (job.state, job.is_unreadable, notice) == (JobState.HELD, True, None)


def test_an_error_about_a_bad_text_says_nothing_of_the_text(filled: bytes) -> None:
    with contextlib.closing(connection_of(filled)) as connection:
        assert damage(connection, "specs", "body", b"caf\xe9" + SECRET.encode())
        with pytest.raises(UnreadableRow) as raised, convert_sqlite_errors():
            connection.execute("SELECT body FROM specs").fetchall()
    shown = "".join(traceback.format_exception(raised.value))
    assert SECRET not in shown
    assert "disk space" not in shown
