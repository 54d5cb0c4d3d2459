"""The machine was restarted while jobs ran: what becomes of them, as asked for or by default.

A restart is made by ending the daemon and all processes of its jobs, and noting another boot for what they were.
"""

import contextlib
import sqlite3

from tests.integration.queue_fixture import Yard, processes_of, until

LONG = ("sleep", "3600")


def reboot(yard: Yard) -> None:
    running = {str(job["id"]) for job in yard.get("/jobs", state="running")["jobs"]}
    # One that is recorded as running may be about to be started, and nobody could kill it yet.
    until(lambda: running <= {words.get("GPUYARD_JOB_ID") for _, words in processes_of(yard.home)}, "their programs")
    yard.kill9()
    yard.kill_processes()
    with contextlib.closing(sqlite3.connect(yard.home / "queue.db")) as database, database:
        database.execute("UPDATE attempts SET boot_id = 'another' WHERE ended_at IS NULL")
    yard.start()


def test_jobs_go_the_way_that_was_asked_for_when_they_were_submitted(own_yard: Yard) -> None:
    yard = own_yard
    yard.home.mkdir()
    (yard.home / "config.toml").write_text("[queue]\ncpu_jobs = 8\n")
    yard.start()
    expected = {
        yard.submit(*LONG, gpus=0): "held",
        yard.submit(*LONG, gpus=0, retries=1): "running",
        yard.submit(*LONG, gpus=0, array="0-0"): "running",
        yard.submit(*LONG, gpus=0, retries=1, on_reboot="hold"): "held",
        yard.submit(*LONG, gpus=0, on_reboot="requeue"): "running",
        yard.submit(*LONG, gpus=0, retries=1, on_reboot="fail"): "failed",
    }
    until(lambda: yard.counts() == {"running": len(expected)}, "all of them at once")
    reboot(yard)
    for job_id, state in expected.items():
        until(lambda: yard.job(job_id)["attempts"][0]["outcome"], f"the end of job {job_id}'s first attempt")  # noqa: B023
        job = yard.until_state(job_id, state)
        first = job["attempts"][0]
        assert (first["outcome"], first["reason"]) == ("lost", "the machine was restarted while it ran")
        if state == "running":
            assert (job["attempt"], job["failures"]) == (2, 0)
        else:
            assert "the machine was restarted while it ran" in job["reason"]


def test_a_held_job_runs_again_from_its_beginning_when_it_is_released(yard: Yard) -> None:
    job_id = yard.submit(*LONG)
    yard.until_state(job_id, "running")
    reboot(yard)
    job = yard.job(job_id)
    assert f"gpuyard release {job['id']}" in job["reason"]
    yard.post("/jobs/release", ids=str(job["id"]))
    assert yard.until_state(job["id"], "running")["attempt"] == 2


def test_a_job_that_was_being_cancelled_is_cancelled(yard: Yard) -> None:
    job_id = yard.shell("trap '' TERM; while :; do sleep 0.05; done", on_reboot="requeue", grace="1h")
    yard.until_state(job_id, "running")
    yard.post("/jobs/cancel", ids=str(job_id))
    reboot(yard)
    assert yard.state(job_id) == "cancelled"


def test_what_ended_before_and_what_waited_is_as_it_was(yard: Yard) -> None:
    done = yard.submit("true")
    yard.wait(done)
    running = yard.submit(*LONG, gpus=2, on_reboot="fail")
    yard.until_state(running, "running")
    waiting, blocked = yard.submit("true", gpus=2), yard.submit("true", after=[str(running)])
    reboot(yard)
    assert yard.wait(waiting)["succeeded"] == 1
    assert [yard.state(job_id) for job_id in (done, running, blocked)] == ["succeeded", "failed", "rejected"]
