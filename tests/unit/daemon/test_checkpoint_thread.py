"""The daemon's loop goes on while threads wait for the disk."""

import asyncio
import contextlib
import errno
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import StoreFault
from gpuyard.store import checkpoints as checkpoint_thread
from gpuyard.store.checkpoints import CheckpointThread, WalCheckpoints
from gpuyard.store.database import Database, open_database, open_reader

_DEADLINE_S = 30.0
_LIMIT = 64 << 10


class Fixture:
    def __init__(self, home: Path) -> None:
        self.path = home / "queue.db"
        self.log = Path(f"{self.path}-wal")
        self.database: Database = open_database(self.path)[0]
        self.resumes = 0
        self.thread = CheckpointThread(self.database, self._resume)

    def _resume(self) -> None:
        self.resumes += 1

    def has_resumed(self, times: int) -> bool:
        return self.resumes >= times

    def write(self, number: int, *, is_synced: bool = False) -> None:
        with self.database.transaction(is_synced=is_synced):
            self.database.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (str(number), "x" * 3000))

    def in_file(self) -> set[str]:
        """Return the settings in the file, without its log."""
        with contextlib.closing(sqlite3.connect(f"file:{self.path}?immutable=1", uri=True)) as file:
            return {name for (name,) in file.execute("SELECT name FROM settings")}

    def fill_log(self) -> None:
        """Write until a checkpoint is due."""
        for number in range(_LIMIT // 3000 + 1):
            self.write(number)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DEADLINE_S):
                while not condition():  # noqa: ASYNC110 - threads and files change it
                    await asyncio.sleep(0.001)
        assert condition(), f"never came: {what}"


Scenario = Callable[[Fixture], Coroutine[Any, Any, None]]


