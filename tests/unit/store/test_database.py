"""The database as a file: its schema, what is read back from it, damage, and transactions."""

import contextlib
import errno
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.model.dependencies import DependencyKind
from gpuyard.model.job import Growth, HandedOver, Outcome, OutcomeKind, Started, SuspendedBy
from gpuyard.model.job_spec import BatchPace, OnPreempt, OnReboot
from gpuyard.model.lease import FixedMemory, Need
from gpuyard.model.lifecycle import JobState
from gpuyard.model.machine_snapshot import Vendor
from gpuyard.model.out_of_memory import ShortageKind
from gpuyard.model.selection import JobSelection
from gpuyard.policy.estimates import Profile
from gpuyard.policy.queue_order import WeightedUse
from gpuyard.queue.batch_gates import BatchGates, BatchGateState
from gpuyard.queue.transitions import JobTransitions
from gpuyard.store.database import SCHEMA_VERSION, Database, convert_sqlite_errors, open_database, open_reader
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries
from gpuyard.store.search_jobs import JobFilter, PageRange, Search
from tests.unit.store.sample_queue import fill


def settings_of(database: Database) -> dict[str, str]:
    return dict(database.execute("SELECT name, value FROM settings WHERE name <> 'generation'").fetchall())


Opener = Callable[[Path | None], Database]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Open a database without a notice, and close it after the test."""
    with contextlib.ExitStack() as stack:

        def opener(path: Path | None) -> Database:
            database, notice = open_database(path)
            stack.callback(database.close)
            assert notice is None
            return database

        yield opener


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "queue.db"


@pytest.fixture
def reopened(opened: Opener, path: Path) -> Database:
    """The sample queue, written to disk, closed and opened again."""
    with contextlib.closing(opened(path)) as database:
        fill(JobStore(database))
    return opened(path)


@pytest.mark.parametrize(
    ("version", "message", "hint"),
    [
        (SCHEMA_VERSION + 1, "a newer gpuyard made {}: it has schema {}", "use the newer gpuyard"),
        (
            5,
            "an unreleased gpuyard made {}: it has schema {}",
            "to start with an empty queue, move it away: mv {0} {0}.schema-5",
        ),
    ],
)
def test_a_database_of_another_schema_is_refused(
    opened: Opener, path: Path, version: int, message: str, hint: str
) -> None:
    with contextlib.closing(opened(path)) as database:
        database.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(EnvironmentFault, match=re.escape(message.format(path, version))) as caught:
        open_database(path)
    assert caught.value.message.endswith(f"this version reads schema {SCHEMA_VERSION}")
    assert caught.value.hint == hint.format(path)
    assert path.read_bytes() == before
    assert sorted(each.name for each in path.parent.iterdir()) == ["queue.db", "queue.record"]


def test_states_in_the_schema_are_those_of_the_core(opened: Opener) -> None:
    database = opened(None)
    assert {state for (state,) in database.execute("SELECT state FROM counts")} == set(JobState)


def test_every_job_is_read_back_from_disk(reopened: Database) -> None:
    store = JobStore(reopened)
    queries = QueueQueries(reopened, store)
    ids = list(queries.ids(1, queries.last_id()))
    jobs = {job.id: job for job_id in ids if (job := store.job(job_id)) is not None}
    assert {job_id: str(job.state) for job_id, job in jobs.items()} == {
        1: "queued", 2: "held", 3: "blocked", 4: "delayed", 5: "running", 6: "stopping", 7: "succeeded", 8: "failed",
        9: "cancelled", 10: "rejected", 11: "queued", 12: "queued", 13: "queued", 14: "suspending", 15: "suspended",
        16: "resuming", 17: "queued", 18: "succeeded", 19: "running", 20: "queued", 21: "pending", 22: "running",
    }  # fmt: skip
    counted = Counter(job.state for job in jobs.values())
    assert store.counts() == {state: counted[state] for state in JobState}
    assert set(store.counts()) == set(counted)
    plain = jobs[1].spec
    assert (plain.command, plain.environment, plain.need) == (("python", "train.py"), {"LANG": "caf\udce9"}, Need())
    assert (jobs[2].reason, jobs[10].reason) == ("submitted as held", "never satisfied")
    assert (jobs[4].due_at, jobs[4].failures, jobs[4].attempts) == (1030.0, 1, 1)
    assert jobs[7].outcome == Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
    assert jobs[8].outcome == Outcome(kind=OutcomeKind.FAILED, status=3, reason="exit status 3")
    assert store.find_submission("sent-once") == (1, 1)


def test_a_job_at_a_cluster_is_read_back_with_its_place(reopened: Database) -> None:
    store = JobStore(reopened)
    live = {job.id: (job, attempt) for job, attempt in store.live_attempts()}
    (pending, waiting), (running, started) = live[21], live[22]
    assert (waiting.engine, waiting.site_id, waiting.phase) == ("slurm", "21_0", HandedOver(at=1010.0))
    assert (started.engine, started.site_id, started.phase) == ("slurm", "22_0", Started(at=1012.0, place="n0"))
    assert (pending.started_at, running.started_at) == (None, 1012.0)
    assert (pending.spec.engine, pending.spec.engine_options, pending.spec.cpus) == ("slurm", ("--partition=big",), 4)


def test_specs_attempts_and_estimates_are_read_back(reopened: Database) -> None:
    store = JobStore(reopened)
    queries = QueueQueries(reopened, store)
    full = [job for job_id in (11, 12, 13) if (job := store.job(job_id)) is not None]
    assert [job.argv for job in full] == [("run", "1e-3"), ("run", "{lr}"), ("/bin/sh", "-c", "a | b")]
    assert {(job.group, job.group_limit, job.priority) for job in full} == {(11, 2, 3)}
    spec = full[0].spec
    assert spec.need == Need(
        devices=2, memory=FixedMemory(8192.0), vendor=Vendor.NVIDIA, model="H100", banned=("GPU-x",)
    )
    assert (spec.name, spec.tag, spec.retries, spec.on_reboot, spec.stdin) == (
        "big", "night", 2, OnReboot.REQUEUE, "in.txt",
    )  # fmt: skip
    assert (spec.time_limit_s, spec.grace_s, spec.duration_s, spec.log_cap_mb) == (3600.0, 5.0, 600.0, 64.0)
    live = [(job.id, attempt.keeper_pid, attempt.stopping) for job, attempt in store.live_attempts()]
    assert [each for each in live if each[0] <= 13] == [
        (5, 4005, None), (6, 4006, OutcomeKind.CANCELLED),
    ]  # fmt: skip
    assert [attempt.outcome and attempt.outcome.kind for attempt in store.attempts(7)] == ["failed", "succeeded"]
    assert store.attempts(5)[0].devices == ("GPU-a", "GPU-b")
    assert store.dependencies(3) == [
        (1, DependencyKind.OK, JobState.QUEUED), (2, DependencyKind.ANY, JobState.HELD),
    ]  # fmt: skip
    assert queries.events(8) == [(1020.0, "failed", "exit status 3")]
    assert queries.ranges(JobSelection(tags=("night",))) == [(11, 13)]
    assert store.learned.recent_use() == {("me", "night"): WeightedUse(seconds=120.0, at=1030.0)}
    assert store.learned.profile("0123") == Profile(count=2, durations_s=(10.0, 20.0))
    assert store.setting("paused") == "1"
    ready = {each.lane.priority: [job.job_id for job in each.jobs] for each in store.ready_queues()}
    assert ready[3] == [11, 12, 13]
    assert [job.growth for job in full] == [Growth()] * 3
    assert (spec.learns_memory, spec.preempts, spec.on_preempt) == (False, False, OnPreempt.SUSPEND)


def test_jobs_are_found_by_their_commands(reopened: Database) -> None:
    with contextlib.closing(open_reader(reopened.path)) as reader:
        search, page = Search(reader), PageRange(offset=0, count=99)
        found = [search.newest(JobFilter(search=text), page).ids for text in ("train.py", "a | b")]
    assert 1 in found[0]
    assert found[1] == [13]


def test_suspended_jobs_and_memory_growth_are_read_back(reopened: Database) -> None:
    store = JobStore(reopened)
    suspended = {job.id: (job, attempt) for job, attempt in store.live_attempts() if 13 < job.id < 18}
    assert [str(job.state) for job, _ in suspended.values()] == ["suspending", "suspended", "resuming"]
    job, attempt = suspended[15]
    assert (attempt.parked, attempt.suspended_at, attempt.suspended_s) == (SuspendedBy.FOR_ROOM, 1100.0, 30.0)
    assert (attempt.reserved_mb, attempt.predicted_mb) == (8192.0, 7000.0)
    assert attempt.usage is not None
    assert (attempt.usage.peaks_mb, attempt.usage.ram_mb) == ({"GPU-a": 6144.0, "GPU-b": 512.0}, 900.0)
    assert (attempt.usage.load_percent, attempt.usage.curve) == (55.0, ((0.5, 100.0), (9.0, 6144.0)))
    spec = job.spec
    assert (spec.learns_memory, spec.preempts, spec.on_preempt) == (True, True, OnPreempt.REQUEUE)
    assert spec.configuration == "c0ffee"
    grown = store.job(17)
    assert grown is not None
    assert grown.growth == Growth(count=1, memory_mb=10_240.0, ram_mb=2048.0)
    assert store.lane_of(17).sizes_each
    lack = store.attempts(17)[0].lack
    assert lack is not None
    assert (lack.shortage.where, lack.shortage.asked_mb) == (ShortageKind.DEVICE, 2048.0)
    assert lack.others == (("bob, pid 7", 2048.0), ("processes without a lease", None))
    profiles = dict(QueueQueries(reopened, store).profiles(10))
    assert list(profiles) == ["4567", "0123"]
    assert (profiles["4567"].peaks_mb, profiles["4567"].floor_mb) == ((6144.0, 6200.0), 8192.0)


def test_a_batch_is_read_back_with_its_pace_and_state(reopened: Database) -> None:
    store = JobStore(reopened)
    (queue,) = [each for each in store.ready_queues() if each.lane.pace is not None]
    assert [job.job_id for job in queue.jobs] == [20]
    assert (queue.lane.group, queue.lane.group_limit) == (18, 2)
    assert queue.lane.pace == BatchPace(
        max_cpu_percent=85.0, min_free_memory_mb=2048.0, max_gpu_percent=80.0, max_gpu_memory_mb=8000.0,
        run_ram_mb=512.0, smoothing_s=4.0, steady_s=2.0, stagger_s=1.5, sample_log="/data/me/samples.csv",
    )  # fmt: skip
    assert store.last_start_in_batch(18) == 1030.0
    assert BatchGates(JobTransitions(store)).saved_state(18) == BatchGateState(
        waits_s={"cpu": 12.5, "gpu-memory": 3.0}, unknown=("--max-gpu",)
    )
    assert QueueQueries(reopened, store).submission_of(18) == (18, 20, "batch")
    waiting = store.job(20)
    assert waiting is not None
    assert waiting.argv == ("sim_view", "--seed", "72")


def test_the_database_is_private_to_its_user_and_keeps_committed_changes(opened: Opener, path: Path) -> None:
    opened(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    database = opened(path)
    with database.transaction():
        database.execute("INSERT INTO settings VALUES ('a', '1')")
    database.close()
    assert settings_of(opened(path))["a"] == "1"


@pytest.mark.parametrize("damage", ["garbage", "a page in the middle", "cut short"])
def test_a_damaged_database_is_set_aside_and_an_empty_one_started(opened: Opener, path: Path, damage: str) -> None:
    opened(path).close()
    sound = path.read_bytes()
    spoiled = {
        "garbage": b"nothing like a database" * 100,
        "a page in the middle": sound[:8192] + b"\xff" * 4096 + sound[12288:],
        "cut short": sound[: len(sound) // 2],
    }[damage]
    path.write_bytes(spoiled)
    database, notice = open_database(path)
    (aside,) = path.parent.glob("queue.db.damaged-*")
    assert aside.read_bytes() == spoiled
    assert notice == f"the queue's database was damaged: gpuyard set aside the file as {aside} and started an empty one"
    assert settings_of(database) == {"next_id": "1"}
    database.close()


def test_a_damaged_database_is_set_aside_with_its_log(opened: Opener, path: Path) -> None:
    """If another process still has the damaged file open, SQLite would apply its log to the empty one."""
    with contextlib.closing(opened(path)) as before:
        before.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with before.transaction():
            before.execute("INSERT INTO settings VALUES ('a', '1')")
        log = Path(f"{path}-wal").read_bytes()
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(b"\xff" * 4096)
        database, _ = open_database(path)
        assert settings_of(database) == {"next_id": "1"}
        (aside,) = path.parent.glob("queue.db.damaged-*-wal")
        assert aside.read_bytes() == log
        database.close()


def test_a_folder_that_cannot_be_made_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentFault, match="file cannot be used"):
        open_database(tmp_path / "file" / "queue.db")


def test_a_database_that_cannot_be_private_is_refused_and_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.chmod", refuse)
    with pytest.raises(EnvironmentFault, match="Operation not permitted") as caught:
        open_database(path)
    assert path.exists()
    assert str(path) not in {file.path for file in psutil.Process().open_files()}, caught.value


def test_a_transaction_that_raises_is_rolled_back(opened: Opener) -> None:
    database = opened(None)

    def interrupted() -> None:
        with database.transaction():
            database.execute("INSERT INTO settings VALUES ('a', '1')")
            assert database.in_transaction
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not database.in_transaction
    assert settings_of(database) == {"next_id": "1"}


def test_other_connections_do_not_see_an_open_transaction(opened: Opener, path: Path) -> None:
    database, other = opened(path), opened(path)
    with database.transaction():
        database.execute("INSERT INTO settings VALUES ('a', '1')")
        assert "a" not in settings_of(other)
    assert settings_of(other)["a"] == "1"


def test_a_reader_does_not_block_writers_and_sees_one_snapshot(opened: Opener, path: Path) -> None:
    database = opened(path)
    with contextlib.closing(open_reader(path)) as reader:
        reader.execute("BEGIN")
        count = "SELECT count(*) FROM settings"
        before = reader.execute(count).fetchone()
        with database.transaction():
            database.execute("INSERT INTO settings VALUES ('a', '1')")
        assert reader.execute(count).fetchone() == before
        reader.execute("COMMIT")
        assert reader.execute(count).fetchone() != before


def test_only_a_synced_transaction_waits_for_the_disk(opened: Opener, path: Path) -> None:
    database = opened(path)

    def level() -> int:
        return int(database.execute("PRAGMA synchronous").fetchone()[0])

    normal, full = 1, 2
    with database.transaction(is_synced=True):
        assert level() == full
    assert level() == normal
    with pytest.raises(ZeroDivisionError), database.transaction(is_synced=True):
        raise ZeroDivisionError
    assert level() == normal


def test_a_full_disk_is_reported_and_loses_no_committed_data(opened: Opener, path: Path) -> None:
    database = opened(path)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFault, match="cannot be written") as caught, database.transaction():
        database.execute("INSERT INTO specs (body, command) VALUES (?, '')", ("x" * 100_000,))
    assert not caught.value.is_damage
    assert caught.value.hint == "free some disk space, then try again"
    assert database.execute("SELECT count(*) FROM specs").fetchone() == (0,)


def test_damage_found_later_says_how_to_recover() -> None:
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    with pytest.raises(StoreFault, match="is damaged: malformed") as caught, convert_sqlite_errors():
        raise error
    assert caught.value.is_damage
    assert caught.value.hint is not None
    assert "`gpuyard daemon restart`" in caught.value.hint
