"""Jobs from submission to end, with real processes under the real daemon."""

import os
import signal
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from tests.integration.queue_fixture import QueueUnderTest, is_gone, until

HOUR = "sleep 3600"


def read_pid(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().endswith("\n"), f"a pid in {path}")
    return int(path.read_text())


# Runs


def test_a_job_gets_its_directory_environment_input_and_gpu(queue: QueueUnderTest, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("from a file\n")
    job_id = queue.shell(
        "pwd; cat; echo $LR $CUDA_VISIBLE_DEVICES $GPUYARD_JOB_ID $GPUYARD_ATTEMPT",
        cwd=str(tmp_path), stdin=str(tmp_path / "input"), env=["LR=3e-4"],
    )  # fmt: skip
    quiet = queue.shell("cat; echo over", gpus=0)
    queue.wait()
    assert queue.log_of(job_id) == f"{tmp_path}\nfrom a file\n3e-4 0 {job_id} 1\n"
    assert queue.log_of(quiet) == "over\n"


def test_a_job_sees_uuids_if_configured(queue: QueueUnderTest) -> None:
    (queue.home / "config.toml").write_text('[devices]\nvisible = "uuid"\n')
    queue.restart()
    job_id = queue.shell("echo $CUDA_VISIBLE_DEVICES", gpus=2)
    queue.wait()
    assert queue.log_of(job_id) == "SIM-0,SIM-1\n"


def test_an_array_and_a_table_fill_in_their_placeholders(queue: QueueUnderTest) -> None:
    array = queue.submit("echo", "{index}", gpus=0, array="3-9:3")
    table = queue.submit("echo", "{lr}/{seed}", gpus=0, table="lr,seed\n1,2\n3,4\n")
    listed = queue.submit(list="echo one\necho two > /dev/stdout\n# nothing\n", gpus=0)
    queue.wait()
    assert [queue.log_of(array + n) for n in range(3)] == ["3\n", "6\n", "9\n"]
    assert [queue.log_of(table + n) for n in range(2)] == ["1/2\n", "3/4\n"]
    assert [queue.log_of(listed + n) for n in range(2)] == ["one\n", "two\n"]


def test_a_program_that_cannot_be_executed_fails_with_a_reason(queue: QueueUnderTest) -> None:
    expected = {
        queue.submit("/nowhere/program"): (127, "there is no program /nowhere/program"),
        queue.submit("no-such-program"): (127, "there is no program no-such-program"),
        queue.submit("/etc/passwd"): (126, "/etc/passwd cannot be executed"),
        queue.submit("/"): (126, "/ cannot be executed"),
        queue.submit("/nowhere/\udcff"): (127, "there is no program /nowhere/?"),
    }
    failed = queue.wait()["failed"]
    assert {(each["outcome"], each["state"]) for each in failed} == {("cannot-start", "failed")}
    assert {each["id"]: (queue.job(each["id"])["status"], each["reason"]) for each in failed} == expected
    assert queue.wait(queue.submit("true"))["succeeded"] == 1


def test_a_missing_directory_and_a_missing_input_are_reported(queue: QueueUnderTest, tmp_path: Path) -> None:
    lost = queue.submit("true", cwd=str(tmp_path / "gone"))
    unread = queue.submit("true", stdin=str(tmp_path / "no-input"))
    reasons = {each["id"]: each["reason"] for each in queue.wait()["failed"]}
    assert reasons == {
        lost: f"the directory {tmp_path}/gone is missing, or cannot be entered",
        unread: f"the input {tmp_path}/no-input cannot be read",
    }


def test_the_reason_of_a_killed_program_names_the_signal(queue: QueueUnderTest) -> None:
    (failed,) = queue.wait(queue.shell("kill -SEGV $$"))["failed"]
    assert failed["reason"] == "signal 11 (SIGSEGV)"
    assert queue.job(failed["id"])["status"] == 139


# Cancel


def test_a_cancelled_waiting_job_never_runs(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    job_id = queue.submit("true")
    assert queue.post("/jobs/cancel", ids=str(job_id))["changed"] == str(job_id)
    queue.post("/unpause")
    queue.wait(queue.submit("true"))
    job = queue.job(job_id)
    assert (job["state"], job["attempts"]) == ("cancelled", [])
    assert queue.post("/jobs/cancel", ids=str(job_id))["unchanged"] == [
        {"id": job_id, "state": "cancelled", "reason": "it was already cancelled", "variables": []}
    ]


def test_cancelling_a_job_ends_all_its_processes_even_in_other_sessions(queue: QueueUnderTest, tmp_path: Path) -> None:
    parent, orphan = tmp_path / "parent", tmp_path / "orphan"
    job_id = queue.shell(f"setsid sh -c 'echo $$ > {orphan}; exec {HOUR}' & echo $$ > {parent}; wait")
    pids = [read_pid(parent), read_pid(orphan)]
    queue.post("/jobs/cancel", ids=str(job_id))
    (cancelled,) = queue.wait(job_id)["failed"]
    assert (cancelled["state"], cancelled["outcome"]) == ("cancelled", "cancelled")
    assert all(map(is_gone, pids))


def ignoring(queue: QueueUnderTest, pid_file: Path, grace: str) -> tuple[int, int]:
    """Start a job that ignores SIGTERM apart from printing "asked". Return its id and the pid of its program."""
    job_id = queue.shell(f"trap 'echo asked' TERM; echo $$ > {pid_file}; while :; do sleep 0.01; done", grace=grace)
    return job_id, read_pid(pid_file)


def test_a_job_that_ignores_sigterm_is_killed_after_the_grace_period(queue: QueueUnderTest, tmp_path: Path) -> None:
    (waited_for, alive), (killed, dead) = (ignoring(queue, tmp_path / grace, grace) for grace in ("1h", "100ms"))
    queue.post("/jobs/cancel", ids=f"{waited_for} {killed}")
    assert queue.wait(killed)["failed"][0]["state"] == "cancelled"
    assert is_gone(dead)
    until(lambda: "asked" in queue.log_of(waited_for), "the line that it prints on SIGTERM")
    assert (queue.state(waited_for), is_gone(alive)) == ("stopping", False)


def test_a_job_being_stopped_when_the_daemon_dies_is_still_killed(queue: QueueUnderTest, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    job_id = queue.shell(f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 0.01; done", grace="500ms")
    read_pid(pid_file)
    queue.post("/jobs/cancel", ids=str(job_id))
    queue.restart()
    assert queue.wait(job_id)["failed"][0]["outcome"] == "cancelled"


def test_a_job_over_its_time_limit_is_stopped_as_timed_out(queue: QueueUnderTest) -> None:
    job_id = queue.shell(HOUR, time_limit="200ms")
    (failed,) = queue.wait(job_id)["failed"]
    assert (failed["state"], failed["outcome"]) == ("failed", "timed-out")


# Hold, retry, priority, pause


def test_a_held_job_waits_for_its_release(queue: QueueUnderTest) -> None:
    held = queue.submit("true", hold=True)
    later = queue.submit("true", hold=True)
    queue.wait(queue.submit("true"))
    assert [queue.state(held), queue.state(later)] == ["held", "held"]
    assert "held" in queue.why(held)
    queue.post("/jobs/release", ids=str(held))
    assert queue.wait(held)["succeeded"] == 1
    assert queue.state(later) == "held"


def test_holding_a_running_job_is_rejected_with_a_remedy(queue: QueueUnderTest) -> None:
    job_id, gate = queue.start_gated()
    (refused,) = queue.post("/jobs/hold", ids=str(job_id))["unchanged"]
    assert "gpuyard cancel" in refused["reason"]
    gate.write_text("go\n")
    queue.wait(job_id)


def test_a_job_that_fails_is_retried_after_a_doubling_delay(queue: QueueUnderTest, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    job_id = queue.shell(f"echo x >> {tries}; [ $(wc -l < {tries}) -gt 2 ]", retries=3)
    assert queue.wait(job_id)["succeeded"] == 1
    events = queue.get(f"/jobs/{job_id}/history")["events"]
    texts = [each["text"] for each in events if each["kind"] == "delayed"]
    assert texts == ["exit status 1; retry 1 of 3 after 1s", "exit status 1; retry 2 of 3 after 2s"]
    assert [each["outcome"] for each in queue.job(job_id)["attempts"]] == ["failed", "failed", "succeeded"]


def test_a_job_without_retries_left_can_be_retried_by_hand(queue: QueueUnderTest, tmp_path: Path) -> None:
    good, gate = tmp_path / "good", queue.gate()
    job_id = queue.shell(f"[ $GPUYARD_ATTEMPT != 1 ] || read word < {gate}; [ -e {good} ]", retries=1)
    queue.until_state(job_id, "running")
    queue.post("/pause")  # or the daemon might retry it before the test does
    gate.write_text("go\n")
    queue.until_state(job_id, "delayed", "queued")
    queue.post("/jobs/retry", ids=str(job_id))
    queue.post("/unpause")
    (failed,) = queue.wait(job_id)["failed"]
    assert failed["reason"] == "exit status 1"
    good.touch()
    queue.post("/jobs/retry", ids=str(job_id))
    assert queue.wait(job_id)["succeeded"] == 1
    assert len(queue.job(job_id)["attempts"]) == 3


def test_a_job_of_higher_priority_starts_first(queue: QueueUnderTest, tmp_path: Path) -> None:
    order = tmp_path / "order"
    queue.post("/pause")
    ids = [queue.shell(f"echo $GPUYARD_JOB_ID >> {order}", gpus=2) for _ in range(4)]
    queue.post("/jobs/priority", ids=str(ids[3]), priority=10)
    queue.post("/jobs/priority", ids=str(ids[0]), priority=-10)
    queue.post("/unpause")
    queue.wait()
    assert list(map(int, order.read_text().split())) == [ids[3], ids[1], ids[2], ids[0]]


def test_a_paused_or_draining_queue_starts_nothing_and_keeps_running_jobs(queue: QueueUnderTest) -> None:
    running, gate = queue.start_gated()
    assert queue.post("/pause")["running"] == 1
    waiting = queue.submit("true")
    assert "paused" in queue.why(waiting)
    assert queue.post("/drain")["draining"] is True
    gate.write_text("go\n")
    assert queue.wait(running)["succeeded"] == 1
    queue.restart()
    assert (queue.state(waiting), queue.get("/status")["draining"]) == ("queued", True)
    queue.post("/unpause")
    assert queue.wait(waiting)["succeeded"] == 1


# Dependencies


def test_each_kind_of_dependency_is_met_by_its_outcome(queue: QueueUnderTest) -> None:
    good, gate = queue.start_gated(gpus=0)
    bad = queue.shell(f"read word < {queue.gate('other')}; exit 1", gpus=0)
    met = [
        queue.submit("true", gpus=0, after=[str(good)]),
        queue.submit("true", gpus=0, after_any=[f"{good} {bad}"]),
        queue.submit("true", gpus=0, after_failed=[str(bad)], after=[str(good)]),
    ]
    never = [
        queue.submit("true", gpus=0, after=[str(bad)]),
        queue.submit("true", gpus=0, after_failed=[str(good)]),
    ]
    assert {queue.state(job_id) for job_id in met + never} == {"blocked"}
    gate.write_text("go\n")
    (gate.parent / "other").write_text("go\n")
    queue.wait()
    assert {queue.state(job_id) for job_id in met} == {"succeeded"}
    assert [queue.job(job_id)["reason"] for job_id in never] == [
        f"skipped: dependency {bad} failed",
        f"skipped: dependency {good} succeeded (had to fail)",
    ]


def test_a_long_chain_of_dependents_of_a_failed_job_is_rejected(queue: QueueUnderTest) -> None:
    length = 550
    first = last = queue.shell("exit 1", gpus=0, hold=True)
    for _ in range(length):
        last = queue.submit("true", gpus=0, after=[str(last)])
    other = queue.submit("true", gpus=0, after_any=[str(last)])
    queue.post("/jobs/release", ids=str(first))
    assert queue.wait(other)["succeeded"] == 1
    assert queue.counts() == {"failed": 1, "rejected": length, "succeeded": 1}
    late = queue.send("true", gpus=0, after=[str(last)])
    assert late["notes"] == [f"it will never start: skipped: dependency {last} was rejected"]


def test_an_array_waits_for_every_job_of_another(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    first = queue.send("/bin/sh", "-c", f"[ $GPUYARD_ARRAY_INDEX = 0 ] || read word < {gate}", gpus=0, array="0-1")
    after = queue.send("true", gpus=0, array="0-2", after=[first["ids"]])
    queue.until_state(first["first"], "succeeded")
    assert queue.counts()["blocked"] == 3
    gate.write_text("go\n")
    assert queue.wait(after["ids"])["succeeded"] == 3


def test_a_dependency_on_a_missing_job_is_rejected(queue: QueueUnderTest) -> None:
    with pytest.raises(UserError, match="there is no job 99"):
        queue.submit("true", after=["99"])


# How many at once


def most_at_once(spans: Path) -> int:
    """Return the largest number of jobs at once, from a file to which jobs append `+` and `-`."""
    now = most = 0
    for sign in spans.read_text().split():
        now += 1 if sign == "+" else -1
        most = max(most, now)
    assert now == 0
    return most


def until_at_once(spans: Path, jobs: int) -> None:
    """Wait until `jobs` gated jobs run at once."""
    until(lambda: spans.exists() and spans.read_text().count("+") == jobs, f"{jobs} jobs at once")


def test_an_array_runs_at_most_its_limit_at_once(queue: QueueUnderTest, tmp_path: Path) -> None:
    (queue.home / "config.toml").write_text("[queue]\ncpu_jobs = 8\n")
    queue.restart()
    spans, go = tmp_path / "spans", tmp_path / "go"
    script = f"echo + >> {spans}; until [ -e {go} ]; do sleep 0.01; done; sleep 0.05; echo - >> {spans}"
    queue.shell(script, gpus=0, array="1-12%3")
    until_at_once(spans, 3)
    go.touch()
    queue.wait()
    assert most_at_once(spans) == 3


def test_a_tag_and_jobs_without_a_gpu_run_at_most_their_configured_limit_at_once(
    own_queue: QueueUnderTest, tmp_path: Path
) -> None:
    queue = own_queue
    queue.home.mkdir()
    (queue.home / "config.toml").write_text("[queue]\ncpu_jobs = 4\n[queue.tags]\ndownload = 2\n")
    queue.start()
    tagged, spans, go = tmp_path / "tagged", tmp_path / "spans", tmp_path / "go"
    script = f"echo + >> {spans}; until [ -e {go} ]; do sleep 0.01; done; sleep 0.05; echo - >> {spans}"
    for _ in range(6):
        queue.shell(f"echo + >> {tagged}; {script}; echo - >> {tagged}", gpus=0, tag="download")
        queue.shell(script, gpus=0)
    until_at_once(spans, 4)
    go.touch()
    queue.wait()
    assert (most_at_once(tagged), most_at_once(spans)) == (2, 4)


def test_an_array_at_its_limit_does_not_delay_other_jobs(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    first = queue.shell(f"[ $GPUYARD_ARRAY_INDEX = 1 ] || read word < {gate}", array="0-1%1")
    queue.until_state(first, "running")
    assert queue.wait(queue.submit("true"))["succeeded"] == 1
    assert "at most 1 job of its array at a time" in queue.why(first + 1)
    gate.write_text("go\n")
    assert queue.wait()["succeeded"] == 3


# GPUs


def test_jobs_without_a_gpu_run_while_all_gpus_are_busy(queue: QueueUnderTest) -> None:
    _, gate = queue.start_gated(gpus=2)
    waiting = queue.submit("true")
    assert queue.wait(queue.submit("true", gpus=0))["succeeded"] == 1
    assert queue.state(waiting) == "queued"
    gate.write_text("go\n")
    queue.wait()


def test_jobs_with_declared_memory_share_a_gpu_and_the_next_one_waits(queue: QueueUnderTest) -> None:
    beside = [queue.start_gated(name, vram="10G", device="0") for name in ("one", "two")]
    assert [queue.job(job_id)["devices"] for job_id, _ in beside] == [["SIM-0"], ["SIM-0"]]
    third = queue.submit("true", vram="10G", device="0")
    assert "GB free, 10" in queue.why(third)
    assert queue.state(third) == "queued"
    beside[1][1].write_text("go\n")
    assert queue.wait(third)["succeeded"] == 1
    assert queue.state(beside[0][0]) == "running"
    beside[0][1].write_text("go\n")
    queue.wait()


def test_a_job_gets_all_its_gpus_at_once_and_later_jobs_do_not_take_one_of_them(queue: QueueUnderTest) -> None:
    holder, gate = queue.start_gated()
    both = queue.submit("true", gpus=2, exclusive=True)
    behind = queue.submit("true", exclusive=True)
    until(lambda: queue.get(f"/jobs/{behind}/why")["reasons"], "a reason")
    assert (queue.state(both), queue.state(behind)) == ("queued", "queued")
    assert queue.job(both)["devices"] == []
    assert f"job {holder}" in queue.why(both)
    gate.write_text("go\n")
    queue.wait()
    jobs = [queue.job(job_id) for job_id in (both, behind)]
    assert len(jobs[0]["devices"]) == 2
    assert jobs[0]["started_at"] <= jobs[1]["started_at"]


def test_a_job_larger_than_the_machine_is_rejected_at_submission(queue: QueueUnderTest) -> None:
    for options in ({"gpus": 3}, {"vram": "25G"}, {"device": "7"}, {"vendor": "amd"}):
        with pytest.raises(UserError):
            queue.submit("true", **options)


def test_a_background_process_of_a_finished_job_keeps_its_gpu_until_it_ends(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    leaver = queue.shell(f"{HOUR} & echo $! > {pid_file}", device="0")
    assert queue.wait(leaver)["succeeded"] == 1
    pid = read_pid(pid_file)
    waiting = queue.submit("true", device="0")
    until(lambda: f"job {leaver}" in queue.why(waiting), "the background process as the holder of the GPU")
    assert queue.state(waiting) == "queued"
    os.kill(pid, signal.SIGKILL)
    assert queue.wait(waiting)["succeeded"] == 1


def test_a_background_process_of_a_cancelled_job_is_killed(queue: QueueUnderTest, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"trap 'exit 0' TERM; (trap '' TERM; exec {HOUR}) & echo $! > {pid_file}; wait"
    job_id = queue.shell(script, device="0", grace="30s")
    pid = read_pid(pid_file)
    queue.post("/jobs/cancel", ids=str(job_id))
    queue.wait(job_id)
    assert is_gone(pid)
    assert queue.wait(queue.submit("true", device="0"))["succeeded"] == 1
