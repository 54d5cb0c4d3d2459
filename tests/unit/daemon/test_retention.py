"""The daemon keeps what `[keep]` says by itself, and leaves the loop to others meanwhile."""

import asyncio
import os
import time
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuyard.config import KeepConfig
from gpuyard.daemon import retention as retention_module
from gpuyard.daemon.retention import Retention
from gpuyard.errors import StoreFault
from gpuyard.model.lifecycle import JobState
from tests.unit.daemon.test_loop import DEADLINE_S, LoopFixture, open_loop

DAY_S = 86_400.0
IN_TIME_S = 30.0  # before the round after a minute


async def finished_jobs(loop: LoopFixture, *ages_s: float) -> list[int]:
    """Return jobs that ended this long ago."""
    store, ids = loop.scheduler.store, []
    for age in ages_s:
        ids.append(await loop.submit())
        with store.transaction():
            store.change_state(ids[-1], JobState.SUCCEEDED, ended_at=loop.clock.now() - age)
    return ids


def test_old_jobs_are_deleted_unasked_and_again_on_a_full_disk(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with open_loop(own_home) as loop:
            old, recent = await finished_jobs(loop, 91 * DAY_S, 89 * DAY_S)
            logs = own_home / "logs"
            logs.mkdir(exist_ok=True)
            for job_id in (old, recent):
                (logs / f"{job_id}.1.log").touch()
            retention = Retention(loop.scheduler, own_home)
            real, applied = retention.apply, asyncio.Event()
            failures = [RuntimeError("a bug"), StoreFault("the disk is full")]

            async def apply() -> None:
                if failures:
                    raise failures.pop()
                await real()
                applied.set()

            monkeypatch.setattr(retention, "apply", apply)
            monkeypatch.setattr(retention_module, "_FIRST_AFTER_S", 0.0)
            monkeypatch.setattr(retention_module, "_EVERY_S", 0.01)
            monkeypatch.setattr(retention_module, "_AFTER_FAILURE_S", 0.0, raising=False)
            task = asyncio.create_task(retention.run())
            async with asyncio.timeout(DEADLINE_S):
                await applied.wait()
            task.cancel()
            retention.close()
            assert (loop.scheduler.store.job(old), failures, retention.kept_files().logs) == (None, [], 1)
            assert loop.scheduler.store.job(recent) is not None
            assert [path.name for path in logs.iterdir()] == [f"{recent}.1.log"]

    asyncio.run(story())


def test_a_log_is_old_if_queue_and_wall_clock_say_so(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "load_config", lambda: SimpleNamespace(keep=KeepConfig(logs="30d")))

    async def story() -> None:
        async with open_loop(own_home) as loop:
            old, recent, changed = await finished_jobs(loop, 31 * DAY_S, 29 * DAY_S, 31 * DAY_S)
            logs = own_home / "logs"
            logs.mkdir(exist_ok=True)
            for job_id in (old, recent, changed):
                (logs / f"{job_id}.1.log").touch()
            long_ago = time.time() - 40 * DAY_S
            for job_id in (old, recent):
                os.utime(logs / f"{job_id}.1.log", (long_ago, long_ago))
            retention = Retention(loop.scheduler, own_home)
            done = await retention.apply()
            retention.close()
            assert (done.jobs, done.logs) == (0, 1)
            assert {path.name for path in logs.iterdir()} == {f"{recent}.1.log", f"{changed}.1.log"}

    asyncio.run(story())


def test_secrets_that_could_not_be_dropped_are_dropped_later(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with open_loop(own_home) as loop:
            retention, specs = Retention(loop.scheduler, own_home), loop.scheduler.store.specs
            real, failures, dropped = specs.drop_secrets, [StoreFault("the disk is full")], asyncio.Event()

            def drop() -> Generator[None, None, None]:
                if failures:
                    raise failures.pop()
                yield from real()
                dropped.set()

            monkeypatch.setattr(specs, "drop_secrets", drop)
            monkeypatch.setattr(retention_module, "_DROP_SECRETS_AFTER_S", 0.0)
            monkeypatch.setattr(retention_module, "_AFTER_FAILURE_S", 0.0, raising=False)
            retention._has_ended.set()  # as after the end of the last job
            task = asyncio.create_task(retention.run())
            async with asyncio.timeout(IN_TIME_S):
                await dropped.wait()
            task.cancel()
            retention.close()

    asyncio.run(story())


def test_deleting_many_jobs_lets_other_tasks_run_after_each_piece(own_home: Path) -> None:
    async def story() -> None:
        async with open_loop(own_home) as loop:
            await finished_jobs(loop, *[91 * DAY_S] * 120)
            retention, turns = Retention(loop.scheduler, own_home), 0

            async def count() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            counting = asyncio.create_task(count())
            done = await retention.apply()
            counting.cancel()
            retention.close()
            assert (done.jobs, done.logs) == (120, 0)
            assert turns > 5

    asyncio.run(story())
