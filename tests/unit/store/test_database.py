"""The database as a file: schemas old and new, damage, and transactions."""

import contextlib
import errno
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gpuyard.control.batch_gates import BatchGates, BatchGateState
from gpuyard.control.transitions import JobTransitions
from gpuyard.core.job.job import DependencyKind, Growth, OnPreempt, OnReboot, Outcome, OutcomeKind, SuspendedBy
from gpuyard.core.job.lifecycle import JobState
from gpuyard.core.job.selection import JobSelection
from gpuyard.core.lease import Need
from gpuyard.core.memory.estimates import Profile
from gpuyard.core.memory.out_of_memory import ShortageKind
from gpuyard.core.scheduling.batch_pacing import BatchPace
from gpuyard.core.scheduling.queue_order import WeightedUse
from gpuyard.core.snapshot import Vendor
from gpuyard.errors import EnvironmentFault, StoreFault
from gpuyard.store.database import Database, faults_told, migrations, open_database, open_reader
from gpuyard.store.job_search import JobFilter, PageRange, Search
from gpuyard.store.job_store import JobStore
from gpuyard.store.queue_queries import QueueQueries

DATA = Path(__file__).parents[2] / "data"
RELEASED = sorted(DATA.glob("queue-schema-*.db"))


def has_suspended(released: Path) -> bool:
    """Schema 2 brought the states of suspension and what is learned of memory."""
    return int(released.stem.rpartition("-")[2]) >= 2


def has_batch(released: Path) -> bool:
    return int(released.stem.rpartition("-")[2]) >= 3


def has_handed_over(released: Path) -> bool:
    return int(released.stem.rpartition("-")[2]) >= 4


def schema_of(database: Database) -> set[tuple[str, str, str]]:
    return set(database.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())


def settings_of(database: Database) -> dict[str, str]:
    return dict(database.execute("SELECT name, value FROM settings").fetchall())


