"""Scenarios of a queue with jobs on a cluster, equal for every kind of cluster."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 1.00 GiB is free. Process 1 has 8.00 GiB memory in use."
)


def runs_of(folder: Path, job_id: int) -> int:
    path = folder / f"ran.{job_id}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def record_run(folder: Path) -> str:
    """Return the start of a script that appends a line to a file for every attempt."""
    return f"echo $GPUYARD_ATTEMPT >>{folder}/ran.$GPUYARD_JOB_ID; "


def run_an_array(queue: QueueUnderTest, count: int) -> None:
    first = queue.shell(
        "echo element {index} of job $GPUYARD_JOB_ID; exit $(( {index} % 10 == 3 ))", array=f"0-{count - 1}", gpus=0
    )
    queue.wait()
    failed = [index for index in range(count) if index % 10 == 3]
    assert queue.counts() == {"succeeded": count - len(failed), "failed": len(failed)}
    for index in range(count):
        assert queue.log_of(first + index) == f"element {index} of job {first + index}\n"
    assert {queue.job(first + index)["status"] for index in failed} == {1}


def run_dependent_jobs(queue: QueueUnderTest, folder: Path) -> None:
    first, gate = queue.start_gated(gpus=0)
    after_ok = queue.shell(f"echo b >>{folder}/order", after=str(first), gpus=0)
    after_failed = queue.shell("true", after_failed=str(first), gpus=0)
    after_any = queue.shell(f"echo c >>{folder}/order", after_any=str(after_ok), gpus=0)
    assert queue.state(after_ok) == "blocked"
    gate.write_text("go\n")
    queue.wait()
    assert [queue.state(each) for each in (first, after_ok, after_failed, after_any)] == [
        "succeeded", "succeeded", "rejected", "succeeded",
    ]  # fmt: skip
    assert (folder / "order").read_text() == "b\nc\n"


def cancel_a_running_job(queue: QueueUnderTest, folder: Path) -> None:
    """The job gets SIGTERM before SIGKILL, and its output after SIGTERM is in its log."""
    job_id = queue.shell(
        f"trap 'echo asked; exit 5' TERM; echo up; touch {folder}/up; while :; do sleep 0.1; done", gpus=0
    )
    until((folder / "up").exists, "the job's start")
    queue.post("/jobs/cancel", ids=str(job_id))
    queue.wait()
    assert queue.state(job_id) == "cancelled"
    assert [line for line in queue.log_of(job_id).splitlines() if line != "Terminated"] == ["up", "asked"]


def give_more_after_out_of_memory(queue: QueueUnderTest) -> int:
    """The job runs out of memory once, is retried with more, and uses none of its retries."""
    job_id = queue.shell(
        f'[ $GPUYARD_OOM_COUNT -gt 0 ] || {{ echo "{OUT_OF_MEMORY}"; exit 1; }}; echo enough', vram="8G"
    )
    queue.wait()
    job = queue.job(job_id)
    assert (job["state"], job["failures"], job["attempt"]) == ("succeeded", 0, 2)
    first, second = job["attempts"]
    assert (first["outcome"], second["outcome"]) == ("out-of-memory", "succeeded")
    assert first["reserved_mb"] == 8192.0
    assert second["reserved_mb"] > first["reserved_mb"]
    assert queue.log_of(job_id, 2) == "enough\n"
    return job_id


def end_a_job_over_its_time_limit(queue: QueueUnderTest) -> None:
    job_id = queue.shell("echo begun; exec sleep 600", time_limit="5s", gpus=0)
    queue.wait()
    job = queue.job(job_id)
    result = (job["state"], job["outcome"], queue.log_of(job_id))
    assert result == ("failed", "timed-out", "begun\n"), (result, job["reason"])
    assert 4.9 <= job["elapsed_s"] < 60, (job["elapsed_s"], job)


def save_before_the_time_limit(queue: QueueUnderTest, folder: Path, engine: str, limit: str, signal: str) -> None:
    """The program of a task, in a session of its own, gets the signal; it exits with 75 and has timed out."""
    assert run("workspace", "init", str(folder)).returncode == 0
    (folder / "train.sh").write_text(
        "[ $GPUYARD_ATTEMPT = 1 ] || exit 0; trap 'echo saved; exit 75' USR1; while :; do sleep 0.1; done\n"
    )
    (folder / "scheduler_config.yml").write_text(
        "script_path: train.sh\npython_env: /bin/sh\nlog_dir: logs\nsessions: none\n"
        "max_retries: 1\nauto_restart_failed: true\n"
        f"timeout: {limit}\nsignal: {signal}\n"
    )
    (folder / "configs" / "one.yml").write_text("scheduler: {gpus: 0}\n")
    started = run("workspace", "--workspace", str(folder), "start", "--engine", engine)
    assert (started.returncode, started.stderr) == (0, "")
    queue.wait()
    ((job_id, state),) = [(job["id"], job["state"]) for job in queue.get("/jobs", all="1")["jobs"]]
    first, second = queue.job(job_id)["attempts"]
    assert (state, first["outcome"], first["status"], second["outcome"]) == ("succeeded", "timed-out", 75, "succeeded")
    assert first["warned_at"] is not None
    assert "saved" in queue.log_of(job_id)


def survive_a_kill_of_the_daemon(queue: QueueUnderTest, folder: Path, count: int) -> None:
    """The daemon is killed with `count` jobs on the cluster: the next one follows all of them, and none runs twice."""
    gate = folder / "go"
    first = queue.shell(
        f"{record_run(folder)} while ! [ -e {gate} ]; do sleep 0.2; done; echo done {{index}}",
        array=f"0-{count - 1}",
        gpus=0,
    )
    until(lambda: queue.counts().get("running", 0) >= 2, "two running jobs")
    queue.kill9()
    gate.touch()
    queue.start()
    queue.wait()
    assert queue.counts() == {"succeeded": count}
    assert [runs_of(folder, first + index) for index in range(count)] == [1] * count
    assert [queue.log_of(first + index) for index in range(count)] == [f"done {index}\n" for index in range(count)]


def sweep_a_workspace(queue: QueueUnderTest, folder: Path, engine: str) -> None:
    """Configs become jobs; each successful one leaves a marker, a failed one does not."""
    assert run("workspace", "init", str(folder)).returncode == 0
    (folder / "train.sh").write_text('grep -q bad "$2" && exit 3; echo "trained $2"\n')
    (folder / "scheduler_config.yml").write_text(
        "script_path: train.sh\npython_env: /bin/sh\nlog_dir: logs\ncheck_interval: 1\nsessions: none\n"
    )
    for name in ("one", "two", "bad"):
        (folder / "configs" / f"{name}.yml").write_text(f"kind: {name}\nscheduler: {{gpus: 0}}\n")
    started = run("workspace", "--workspace", str(folder), "start", "--engine", engine)
    assert (started.returncode, started.stderr) == (0, "")
    queue.wait()
    markers = {path.name for path in (folder / "out").rglob("*") if path.is_file()}
    assert {name for name in ("one", "two", "bad") if any(name in marker for marker in markers)} == {"one", "two"}
    jobs = {job["name"]: job["id"] for job in queue.get("/jobs", all="1")["jobs"]}
    assert {name: queue.state(job) for name, job in jobs.items()} == {
        "one": "succeeded", "two": "succeeded", "bad": "failed",
    }  # fmt: skip
    assert {queue.job(job)["engine"] for job in jobs.values()} == {engine}
    assert re.search(r"trained .*one\.yml", queue.log_of(jobs["one"]))


def wait_for_reason(queue: QueueUnderTest, job_id: int, text: str) -> None:
    """Wait until `text` is part of the reasons of a job."""
    reasons = [""]

    def has_reason() -> bool:
        if (why := queue.why(job_id)) != reasons[-1]:
            reasons.append(why)
        return text in why

    try:
        until(has_reason, f"{text!r} as a reason")
    except AssertionError as error:
        error.add_note(f"the reasons were {reasons}")
        raise


def pids_of(job_id: int) -> list[int]:
    """Return the pids of all processes of a job."""
    mark, found = f"GPUYARD_JOB_ID={job_id}".encode(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
        except OSError:
            continue
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def learn_estimates_from_the_cluster(queue: QueueUnderTest, engine: str) -> None:
    """Measured GPU memory and duration of the first job become the estimate of the second."""
    environment = {"PATH": os.environ["PATH"], "GPUYARD_SIMULATE": "2x24GB", "GPUYARD_HOME": str(queue.home)}
    command = (sys.executable, "-m", "gpuyard", "sim-job", "--vram", "6G", "--seconds", "5")
    first = queue.submit(*command, environment=environment)
    queue.wait(first)
    [attempt] = queue.job(first)["attempts"]
    assert (attempt["outcome"], attempt["reserved_mb"]) == ("succeeded", None)
    assert max(attempt["peaks_mb"].values()) == 6144.0
    assert attempt["ram_mb"] > 1
    again = queue.submit(*command, environment=environment)
    queue.wait(again)
    [attempt] = queue.job(again)["attempts"]
    assert attempt["engine"] == engine
    assert 6144.0 < attempt["reserved_mb"] < 12288.0
    [learned] = [each for each in queue.get("/estimates")["estimates"] if each["kind"] == "command"]
    assert (learned["runs"], learned["measured_runs"]) == (2, 2)
    assert 5.0 <= learned["mean_s"] < 60.0


def change_jobs_that_wait_there(queue: QueueUnderTest, folder: Path, gate: Path, **options: Any) -> list[int]:
    """Jobs that wait at the site are held, edited and moved; they run once, as they were changed. `gate` frees the
    site. Return the ids: of the job that was held, the edited one, and the moved one."""
    jobs = [queue.shell(record_run(folder), **options) for _ in range(3)]
    held, edited, moved = jobs
    until(lambda: [queue.state(each) for each in jobs] == ["pending"] * 3, "all of them at the site")
    for verb, job_id, body in (
        ("hold", held, {}),
        ("edit", edited, {"options": {"time-limit": "1h", "name": "later"}}),
        ("priority", moved, {"priority": 7}),
    ):
        done = queue.post(f"/jobs/{verb}", ids=str(job_id), **body)
        assert (done["changed"], done["unchanged"]) == (str(job_id), []), verb
    assert (queue.state(held), queue.job(edited)["name"], queue.job(moved)["priority"]) == ("held", "later", 7)
    gate.touch()
    queue.wait(f"{edited} {moved}")
    assert (queue.state(held), runs_of(folder, held)) == ("held", 0)
    queue.post("/jobs/release", ids=str(held))
    queue.wait()
    assert [(queue.state(each), runs_of(folder, each), queue.job(each)["attempt"]) for each in jobs] == [
        ("succeeded", 1, 1)
    ] * 3
    return jobs


def pause_while_jobs_wait_there(queue: QueueUnderTest, folder: Path, gate: Path, **options: Any) -> None:
    """A paused queue starts no job that waits at the site, and counts none of them as running."""
    running = queue.counts().get("running", 0)
    first = queue.shell(record_run(folder), array="0-4", **options)
    until(lambda: queue.counts().get("pending") == 5, "the array at the site")
    paused = run("pause")
    assert paused.stdout == f"paused: {running} still running. `gpuyard unpause` starts jobs again\n"
    assert queue.counts() == ({"running": running} if running else {}) | {"queued": 5}
    gate.touch()
    until(lambda: not queue.counts().get("running"), "the end of all that ran")
    assert queue.counts().get("queued") == 5
    queue.post("/unpause")
    queue.wait()
    assert [runs_of(folder, first + index) for index in range(5)] == [1] * 5


def take_jobs_back_as_they_begin(queue: QueueUnderTest, folder: Path, count: int) -> None:
    """While short jobs begin, they are held, moved, paused and let go again, and the daemon is killed: each runs
    once."""
    first = queue.shell(f"{record_run(folder)} sleep 0.2", array=f"0-{count - 1}", gpus=0)
    others = [queue.shell(f"{record_run(folder)} sleep 0.2", gpus=0) for _ in range(count)]
    jobs = [*range(first, first + count), *others]
    for turn in range(1, 12):
        if set(queue.counts()) <= {"succeeded"}:
            break
        if turn % 3 == 0:
            queue.post("/jobs/priority", ids="all", priority=turn)
        elif turn % 3 == 1:
            queue.post("/jobs/hold", ids="all")
            queue.post("/jobs/release", ids="all")
        else:
            queue.post("/pause")
            if turn == 5:
                queue.restart()
            queue.post("/unpause")
        until(lambda: queue.counts().get("running") or set(queue.counts()) <= {"succeeded"}, "a job that begins")
    queue.wait()
    assert [(runs_of(folder, each), queue.job(each)["attempt"]) for each in jobs] == [(1, 1)] * len(jobs)
