"""The host guard: real programs that take RAM over some seconds, on a machine whose RAM is simulated to be small."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import ram_hog, small_host
from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until

TOTAL_MB, FLOOR_MB = 1200, 300
FIRST_MB, SECOND_MB = 450, 700


@pytest.fixture
def small_queue(own_queue: QueueUnderTest, monkeypatch: pytest.MonkeyPatch) -> QueueUnderTest:
    monkeypatch.setenv("GPUYARD_SIMULATE_HOST", f"{TOTAL_MB}MB")
    own_queue.home.mkdir(mode=0o700)
    (own_queue.home / "config.toml").write_text(
        f'[host]\nkeep_free = "{FLOOR_MB}M"\n[queue]\nmin_free_memory_mb = 0\ncpu_jobs = 8\n'
    )
    own_queue.start(small_host.COMMAND)
    return own_queue


def hog(queue: QueueUnderTest, megabytes: int, over_s: float, gate: Path | None = None, **options: Any) -> int:
    arguments = ["--to", str(megabytes), "--over", str(over_s), *([str(gate)] if gate is not None else [])]
    return queue.submit(*ram_hog.COMMAND, *arguments, gpus=0, **options)


def until_holding(queue: QueueUnderTest, job_id: int) -> None:
    queue.until_state(job_id, "running")
    log = queue.home / "logs" / f"{job_id}.1.log"
    until(lambda: log.exists() and "holding" in log.read_text(), f"the RAM of job {job_id}")


def lowest_mb(queue: QueueUnderTest) -> float:
    return float((queue.home / "lowest-ram").read_text())


@pytest.mark.parametrize("ram", [None, "100M"], ids=["undeclared", "declared too low"])
def test_the_youngest_makes_way_and_both_end_well(small_queue: QueueUnderTest, tmp_path: Path, ram: str | None) -> None:
    gate = tmp_path / "gate"
    declared: dict[str, Any] = {} if ram is None else {"ram": ram}
    first = hog(small_queue, FIRST_MB, 0.5, gate, **declared)
    until_holding(small_queue, first)
    second = hog(small_queue, SECOND_MB, 5.0, **declared)
    until(lambda: len(small_queue.job(second)["attempts"]) == 1 and small_queue.state(second) == "queued", "its return")
    job = small_queue.job(second)
    assert (job["attempts"][0]["outcome"], job["failures"]) == ("host-guard", 0)
    assert "of RAM left of the 300 MB to keep; it was the youngest job with notable RAM, and held" in job["reason"]
    assert job["reason"] in run("show", str(second)).stdout
    assert "host-guard" in run("history", str(second)).stdout
    until(lambda: " RAM free, " in small_queue.why(second), "that it waits for RAM")
    assert small_queue.state(first) == "running"
    gate.touch()
    for job_id in (first, second):
        ended = small_queue.until_state(job_id, "succeeded", "failed")
        assert (ended["state"], ended["failures"]) == ("succeeded", 0), ended["reason"]
    assert len(small_queue.job(first)["attempts"]) == 1
    assert len(small_queue.job(second)["attempts"]) == 2
    assert lowest_mb(small_queue) > 0, "the kernel would have killed a program"


def test_nothing_starts_below_the_floor(small_queue: QueueUnderTest, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first = hog(small_queue, TOTAL_MB - FLOOR_MB + 50, 0.5, gate)
    until_holding(small_queue, first)
    second = hog(small_queue, 10, 0.0)
    until(lambda: "300 MB stay free" in small_queue.why(second), "the reason")
    assert (small_queue.state(first), small_queue.state(second)) == ("running", "queued"), "there is only one"
    gate.touch()
    small_queue.until_state(second, "succeeded")
    small_queue.until_state(first, "succeeded")


def test_six_programs_that_ramp_at_once_all_end_and_none_is_lost(small_queue: QueueUnderTest) -> None:
    jobs = [hog(small_queue, 300, 5.0) for _ in range(6)]
    small_queue.wait()
    assert [small_queue.state(job_id) for job_id in jobs] == ["succeeded"] * 6
    outcomes = [each["outcome"] for job_id in jobs for each in small_queue.job(job_id)["attempts"]]
    assert outcomes.count("succeeded") == 6
    assert set(outcomes) <= {"succeeded", "host-guard"}
    assert "host-guard" in outcomes
    assert len(small_queue.job(jobs[0])["attempts"]) == 1, "the first is spared"
    assert lowest_mb(small_queue) > 0
