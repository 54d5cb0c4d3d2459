"""A new job from an earlier one, and other options for jobs that wait, with a real daemon."""

import json

from tests.fakes.queue_command import run, run_here
from tests.integration.queue_fixture import QueueUnderTest


def test_a_resubmitted_job_names_its_origin_and_the_origin_names_it(queue: QueueUnderTest) -> None:
    first = queue.submit("/bin/echo", "--lr", "1", gpus=0, name="train", tag="night")
    queue.wait()
    second = int(run_here("resubmit", str(first), "--tag", "day", "--", "--lr", "2").stdout)
    queue.wait()
    job = queue.job(second)
    assert (job["resubmitted_from"], job["tag"], job["name"]) == (first, "day", "train")
    assert queue.log_of(second) == "--lr 2\n"
    assert f"resubmitted from: job {first}" in run_here("show", str(second)).stdout
    assert f"from job {first}" in run_here("history", str(second)).stdout
    assert f"as job {second}" in run_here("history", str(first)).stdout
    assert queue.job(first)["resubmitted_from"] is None


def test_a_selection_is_resubmitted_job_by_job(queue: QueueUnderTest) -> None:
    queue.shell("exit 1", gpus=0, tag="night")
    queue.shell("true", gpus=0, tag="night")
    queue.shell("exit 1", gpus=0, tag="night")
    queue.wait()
    assert run_here("resubmit", "state=failed", "tag=night", "--hold", "--unset", "tag").stdout == "4-5\n"
    assert [queue.job(job_id)["resubmitted_from"] for job_id in (4, 5)] == [1, 3]
    assert [queue.job(job_id)["tag"] for job_id in (4, 5)] == [None, None]
    other = run_here("resubmit", "1", "--json", "--", "true")
    assert json.loads(other.stdout)["count"] == 1
    assert queue.job(6)["command"] == "true"
    run_here("cancel", "4-5")


def test_secrets_that_were_dropped_come_from_this_shell(queue: QueueUnderTest) -> None:
    job = queue.shell("echo $HF_TOKEN", gpus=0, env=["HF_TOKEN=old"])
    queue.wait()
    run_here("resubmit", str(job), "--allow-missing")
    queue.wait()


def test_waiting_jobs_get_other_options_and_running_ones_do_not(queue: QueueUnderTest) -> None:
    queue.post("/pause")
    queue.send("/bin/echo", "{index}", gpus=0, array="0-2", name="train")
    held = queue.submit("true", gpus=0, hold=True)
    result = run(
        "edit", "1-3", "--priority", "7", "--vram", "2G", "--gpus", "1", "--env", "A=1", "--time-limit", "1h30m"
    )
    assert result.stdout == "edited 1-3\n"
    for job_id in (1, 2, 3):
        job = queue.job(job_id)
        assert (job["priority"], job["vram_mb"], job["gpus"], job["time_limit_s"]) == (7, 2048.0, 1, 5400.0)
        assert (job["index"], job["array"], job["state"]) == (job_id - 1, 1, "queued")
    assert "edited" in run_here("history", "1").stdout
    assert "A=1" not in run_here("history", "1").stdout
    assert run_here("edit", str(held), "--tag", "late").stdout == f"edited {held}\n"
    assert queue.job(held)["state"] == "held"
    too_large = run_here("edit", "1", "--vram", "900G")
    assert (too_large.returncode, too_large.stdout) == (1, "")
    assert "no GPU has 900 GB" in too_large.stderr
    assert queue.job(1)["vram_mb"] == 2048.0
    queue.post("/jobs/cancel", ids=str(held))
    queue.post("/unpause")
    queue.wait()
    assert [queue.log_of(job_id) for job_id in (1, 2, 3)] == ["0\n", "1\n", "2\n"]
    late = run_here("edit", "1", "--priority", "1")
    assert late.returncode == 1
    assert "only waiting jobs can be edited" in late.stderr


def test_an_edit_without_a_change_or_with_a_bad_one_says_what_to_write(queue: QueueUnderTest) -> None:
    queue.submit("true", gpus=0, hold=True)
    for arguments, problem in (
        (["edit", "1"], "no option is given"),
        (["edit", "1", "--unset", "vrma"], "there is no option 'vrma'"),
        (["edit", "1", "--vram", "lots"], "'lots' is not a size"),
        (["edit", "--vram", "1G"], "which jobs"),
        (["resubmit"], "which job"),
    ):
        result = run_here(*arguments)
        assert result.returncode in (1, 2)
        assert problem in result.stderr
    run_here("cancel", "1")
