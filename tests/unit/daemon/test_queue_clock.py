"""The next daemon continues the queue's clock, whatever the wall clock says by then."""

import logging
import time
from collections.abc import Callable

import pytest

from gpuyard.daemon import main as queue_clock
from gpuyard.daemon.main import StoredClock
from gpuyard.system.clock import since_boot
from tests.unit.store import QueueDb

DAY_S = 86_400.0
SLACK_S = 60.0
StepClock = Callable[[float], None]


def open_clock(queue_db: QueueDb) -> StoredClock:
    return StoredClock(queue_db.store, queue_db.queries)


def test_a_new_queue_or_one_with_an_unreadable_record_starts_at_the_wall_clock(queue_db: QueueDb) -> None:
    clock = open_clock(queue_db)
    assert clock.now() == pytest.approx(time.time(), abs=1.0)
    assert clock.to_wall(clock.now()) == pytest.approx(time.time(), abs=1.0)
    with queue_db.store.transaction():
        queue_db.store.set_setting("clock", "{}")
    assert open_clock(queue_db).now() == pytest.approx(time.time(), abs=1.0)


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_restarted_daemon_continues_the_clock_and_logs_the_step(
    queue_db: QueueDb, step_clock: StepClock, caplog: pytest.LogCaptureFixture, step_s: float
) -> None:
    before = open_clock(queue_db).now()
    step_clock(step_s)
    with caplog.at_level(logging.INFO):
        clock = open_clock(queue_db)
    assert before <= clock.now() <= before + SLACK_S
    assert clock.to_wall(clock.now()) == pytest.approx(time.time(), abs=1.0)
    assert f"was set {'forward' if step_s > 0 else 'back'} by 1d" in caplog.text


def test_a_step_is_stored_at_once(queue_db: QueueDb, step_clock: StepClock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = open_clock(queue_db)
    before = clock.now()
    step_clock(DAY_S)
    clock.save()
    booted = since_boot()
    monkeypatch.setattr(queue_clock, "boot_name", lambda: "the next boot")
    monkeypatch.setattr("gpuyard.system.clock.since_boot", lambda: since_boot() - booted)
    after = open_clock(queue_db)
    assert before <= after.now() <= before + SLACK_S
    assert after.to_wall(before) == pytest.approx(time.time(), abs=SLACK_S)


def test_a_new_boot_is_not_before_the_store(
    queue_db: QueueDb, step_clock: StepClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = open_clock(queue_db)
    (job_id,) = queue_db.add()
    with queue_db.store.transaction():
        queue_db.store.add_event(job_id, clock.now() + 100.0, "held", None)
    monkeypatch.setattr(queue_clock, "boot_name", lambda: "the next boot")
    step_clock(-56 * 365 * DAY_S)
    after = open_clock(queue_db)
    assert clock.now() + 90.0 <= after.now() <= clock.now() + 100.0 + SLACK_S
    assert after.to_wall(after.now()) == pytest.approx(time.time(), abs=1.0)
