"""The memory guard: two jobs on one simulated card, of which the second outgrows it."""

import json
from pathlib import Path

import pytest

from tests.fakes import gated_job, growing_job
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

# Small enough for the RAM of any machine that runs tests. The guard keeps 512 MB of such a card free.
CARD_MB, FIRST_MB, SECOND_MB = 4096.0, 1000.0, 2800.0
MORE_MB = 400.0  # what the second job takes once it is alone: beside the first it would run out of memory


@pytest.fixture
def queue_on(
    own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> QueueUnderTest:
    """A queue with one card, that keeps no RAM free."""
    monkeypatch.setenv("GPUYARD_SIMULATE", request.param)
    own_queue.home.mkdir(mode=0o700)
    target = f'echo "$GPUYARD_TITLE" > {own_queue.home}/message; cat >> {own_queue.home}/message'
    notify = f"[notify]\non = ['memory-guard']\nto = ['{target}']\n"
    (own_queue.home / "config.toml").write_text(f"[suspend]\nram_reserve_mb = 0\n{notify}")
    own_queue.start()
    return own_queue


def submit(*command: str) -> int:
    result = run("submit", "--", *command)
    assert (result.returncode, result.stderr) == (0, "")
    return int(result.stdout)


def begin_both(queue: QueueUnderTest, tmp_path: Path) -> tuple[int, int]:
    """Start a job that stays as it is, and beside it one that grows until the card is nearly full."""
    first = submit(*gated_job.COMMAND, "--vram", f"{FIRST_MB:g}", str(tmp_path / "first"))
    queue.until_state(first, "running")
    second = submit(
        *growing_job.COMMAND,
        "--vram",
        "300",
        "--to",
        f"{SECOND_MB:g}",
        "--then",
        f"{MORE_MB:g}",
        str(tmp_path / "second"),
    )
    return first, second


def finish_both(queue: QueueUnderTest, tmp_path: Path, first: int, second: int) -> None:
    (tmp_path / "second").touch()  # from here on the second job grows once more
    (tmp_path / "first").touch()
    for job_id in (first, second):
        job = queue.until_state(job_id, "succeeded", "failed")
        assert (job["state"], job["failures"]) == ("succeeded", 0), job["reason"]
        assert all("OutOfMemory" not in queue.log_of(job_id, number + 1) for number in range(len(job["attempts"])))
    assert len(queue.job(first)["attempts"]) == 1


def events_of(job_id: int) -> list[tuple[str, str]]:
    events = json.loads(run("history", str(job_id), "--json").stdout)["events"]
    return [(event["kind"], event["text"] or "") for event in events]


@pytest.mark.parametrize("queue_on", ["1x4GB"], indirect=True)
def test_a_job_that_outgrows_its_card_is_suspended_and_goes_on_later(queue_on: QueueUnderTest, tmp_path: Path) -> None:
    first, second = begin_both(queue_on, tmp_path)
    queue_on.until_state(second, "suspended")
    assert queue_on.job(second)["attempts"][-1]["parked"] == "memory-guard"
    text = dict(events_of(second))["suspending"]
    assert text.startswith("GPU 0 had "), text
    assert "while it grew" in text
    assert text in run("why", str(second)).stdout
    assert text in run("show", str(second)).stdout
    message = queue_on.home / "message"
    until(lambda: message.exists() and "It goes on" in message.read_text(), "a notification")
    assert f"Job {second} is suspended before its GPU runs out of memory" in message.read_text()
    assert text in message.read_text()
    finish_both(queue_on, tmp_path, first, second)
    assert [kind for kind, _ in events_of(second)].count("suspending") == 1
    assert len(queue_on.job(second)["attempts"]) == 1


@pytest.mark.parametrize("queue_on", ["amd:1x4GB"], indirect=True)
def test_a_young_job_is_queued_again_where_it_cannot_be_suspended(queue_on: QueueUnderTest, tmp_path: Path) -> None:
    first, second = begin_both(queue_on, tmp_path)
    until(lambda: queue_on.job(second)["attempts"] and queue_on.state(second) == "queued", "its return to the queue")
    job = queue_on.job(second)
    assert job["attempts"][0]["outcome"] == "memory-guard"
    assert "cannot be suspended" in job["reason"]
    finish_both(queue_on, tmp_path, first, second)
    assert len(queue_on.job(second)["attempts"]) == 2


def run_out_beside_a_younger_one(queue: QueueUnderTest, tmp_path: Path) -> tuple[int, int]:
    """Let a job run out of memory in one step, on a card that a younger first run has joined."""
    growing = (*growing_job.COMMAND, "--vram", "300", "--to", "1000", "--then", "2400", str(tmp_path / "first"))
    first = submit(*growing)
    queue.until_state(first, "running")
    second = submit(*gated_job.COMMAND, "--vram", f"{FIRST_MB:g}", str(tmp_path / "second"))
    queue.until_state(second, "running")
    until(lambda: "holding" in queue.log_of(second, 1), "the second job on the card")
    (tmp_path / "first").touch()
    until(lambda: len(queue.job(first)["attempts"]) == 2, "the next start of the first job")
    return first, second
