"""A daemon whose wall clock is set while it runs, or before it restarts: limits go on, and shown times are right."""

import datetime as dt
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock_shift import ClockShift
from tests.integration.queue_fixture import DEADLINE_S, QueueUnderTest, until

pytestmark = pytest.mark.linux("LD_PRELOAD")
DAY_S = 86_400.0


@pytest.fixture
def shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClockShift:
    """The clock of all processes that the test starts. Request it before the queue."""
    shift = ClockShift(tmp_path)
    for name, value in shift.environment.items():
        monkeypatch.setenv(name, value)
    return shift


def ago(shift: ClockShift, shown: str) -> float:
    """Return how long ago a shown time is, by the clock of the daemon."""
    return time.time() + shift.wall_s - dt.datetime.fromisoformat(shown).timestamp()


def run_another(queue: QueueUnderTest) -> None:
    """Run a job to its end: the daemon has done steps since."""
    queue.wait(queue.submit("true", gpus=0))


def is_recent(shift: ClockShift, *shown: str) -> bool:
    return all(-1.0 <= ago(shift, each) <= 2 * DEADLINE_S for each in shown)


def shown_times(queue: QueueUnderTest, job_id: int) -> list[str]:
    """Return all times that the daemon shows of a job: its row, its attempts and its history."""
    job = queue.job(job_id)
    rows: list[dict[str, Any]] = [job, *job["attempts"], *queue.get(f"/jobs/{job_id}/history")["events"]]
    return [row[key] for row in rows for key in ("submitted_at", "started_at", "ended_at", "at") if row.get(key)]


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_step_of_the_clock_does_not_end_a_job_with_a_time_limit(
    shift: ClockShift, queue: QueueUnderTest, step_s: float
) -> None:
    job_id, gate = queue.start_gated(time_limit="10m")
    shift.step(step_s)
    run_another(queue)
    queue.restart()
    run_another(queue)
    assert queue.state(job_id) == "running"
    gate.write_text("go\n")
    queue.wait(job_id)
    assert queue.job(job_id)["outcome"] == "succeeded"


def test_a_time_limit_ends_a_job_after_the_clock_was_set_back(shift: ClockShift, queue: QueueUnderTest) -> None:
    job_id, _ = queue.start_gated(time_limit="3s")
    shift.step(-DAY_S)
    queue.wait(job_id)
    assert queue.job(job_id)["outcome"] == "timed-out"


def test_a_time_limit_ends_a_job_after_the_clock_was_set_back_and_the_daemon_restarted(
    shift: ClockShift, queue: QueueUnderTest
) -> None:
    job_id, _ = queue.start_gated(time_limit="3s")
    queue.kill9()
    shift.step(-DAY_S)
    queue.start()
    queue.wait(job_id)
    assert queue.job(job_id)["outcome"] == "timed-out"


def test_a_delayed_retry_starts_after_the_clock_was_set_back(shift: ClockShift, queue: QueueUnderTest) -> None:
    job_id = queue.submit("/no/such/program", gpus=0, retries=1)
    queue.until_state(job_id, "delayed")
    shift.step(-DAY_S)
    queue.wait(job_id)
    assert len(queue.job(job_id)["attempts"]) == 2


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_shown_times_follow_the_clock_and_ages_do_not(shift: ClockShift, queue: QueueUnderTest, step_s: float) -> None:
    done = queue.submit("true", gpus=0)
    queue.wait(done)
    running, _ = queue.start_gated()
    waiting = queue.submit("true", hold=True)
    before = queue.job(running)
    shift.step(step_s)
    run_another(queue)
    for _ in range(2):
        assert is_recent(shift, *(at for job_id in (done, running, waiting) for at in shown_times(queue, job_id)))
        after = queue.job(running)
        assert before["elapsed_s"] <= after["elapsed_s"] <= 2 * DEADLINE_S
        assert 0 <= queue.job(waiting)["waited_s"] <= 2 * DEADLINE_S
        assert 0 <= queue.job(done)["elapsed_s"] <= 2 * DEADLINE_S
        status, machine = queue.get("/status"), queue.get("/devices")
        assert is_recent(shift, status["started_at"], machine["taken_at"])
        assert 0 <= status["uptime_s"] <= 2 * DEADLINE_S
        timeline = queue.get("/timeline", span="10m")
        assert is_recent(shift, *(_iso(each["from"]) for each in timeline["stretches"]))
        assert {each["job"] for each in timeline["stretches"]} >= {done, running}
        report = queue.get("/report", since="1h")
        assert is_recent(shift, report["until"])
        queue.restart()


def test_times_of_a_machine_that_boots_with_a_wrong_clock_are_right_once_it_is_corrected(
    shift: ClockShift, own_queue: QueueUnderTest
) -> None:
    shift.step(-time.time() + 60)  # 1970
    own_queue.start()
    job_id, gate = own_queue.start_gated(time_limit="10m")
    shift.step(-shift.wall_s)
    run_another(own_queue)
    assert own_queue.state(job_id) == "running"
    gate.write_text("go\n")
    own_queue.wait(job_id)
    assert own_queue.job(job_id)["outcome"] == "succeeded"
    assert is_recent(shift, *shown_times(own_queue, job_id))


def test_an_end_while_no_daemon_ran_has_its_time_although_the_clock_was_set(
    shift: ClockShift, queue: QueueUnderTest
) -> None:
    job_id, gate = queue.start_gated()
    queue.kill9()
    gate.write_text("go\n")
    until(lambda: len((queue.home / "journal").read_text().split(f"\n{job_id}.1 ")) == 3, "the end in the journal")
    shift.step(DAY_S)
    queue.start()
    queue.wait(job_id)
    job = queue.job(job_id)
    assert 0 <= job["elapsed_s"] <= DEADLINE_S
    assert is_recent(shift, *shown_times(queue, job_id))


def test_the_log_of_the_daemon_names_a_step(shift: ClockShift, queue: QueueUnderTest) -> None:
    shift.step(DAY_S)
    run_another(queue)
    assert queue.daemon is not None
    daemon = queue.daemon
    until(lambda: "the system clock was set forward by 1d" in daemon.log, "the line in the log")


def test_the_time_in_which_the_machine_is_suspended_is_not_run_time_and_is_waiting_time(
    shift: ClockShift, queue: QueueUnderTest
) -> None:
    running, gate = queue.start_gated(time_limit="10m")
    waiting = queue.submit("true", hold=True)
    shift.suspend(3600)
    run_another(queue)
    queue.kill9()
    shift.suspend(3600)
    queue.start()
    run_another(queue)
    assert queue.state(running) == "running"
    assert queue.job(running)["elapsed_s"] < 600
    assert queue.job(waiting)["waited_s"] >= 7200
    events = queue.get(f"/jobs/{running}/history")["events"]
    assert ["1h" in each["text"] for each in events if each["kind"] == "asleep"] == [True, True]
    gate.write_text("go\n")
    queue.wait(running)
    assert queue.job(running)["outcome"] == "succeeded"
    assert queue.job(running)["elapsed_s"] < 600


def _iso(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).isoformat()