class Held:
    """A method of WalCheckpoints that waits for the test, as it would for a slow disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.is_reached, self.goes_on = threading.Event(), threading.Event()
        act = getattr(WalCheckpoints, name)

        def wait(files: WalCheckpoints, *arguments: object, **options: object) -> object:
            self.is_reached.set()
            assert self.goes_on.wait(_DEADLINE_S)
            return act(files, *arguments, **options)

        monkeypatch.setattr(WalCheckpoints, name, wait)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setattr(checkpoint_thread, "_LOG_LIMIT", _LIMIT)
    monkeypatch.setattr(checkpoint_thread, "_LARGE_LOG", 2 * _LIMIT)
    monkeypatch.setattr(checkpoint_thread, "_RETRY_S", 0.01)
    monkeypatch.setattr(checkpoint_thread, "_LOOK_S", 10 * _DEADLINE_S)

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Fixture]:
        fixture = Fixture(tmp_path)
        fixture.thread.start()
        try:
            yield fixture
        finally:
            fixture.thread.close()
            fixture.database.close()

    def run_scenario(scenario: Scenario) -> None:
        async def inner() -> None:
            async with opened() as fixture:
                await scenario(fixture)

        asyncio.run(inner())

    return run_scenario


Run = Callable[[Scenario], None]


def test_a_log_that_has_grown_is_emptied_however_much_is_written(run: Run) -> None:
    async def scenario(queue: Fixture) -> None:
        for number in range(1, 11):
            queue.fill_log()
            await queue.until(partial(queue.has_resumed, number), "an emptied log")
        assert queue.log.stat().st_size < 8 * _LIMIT, "of 46"
        assert queue.thread.notices() == []

    run(scenario)


def test_the_loop_writes_while_most_of_the_log_is_copied(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Held(monkeypatch, "copy")

    async def scenario(queue: Fixture) -> None:
        queue.fill_log()
        await queue.until(copy.is_reached.is_set, "a checkpoint")
        assert not queue.thread.is_paused
        await queue.thread.may_write()
        queue.write(1000)
        copy.goes_on.set()
        await queue.until(lambda: queue.resumes, "an emptied log")

    run(scenario)


def test_changes_wait_for_the_rest_and_the_loop_does_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Held(monkeypatch, "empty")

    async def scenario(queue: Fixture) -> None:
        queue.fill_log()
        await queue.until(empty.is_reached.is_set, "the end of a checkpoint")
        assert queue.thread.is_paused
        change = asyncio.create_task(queue.thread.may_write())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not change.done()
        assert queue.resumes == 0
        empty.goes_on.set()
        await change
        await queue.until(lambda: queue.resumes == 1, "a step")

    run(scenario)


def test_a_quiet_queue_is_saved(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_thread, "_LOOK_S", 0.001)

    async def scenario(queue: Fixture) -> None:
        queue.write(1)
        await queue.until(lambda: not queue.database.has_unsaved, "the save")
        queue.write(2)
        await queue.until(lambda: not queue.database.has_unsaved, "the next save")

    run(scenario)


def test_a_program_that_reads_on_and_on_is_reported_until_it_ends(run: Run) -> None:
    async def scenario(queue: Fixture) -> None:
        with contextlib.closing(open_reader(queue.path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT 1 FROM jobs").fetchone()

            def is_reported() -> bool:
                queue.write(1)
                return bool(queue.thread.notices())

            await queue.until(is_reported, "the notice")
            (notice,) = queue.thread.notices()
            assert "because another program keeps reading queue.db: end that program" in notice
            reader.execute("COMMIT")

        def is_mended() -> bool:
            queue.write(1)
            return not queue.thread.notices()

        await queue.until(is_mended, "a log without a reader")

    run(scenario)


def test_a_full_disk_is_reported_and_a_later_checkpoint_succeeds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, is_full = WalCheckpoints.copy, True

    def fail(files: WalCheckpoints) -> None:
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        copy(files)

    monkeypatch.setattr(WalCheckpoints, "copy", fail)

    async def scenario(queue: Fixture) -> None:
        nonlocal is_full
        queue.fill_log()
        await queue.until(queue.thread.notices, "the notice")
        assert "database or disk is full. Free some disk space" in queue.thread.notices()[0]
        is_full = False

        def is_mended() -> bool:
            queue.write(1)
            return not queue.thread.notices()

        await queue.until(is_mended, "the next checkpoint")

    run(scenario)


def test_a_request_waits_for_the_disk_and_shares_a_sync(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[None] = []
    sync = WalCheckpoints.sync

    def count(files: WalCheckpoints) -> None:
        syncs.append(None)
        sync(files)

    monkeypatch.setattr(WalCheckpoints, "sync", count)
    held = Held(monkeypatch, "sync")

    async def scenario(queue: Fixture) -> None:
        await queue.thread.synced()
        queue.write(1)
        await queue.thread.synced()
        assert not syncs, "nothing has to be synced"
        queue.write(2, is_synced=True)
        assert queue.thread.has_unsynced
        first = asyncio.create_task(queue.thread.synced())
        await queue.until(held.is_reached.is_set, "a sync")
        queue.write(3, is_synced=True)
        others = [asyncio.create_task(queue.thread.synced()) for _ in range(5)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not first.done()
        held.goes_on.set()
        await asyncio.gather(first, *others)
        assert len(syncs) == 2
        assert not queue.thread.has_unsynced

    run(scenario)


def test_a_request_that_is_cancelled_leaves_the_sync_to_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, "sync")

    async def scenario(queue: Fixture) -> None:
        queue.write(1, is_synced=True)
        gone, stays = (asyncio.create_task(queue.thread.synced()) for _ in range(2))
        await queue.until(held.is_reached.is_set, "a sync")
        gone.cancel()
        held.goes_on.set()
        await stays
        assert gone.cancelled()
        assert not queue.thread.has_unsynced

    run(scenario)


def test_a_disk_that_does_not_store_is_reported_to_the_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: WalCheckpoints) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(WalCheckpoints, "sync", fail)

    async def scenario(queue: Fixture) -> None:
        queue.write(1, is_synced=True)
        with pytest.raises(StoreFault, match=r"may be lost in a power cut: .*Input/output error"):
            await queue.thread.synced()
        assert queue.thread.has_unsynced

    run(scenario)


def test_a_close_during_a_checkpoint_loses_nothing(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Held(monkeypatch, "copy")

    async def scenario(queue: Fixture) -> None:
        queue.fill_log()
        await queue.until(copy.is_reached.is_set, "a checkpoint")
        copy.goes_on.set()

    run(scenario)
    assert not (tmp_path / "queue.db-wal").exists()
    database, notice = open_database(tmp_path / "queue.db")
    with contextlib.closing(database):
        assert notice is None
        assert len(database.column("SELECT name FROM settings WHERE length(value) = 3000")) == _LIMIT // 3000 + 1


def test_a_database_in_memory_needs_none() -> None:
    async def scenario() -> None:
        database, _ = open_database(None)
        thread = CheckpointThread(database, lambda: None)
        thread.start()
        with database.transaction(is_synced=True):
            database.execute("INSERT INTO settings VALUES ('a', '1')")
        await thread.synced()
        assert not thread.has_unsynced
        thread.close()
        database.close()

    asyncio.run(scenario())
