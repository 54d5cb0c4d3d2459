"""The machine was restarted while jobs ran: what becomes of them, as asked for or by default.

A restart is made by ending the daemon and all processes of its jobs, and noting another boot for what they were.
"""

import contextlib
import sqlite3

from tests.integration.queue_fixture import QueueUnderTest, processes_of, until

LONG = ("sleep", "3600")


def reboot(queue: QueueUnderTest) -> None:
    running = {str(job["id"]) for job in queue.get("/jobs", state="running")["jobs"]}
    # One that is recorded as running may be about to be started, and nobody could kill it yet.
    until(lambda: running <= {words.get("GPUYARD_JOB_ID") for _, words in processes_of(queue.home)}, "their programs")
    queue.kill9()
    queue.kill_processes()
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database, database:
        database.execute("UPDATE attempts SET boot_id = 'another' WHERE ended_at IS NULL")
    queue.start()


def test_jobs_go_the_way_that_was_asked_for_when_they_were_submitted(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.home.mkdir()
    (queue.home / "config.toml").write_text("[queue]\ncpu_jobs = 8\n")
    queue.start()
    expected = {
        queue.submit(*LONG, gpus=0): "held",
        queue.submit(*LONG, gpus=0, retries=1): "running",
        queue.submit(*LONG, gpus=0, array="0-0"): "running",
        queue.submit(*LONG, gpus=0, retries=1, on_reboot="hold"): "held",
        queue.submit(*LONG, gpus=0, on_reboot="requeue"): "running",
        queue.submit(*LONG, gpus=0, retries=1, on_reboot="fail"): "failed",
    }
    until(lambda: queue.counts() == {"running": len(expected)}, "all of them at once")
    reboot(queue)
    for job_id, state in expected.items():
        until(lambda: queue.job(job_id)["attempts"][0]["outcome"], f"the end of job {job_id}'s first attempt")  # noqa: B023
        job = queue.until_state(job_id, state)
        first = job["attempts"][0]
        assert (first["outcome"], first["reason"]) == ("lost", "the machine was restarted while it ran")
        if state == "running":
            assert (job["attempt"], job["failures"]) == (2, 0)
        else:
            assert "the machine was restarted while it ran" in job["reason"]


def test_a_held_job_runs_again_from_its_beginning_when_it_is_released(queue: QueueUnderTest) -> None:
    job_id = queue.submit(*LONG)
    queue.until_state(job_id, "running")
    reboot(queue)
    job = queue.job(job_id)
    assert f"gpuyard release {job['id']}" in job["reason"]
    queue.post("/jobs/release", ids=str(job["id"]))
    assert queue.until_state(job["id"], "running")["attempt"] == 2


def test_a_job_that_was_being_cancelled_is_cancelled(queue: QueueUnderTest) -> None:
    job_id = queue.shell("trap '' TERM; while :; do sleep 0.05; done", on_reboot="requeue", grace="1h")
    queue.until_state(job_id, "running")
    queue.post("/jobs/cancel", ids=str(job_id))
    reboot(queue)
    assert queue.state(job_id) == "cancelled"


def test_what_ended_before_and_what_waited_is_as_it_was(queue: QueueUnderTest) -> None:
    done = queue.submit("true")
    queue.wait(done)
    running = queue.submit(*LONG, gpus=2, on_reboot="fail")
    queue.until_state(running, "running")
    waiting, blocked = queue.submit("true", gpus=2), queue.submit("true", after=[str(running)])
    reboot(queue)
    assert queue.wait(waiting)["succeeded"] == 1
    assert [queue.state(job_id) for job_id in (done, running, blocked)] == ["succeeded", "failed", "rejected"]