Opener = Callable[[Path | None], Database]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens a database that nothing is wrong with, and closes it after the test."""
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


# Schemas


def test_every_schema_has_its_file() -> None:
    assert [each.name for each in RELEASED] == [f"queue-schema-{n}.db" for n in range(1, len(migrations()) + 1)]


@pytest.mark.parametrize("released", RELEASED, ids=lambda each: each.stem)
def test_an_old_database_is_brought_to_the_schema_that_a_new_one_has(
    opened: Opener, released: Path, tmp_path: Path
) -> None:
    new = opened(None)
    old = opened(Path(shutil.copy(released, tmp_path)))
    assert schema_of(old) == schema_of(new)
    assert old.execute("PRAGMA user_version").fetchone() == (len(migrations()),)
    assert old.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize("released", RELEASED, ids=lambda each: each.stem)
def test_every_job_of_an_old_database_is_still_there(opened: Opener, released: Path, tmp_path: Path) -> None:
    database = opened(Path(shutil.copy(released, tmp_path)))
    store = JobStore(database)
    catalogue = QueueQueries(database, store)
    ids = list(catalogue.ids(1, catalogue.last_id()))
    jobs = {job.id: job for job_id in ids if (job := store.job(job_id)) is not None}
    later = {14: "suspending", 15: "suspended", 16: "resuming", 17: "queued"} if has_suspended(released) else {}
    later |= {18: "succeeded", 19: "running", 20: "queued"} if has_batch(released) else {}
    later |= {21: "pending", 22: "running"} if has_handed_over(released) else {}
    assert {job_id: str(job.state) for job_id, job in jobs.items()} == {
        1: "queued", 2: "held", 3: "blocked", 4: "delayed", 5: "running", 6: "stopping", 7: "succeeded", 8: "failed",
        9: "cancelled", 10: "rejected", 11: "queued", 12: "queued", 13: "queued",
        **later,
    }  # fmt: skip
    counted = Counter(job.state for job in jobs.values())
    assert store.counts() == {state: counted[state] for state in JobState}
    assert set(store.counts().values()) == {0: {0, 1, 4}, 4: {0, 1, 5}, 7: {0, 1, 2, 6}, 9: {1, 2, 3, 6}}[len(later)]
    plain = jobs[1].spec
    assert (plain.command, plain.environment, plain.need) == (("python", "train.py"), {"LANG": "caf\udce9"}, Need())
    assert (jobs[2].reason, jobs[10].reason) == ("held when it was submitted", "in vain")
    assert (jobs[4].due_at, jobs[4].failures, jobs[4].attempts) == (1030.0, 1, 1)
    assert jobs[7].outcome == Outcome(kind=OutcomeKind.SUCCEEDED, status=0)
    assert jobs[8].outcome == Outcome(kind=OutcomeKind.FAILED, status=3, reason="exit status 3")
    assert store.submitted("sent-once") == (1, 1)


@pytest.mark.parametrize("released", [each for each in RELEASED if has_handed_over(each)], ids=lambda each: each.stem)
def test_what_was_handed_over_by_an_old_daemon_is_known_where_it_is(
    opened: Opener, released: Path, tmp_path: Path
) -> None:
    store = JobStore(opened(Path(shutil.copy(released, tmp_path))))
    live = {job.id: (job, attempt) for job, attempt in store.live()}
    (waits, there), (runs, begun) = live[21], live[22]
    assert (there.engine, there.site_id, there.place, there.has_started) == ("slurm", "21_0", None, False)
    assert (begun.engine, begun.site_id, begun.place, begun.has_started) == ("slurm", "22_0", "n0", True)
    assert (waits.started_at, runs.started_at) == (None, begun.started_at)
    assert (waits.spec.engine, waits.spec.engine_options, waits.spec.cpus) == ("slurm", ("--partition=big",), 4)


@pytest.mark.parametrize("released", RELEASED, ids=lambda each: each.stem)
def test_all_that_an_old_database_knows_of_its_jobs_is_read_back(
    opened: Opener, released: Path, tmp_path: Path
) -> None:
    database = opened(Path(shutil.copy(released, tmp_path)))
    store = JobStore(database)
    catalogue = QueueQueries(database, store)
    full = [job for job_id in (11, 12, 13) if (job := store.job(job_id)) is not None]
    assert [job.words for job in full] == [("run", "1e-3"), ("run", "{lr}"), ("/bin/sh", "-c", "a | b")]
    assert {(job.group, job.group_limit, job.priority) for job in full} == {(11, 2, 3)}
    spec = full[0].spec
    assert spec.need == Need(
        devices=2, memory_mb=8192.0, is_exclusive=False, vendor=Vendor.NVIDIA, model="H100", banned=("GPU-x",)
    )
    assert (spec.name, spec.tag, spec.retries, spec.on_reboot, spec.stdin) == (
        "big", "night", 2, OnReboot.REQUEUE, "in.txt",
    )  # fmt: skip
    assert (spec.time_limit_s, spec.grace_s, spec.duration_s, spec.log_cap_mb) == (3600.0, 5.0, 600.0, 64.0)
    assert [(job.id, attempt.pid, attempt.stopping) for job, attempt in store.live() if job.id <= 13] == [
        (5, 4005, None), (6, 4006, OutcomeKind.CANCELLED),
    ]  # fmt: skip
    assert [attempt.outcome and attempt.outcome.kind for attempt in store.attempts(7)] == ["failed", "succeeded"]
    assert store.attempts(5)[0].devices == ("GPU-a", "GPU-b")
    assert store.dependencies(3) == [
        (1, DependencyKind.OK, JobState.QUEUED), (2, DependencyKind.ANY, JobState.HELD),
    ]  # fmt: skip
    assert catalogue.story(8) == [(1020.0, "failed", "exit status 3")]
    assert catalogue.ranges(JobSelection(tags=("night",))) == [(11, 13)]
    assert store.learned.uses() == {("me", "night"): WeightedUse(seconds=120.0, at=1030.0)}
    assert store.learned.profile("0123") == Profile(count=2, least_s=10.0, mean_s=15.0, most_s=20.0)
    assert store.setting("paused") == "1"
    ready = {each.lane.priority: [job.job_id for job in each.jobs] for each in store.ready_queues()}
    assert ready[3] == [11, 12, 13]
    assert [job.growth for job in full] == [Growth()] * 3
    assert (spec.learns_memory, spec.preempts, spec.on_preempt) == (False, False, OnPreempt.SUSPEND)


@pytest.mark.parametrize("released", RELEASED, ids=lambda each: each.stem)
def test_jobs_of_an_old_database_are_found_by_their_commands(opened: Opener, released: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(released, tmp_path))
    opened(copy)
    with contextlib.closing(open_reader(copy)) as reader:
        search = Search(reader)
        found = [
            search.newest(JobFilter(search=words), PageRange(offset=0, count=99)).ids for words in ("train.py", "a | b")
        ]
    assert 1 in found[0]
    assert found[1] == [13]


@pytest.mark.parametrize("released", [each for each in RELEASED if has_suspended(each)], ids=lambda each: each.stem)
def test_what_was_suspended_or_ran_out_of_memory_in_an_old_database_still_is(
    opened: Opener, released: Path, tmp_path: Path
) -> None:
    database = opened(Path(shutil.copy(released, tmp_path)))
    store = JobStore(database)
    apart = {job.id: (job, attempt) for job, attempt in store.live() if 13 < job.id < 18}
    assert [str(job.state) for job, _ in apart.values()] == ["suspending", "suspended", "resuming"]
    job, attempt = apart[15]
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
    profiles = dict(QueueQueries(database, store).profiles(10))
    assert list(profiles) == ["4567", "0123"]
    assert (profiles["4567"].peaks_mb, profiles["4567"].floor_mb) == ((6144.0, 6200.0), 8192.0)


@pytest.mark.parametrize("released", [each for each in RELEASED if has_batch(each)], ids=lambda each: each.stem)
def test_a_batch_of_an_old_database_goes_on_at_its_pace(opened: Opener, released: Path, tmp_path: Path) -> None:
    database = opened(Path(shutil.copy(released, tmp_path)))
    store = JobStore(database)
    (queue,) = [each for each in store.ready_queues() if each.lane.pace is not None]
    assert [job.job_id for job in queue.jobs] == [20]
    assert (queue.lane.group, queue.lane.group_limit) == (18, 2)
    assert queue.lane.pace == BatchPace(
        max_cpu_percent=85.0,
        min_free_memory_mb=2048.0,
        max_gpu_percent=80.0,
        max_gpu_memory_mb=8000.0,
        run_ram_mb=512.0,
        smoothing_s=4.0,
        steady_s=2.0,
        stagger_s=1.5,
        sample_log="/data/me/samples.csv",
    )
    assert store.last_start(18) == 1030.0
    assert BatchGates(JobTransitions(store)).batch(18) == BatchGateState(
        waits_s={"cpu": 12.5, "gpu-memory": 3.0}, unknown=("--max-gpu",)
    )
    assert QueueQueries(database, store).submission_of(18) == (18, 20, "batch")
    waiting = store.job(20)
    assert waiting is not None
    assert waiting.words == ("sim_view", "--seed", "72")


def test_a_schema_of_a_newer_version_is_refused_and_left_alone(opened: Opener, path: Path) -> None:
    known = len(migrations())
    database = opened(path)
    database.execute(f"PRAGMA user_version = {known + 1}")
    database.close()
    before = path.read_bytes()
    refusal = f"has schema {known + 1}, and this gpuyard knows up to {known}"
    with pytest.raises(EnvironmentFault, match=refusal) as caught:
        open_database(path)
    assert caught.value.hint == "a newer gpuyard made it: use that one"
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == ["queue.db"]


def test_states_in_the_schema_are_those_of_the_core(opened: Opener) -> None:
    database = opened(None)
    assert {state for (state,) in database.execute("SELECT state FROM counts")} == set(JobState)


# The file


def test_what_is_kept_is_the_users_alone(opened: Opener, path: Path) -> None:
    opened(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_committed_is_there_when_it_is_opened_again(opened: Opener, path: Path) -> None:
    database = opened(path)
    with database.transaction():
        database.execute("INSERT INTO settings VALUES ('a', '1')")
    database.close()
    assert settings_of(opened(path))["a"] == "1"


@pytest.mark.parametrize("damage", ["garbage", "a page in the middle", "cut short"])
def test_a_damaged_database_is_set_aside_and_an_empty_one_begun(opened: Opener, path: Path, damage: str) -> None:
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
    assert notice == f"the queue's database was damaged; it was set aside as {aside}, and an empty one begun"
    assert settings_of(database) == {"next_id": "1"}
    database.close()


def test_a_damaged_database_takes_its_log_along(opened: Opener, path: Path) -> None:
    """Left behind, the log of one that somebody still has open would be read as the empty one's."""
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


