"""Jobs that start later, one after the other, or are waited for, with a real daemon."""

import re
from itertools import pairwise
from pathlib import Path

from tests.executables import write_executable
from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest


def test_a_job_waits_for_its_time_across_a_restart_and_a_retry_starts_it_now(queue: QueueUnderTest) -> None:
    assert run_here("submit", "--gpus", "0", "--in", "2h30m", "--", "true").stdout == "1\n"
    assert run_here("submit", "--gpus", "0", "--at", "2099-01-01T12:00", "--", "true").returncode == 2
    queue.restart()
    job = queue.job(1)
    assert (job["state"], job["due_at"]) == ("delayed", job["not_before"])
    assert re.search(r"not before .* in 2h 2\dm", run_here("queue").stdout)
    why = run_here("why", "1").stdout
    assert "waits for its start time" in why
    assert "not before" in run_here("show", "1").stdout
    assert run_here("retry", "1").stdout == "queued again 1\n"
    assert queue.wait(1)["succeeded"] == 1


def test_a_held_or_blocked_job_still_waits_for_its_time(queue: QueueUnderTest) -> None:
    first = queue.submit("true", gpus=0, hold=True)
    after = queue.submit("true", gpus=0, after=first, at="+3600s")
    held = queue.submit("true", gpus=0, hold=True, at="+3600s")
    many = queue.send("true", gpus=0, hold=True, at="+3600s", array="0-2")["first"]
    run_here("release", str(first), str(held), f"{many}-{many + 2}")
    queue.wait(first)
    queue.until_state(after, "delayed")
    assert [queue.state(job_id) for job_id in (held, many, many + 2)] == ["delayed"] * 3
    run_here("edit", str(held), "--unset", "at")
    assert queue.wait(held)["succeeded"] == 1
    run_here("cancel", "all")


def test_a_job_that_is_due_starts(queue: QueueUnderTest) -> None:
    job = queue.submit("true", gpus=0, at="+0.2s")
    assert queue.wait(job)["succeeded"] == 1
    details = queue.job(job)
    assert details["started_at"] >= details["not_before"]


def test_jobs_of_a_staggered_array_start_one_after_the_other(queue: QueueUnderTest) -> None:
    queue.send("true", gpus=0, array="0-2", stagger="0.4s")
    other = queue.submit("true", gpus=0)
    queue.wait()
    starts = sorted(queue.job(job_id)["started_at"] for job_id in (1, 2, 3))
    seconds = [float(at[17:-1]) for at in starts]
    assert all((later - sooner) % 60 >= 0.39 for sooner, later in pairwise(seconds))
    assert queue.job(other)["started_at"] < starts[-1]


def test_the_exit_status_of_the_job_is_that_of_submit_wait(queue: QueueUnderTest) -> None:
    assert run_here("submit", "--wait", "--gpus", "0", "--", "sh", "-c", "exit 7").returncode == 7
    assert run_here("submit", "--wait", "--gpus", "0", "--", "true").returncode == 0
    many = run_here("submit", "--wait", "--gpus", "0", "--array", "0-1", "--", "sh", "-c", "exit {index}")
    assert (many.returncode, many.stdout) == (5, "3-4\n")
    followed = run_here("submit", "-f", "--gpus", "0", "echo one && echo two; exit 3")
    assert (followed.returncode, followed.stdout) == (3, "one\ntwo\n")
    assert "gpuyard: job 5" in followed.stderr


def test_options_that_cannot_be_waited_for_are_refused_before_the_submission(queue: QueueUnderTest) -> None:
    for arguments, problem in (
        (["--wait", "--hold"], "do not go together"),
        (["-f", "--array", "0-1"], "--follow is for one job"),
        (["--at", "22:00", "--in", "1h"], "both say when it starts"),
        (["--at", "noon"], "'noon' is not a time"),
        (["--at", "2020-01-01"], "is past"),
        (["--stagger", "5s"], "several jobs"),
    ):
        result = run_here("submit", "--gpus", "0", *arguments, "--", "true")
        assert (result.returncode, result.stdout) == (2, "")
        assert problem in result.stderr
    assert queue.get("/jobs")["jobs"] == []


def test_one_quoted_argument_is_a_line_unless_a_program_has_this_name(queue: QueueUnderTest, tmp_path: Path) -> None:
    run_here("submit", "--wait", "--gpus", "0", "echo plain   words")
    assert queue.log_of(1) == "plain words\n"
    run_here("submit", "--wait", "--gpus", "0", "echo a && echo b")
    assert queue.log_of(2) == "a\nb\n"
    program = tmp_path / "a program"
    write_executable(program, "#!/bin/sh\necho itself\n")
    run_here("submit", "--wait", "--gpus", "0", str(program))
    assert queue.log_of(3) == "itself\n"
