"""Which failures are retried and when, with real jobs."""

import re
from pathlib import Path

import pytest

from gpuyard.errors import UserError
from tests.integration.queue_fixture import QueueUnderTest

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def test_only_the_named_outcomes_are_retried(queue: QueueUnderTest) -> None:
    options = {"retries": 1, "retry_delay": "0s"}
    failed = queue.shell("exit 3", gpus=0, retry_on="timeout,device", **options)
    late = queue.submit("sleep", "600", gpus=0, time_limit="200ms", retry_on=["timeout"], **options)
    broken = queue.shell(f"echo '{ECC}'; exit 1", retry_on="device", **options)
    full = queue.shell("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'; exit 1",
                       retry_on="failed", **options)  # fmt: skip
    queue.wait()
    jobs = [queue.job(job_id) for job_id in (failed, late, broken, full)]
    assert [len(job["attempts"]) for job in jobs] == [1, 2, 2, 1]
    assert jobs[0]["reason"] == "exit status 3; not retried (--retry-on timeout,device)"
    assert jobs[2]["reason"] == f"GPU fault: {ECC} (exit status 1)"
    assert jobs[3]["outcome"] == "out-of-memory"
    assert jobs[3]["reason"].endswith("not retried (--retry-on failed)")


def test_queue_and_why_say_when_the_next_attempt_is_due(queue: QueueUnderTest, tmp_path: Path) -> None:
    marker = tmp_path / "fixed"
    job_id = queue.shell(f"[ -e {marker} ]", gpus=0, retries=2, retry_delay="2h")
    row = queue.until_state(job_id, "delayed")
    assert row["due_at"] > row["attempts"][0]["ended_at"]
    (listed,) = queue.get("/jobs", ids=str(job_id))["jobs"]
    for text in (listed["reason"], queue.why(job_id)):
        assert re.search(r"next attempt in 1h 5\dm: exit status 1; retry 1 of 2 after 2h", text)
    queue.restart()
    assert queue.job(job_id)["due_at"] == row["due_at"]
    marker.touch()
    queue.post("/jobs/retry", ids=job_id)  # now
    assert queue.wait(job_id)["succeeded"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"retries": 1, "retry_on": "crash"}, "--retry-on cannot be 'crash'"),
        ({"retries": 1, "retry_on": ","}, "--retry-on cannot be ''"),
        ({"retry_on": "failed,oom"}, "has no effect with --retries 0"),
        ({"retry_delay": "soon"}, "'soon' is not a time"),
    ],
)
def test_words_that_mean_nothing_are_refused(queue: QueueUnderTest, options: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        queue.submit("true", **options)
