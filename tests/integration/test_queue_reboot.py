"""A machine that restarts while jobs run: each job follows its --on-reboot option or the default.

The tests simulate a restart: they kill the daemon and all processes of its jobs, and change the recorded boot id.
"""

import contextlib
import sqlite3

from tests.integration.queue_fixture import QueueUnderTest, processes_of, until

LONG = ("sleep", "3600")


def reboot(queue: QueueUnderTest) -> None:
    running = {str(job["id"]) for job in queue.get("/jobs", state="running")["jobs"]}
    # A job recorded as running may not have a process yet.
    until(
        lambda: running <= {environment.get("GPUYARD_JOB_ID") for _, environment in processes_of(queue.home)},
        "their programs",
    )
    queue.kill9()
    queue.kill_processes()
    with contextlib.closing(sqlite3.connect(queue.home / "queue.db")) as database, database:
        database.execute("UPDATE attempts SET boot_id = 'another' WHERE ended_at IS NULL")
    queue.start()


def test_jobs_follow_their_on_reboot_option(own_queue: QueueUnderTest) -> None:
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


def test_a_held_job_starts_again_when_it_is_released(queue: QueueUnderTest) -> None:
    job_id = queue.submit(*LONG)
    queue.until_state(job_id, "running")
    reboot(queue)
    job = queue.job(job_id)
    assert f"gpuyard release {job['id']}" in job["reason"]
    queue.post("/jobs/release", ids=str(job["id"]))
    assert queue.until_state(job["id"], "running")["attempt"] == 2


def test_a_job_being_cancelled_is_cancelled_after_a_restart(queue: QueueUnderTest) -> None:
    job_id = queue.shell("trap '' TERM; while :; do sleep 0.05; done", on_reboot="requeue", grace="1h")
    queue.until_state(job_id, "running")
    queue.post("/jobs/cancel", ids=str(job_id))
    reboot(queue)
    assert queue.state(job_id) == "cancelled"


def test_finished_and_waiting_jobs_are_unchanged_by_a_restart(queue: QueueUnderTest) -> None:
    done = queue.submit("true")
    queue.wait(done)
    running = queue.submit(*LONG, gpus=2, on_reboot="fail")
    queue.until_state(running, "running")
    waiting, blocked = queue.submit("true", gpus=2), queue.submit("true", after=[str(running)])
    reboot(queue)
    assert queue.wait(waiting)["succeeded"] == 1
    assert [queue.state(job_id) for job_id in (done, running, blocked)] == ["succeeded", "failed", "rejected"]
