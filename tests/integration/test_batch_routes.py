"""The routes of batches: their progress, the gate that they wait for, and the outcome of each run."""

import csv
import time
from pathlib import Path
from typing import Any

import pytest

from gpuyard.errors import UserError
from tests.integration.queue_fixture import QueueUnderTest, until

pytestmark = pytest.mark.usefixtures("unmeasured")


def start(queue: QueueUnderTest, script: str, count: int, **options: Any) -> int:
    """Submit a batch of `count` runs, and return its number."""
    return queue.shell(script, **{"sweep": [f"index=0-{count - 1}"], "concurrency": 2, "gpus": 0, **options})


def at_gate(queue: QueueUnderTest, count: int, **options: Any) -> int:
    """Start a batch of runs that wait for the test, and wait until as many run as are allowed."""
    gate = queue.gate()
    first = start(queue, f"read word < {gate}", count, **options)
    until(lambda: status_of(queue, first)["gate"] == "concurrency", "as many runs as may be")
    return first


def status_of(queue: QueueUnderTest, first: int) -> Any:
    return queue.get(f"/batches/{first}")


def runs_of(queue: QueueUnderTest, first: int, **query: str) -> Any:
    return queue.get(f"/batches/{first}/runs", **query)


# Progress


def test_the_status_of_a_batch_names_its_runs_and_their_gate_also_after_a_restart(queue: QueueUnderTest) -> None:
    first = at_gate(queue, 5)
    until(lambda: status_of(queue, first)["waits_s"].get("concurrency", 0.0) > 0.0, "the wait to be counted")
    before = status_of(queue, first)
    assert (before["id"], before["first"], before["last"], before["count"]) == (first, first, first + 4, 5)
    assert before["counts"] == {"queued": 3, "running": 2}
    assert [run["index"] for run in before["running"]] == ["0", "1"]
    assert not before["done"]
    assert before["held_by"] == "limit reached: at most 2 runs of its batch at a time"
    running, _, waiting, *_ = runs_of(queue, first)["runs"]
    assert (running["is_live"], running["is_finished"], running["seconds"]) == (True, False, None)
    assert (waiting["log"], waiting["started_at"], waiting["devices"], waiting["attempts"]) == (None, None, [], 0)
    queue.restart()
    until(lambda: status_of(queue, first)["gate"] == "concurrency", "the next daemon to take it up")
    after = status_of(queue, first)
    assert (after["counts"], after["token"]) == (before["counts"], before["token"])
    assert [run["id"] for run in after["running"]] == [run["id"] for run in before["running"]]


def test_a_closed_gate_is_reported_with_its_figure_and_other_jobs_continue(queue: QueueUnderTest) -> None:
    first = start(queue, "true", 3, min_free_mem_mb=10**9)
    until(lambda: status_of(queue, first)["gate"] == "memory", "the gate")
    standing = status_of(queue, first)
    assert standing["held_by"].endswith("< 1000000000 MB")
    assert standing["counts"] == {"queued": 3}
    other = queue.submit("true", priority="-5")
    assert queue.until_state(other, "succeeded")["state"] == "succeeded"
    assert "MB of RAM available" in queue.why(first)


def test_a_batch_that_was_cancelled_waits_for_no_gate(queue: QueueUnderTest) -> None:
    first = start(queue, "true", 3, min_free_mem_mb=10**9)
    until(lambda: status_of(queue, first)["gate"] is not None, "a gate")
    queue.post("/pause")  # no more samples
    waited_s = queue.get("/status")["uptime_s"] + 1.0
    until(lambda: queue.get("/status")["uptime_s"] > waited_s, "the last look to be old")
    queue.post("/jobs/cancel", ids=f"{first}-{first + 2}")
    queue.post("/unpause")
    until(lambda: status_of(queue, first)["done"], "the end of all")
    until(lambda: status_of(queue, first)["gate"] is None, "the gate to be forgotten")


def test_a_batch_is_known_though_its_first_run_was_forgotten(queue: QueueUnderTest) -> None:
    gate = queue.gate()
    first = start(queue, f"test {{index}} = 0 || read word < {gate}", 3)
    queue.until_state(first, "succeeded")
    until(lambda: status_of(queue, first)["counts"].get("running") == 2, "the others to run")
    queue.post("/clean", older_than_s=0)
    standing = status_of(queue, first)
    assert (standing["count"], standing["counts"], standing["done"]) == (2, {"running": 2}, False)
    assert [run["index"] for run in runs_of(queue, first)["runs"]] == ["1", "2"]


# Runs


def test_each_run_is_listed_with_its_seed_outcome_and_log(queue: QueueUnderTest) -> None:
    table = "index,seed\n0,70\n1,71\n"
    began = time.monotonic()
    first = queue.submit("/bin/sh", "-c", "echo seed {seed}; exit {index}", table=table, concurrency=1, gpus=0)
    queue.wait()
    took_s = time.monotonic() - began
    good, bad = runs_of(queue, first)["runs"]
    assert (good["id"], good["index"], good["seed"], good["state"], good["outcome"]) == (
        first, "0", "70", "succeeded", "succeeded",
    )  # fmt: skip
    assert (bad["index"], bad["state"], bad["status"], bad["attempts"]) == ("1", "failed", 1, 1)
    assert good["is_finished"]
    assert not good["is_live"]
    assert 0.0 <= good["seconds"] <= took_s
    assert "seed 70" in Path(good["log"]).read_text()


def test_runs_are_listed_page_by_page(queue: QueueUnderTest) -> None:
    first = start(queue, "true", 5, hold=True)
    other = queue.submit("true", hold=True)
    pages, after = [], 0
    while True:
        page = runs_of(queue, first, limit="2", after=str(after))
        pages.append([run["id"] for run in page["runs"]])
        if page["next"] is None:
            break
        after = page["next"]
    assert pages == [[first, first + 1], [first + 2, first + 3], [first + 4]]
    assert all(other not in page for page in pages)


# Errors


def test_a_job_that_is_not_a_batch_is_rejected(queue: QueueUnderTest) -> None:
    plain = queue.submit("true", hold=True)
    first = start(queue, "true", 2, hold=True)
    for number in (plain, first + 1, 4711):
        with pytest.raises(UserError, match=f"there is no batch {number}"):
            status_of(queue, number)
        with pytest.raises(UserError, match=f"there is no batch {number}"):
            runs_of(queue, number)
    with pytest.raises(UserError, match=f"there is no GET /v1/batches/{first}/pictures"):
        queue.get(f"/batches/{first}/pictures")


# The sample log


def test_the_sample_log_shows_each_launch_with_the_figures_it_went_by(queue: QueueUnderTest, tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    first = start(queue, "true", 4, gpus=1, vram="1G", max_gpu_mem_mb=8000, sample_log=str(path))
    queue.wait()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    launches = [row for row in rows if row["event"] == "launch"]
    assert [int(row["job"]) for row in launches] == [first, first + 1, first + 2, first + 3]
    assert [row["index"] for row in launches] == ["0", "1", "2", "3"]
    for row in launches:
        assert float(row["gpu_memory_judged_mb"]) <= 8000
        assert float(row["gpu_memory_charged_mb"]) <= 8000
        assert int(row["running"]) <= 1