def test_a_database_that_cannot_be_made_private_is_refused_and_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.chmod", refuse)
    with pytest.raises(EnvironmentFault, match="Operation not permitted") as caught:
        open_database(path)
    assert path.exists()
    assert str(path) not in {file.path for file in psutil.Process().open_files()}, caught.value


# Transactions


def test_a_transaction_happens_as_a_whole_or_not_at_all(opened: Opener) -> None:
    database = opened(None)

    def interrupted() -> None:
        with database.transaction():
            database.execute("INSERT INTO settings VALUES ('a', '1')")
            assert database.is_changing
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not database.is_changing
    assert settings_of(database) == {"next_id": "1"}


def test_nobody_else_sees_half_of_a_transaction(opened: Opener, path: Path) -> None:
    database, other = opened(path), opened(path)
    with database.transaction():
        database.execute("INSERT INTO settings VALUES ('a', '1')")
        assert "a" not in settings_of(other)
    assert settings_of(other)["a"] == "1"


def test_who_reads_keeps_nobody_from_writing_and_sees_one_moment(opened: Opener, path: Path) -> None:
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


def test_a_full_disk_is_told_as_such_and_costs_nothing_that_was_written(opened: Opener, path: Path) -> None:
    database = opened(path)
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreFault, match="cannot be written") as caught, database.transaction():
        database.execute("INSERT INTO specs (body) VALUES (?)", ("x" * 100_000,))
    assert not caught.value.is_damage
    assert caught.value.hint == "free some disk space, then try again"
    assert database.execute("SELECT count(*) FROM specs").fetchone() == (0,)


def test_damage_that_shows_later_says_how_to_go_on() -> None:
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    with pytest.raises(StoreFault, match="is damaged: malformed") as caught, faults_told():
        raise error
    assert caught.value.is_damage
    assert caught.value.hint == "restart: gpuyard daemon stop"
