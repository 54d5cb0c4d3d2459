"""Why jobs wait, as `queue` and `why` say it: the reason of each GPU, and jobs by their names."""

import re
from pathlib import Path
from typing import Any

from tests.fakes.queue_command import run_here
from tests.integration.queue_fixture import QueueUnderTest


def start(queue: QueueUnderTest, name: str, **options: Any) -> tuple[int, Path]:
    """Start a job of this name that runs until the test writes to its gate."""
    gate = queue.gate(name)
    job_id = queue.shell(f"read word < {gate}", name=name, **options)
    queue.until_state(job_id, "running")
    return job_id, gate


def test_each_gpu_that_refuses_a_job_is_shown_with_its_own_reason(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    alone, one = start(queue, "alone", exclusive=True, device="0")
    sharing, other = start(queue, "shares", vram="10G", device="1")
    waits = queue.submit("true", vram="20G")
    queue.until_state(waits, "queued")
    held = f"GPU 0: held by job {alone} (alone)"
    both = f"{held}; GPU 1: too little free memory beside job {sharing} (shares)"
    shown = run_here("queue").stdout
    assert both in shown
    assert run_here("why", str(waits)).stdout.startswith(f"job {waits} waits for 1 GPU: {both}\n")
    why = run_here("why", "-v", str(waits)).stdout
    assert f"  {held}\n" in why
    assert f"  GPU 1: 14 GB free, 20 GB needed: 10 GB kept for job {sharing} (shares)\n" in why
    pid = queue.get("/status")["pid"]
    assert str(pid) not in shown + why
    one.write_text("go\n")
    other.write_text("go\n")
    queue.wait(waits)


def test_equal_reasons_of_gpus_are_one_line(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    job, gate = start(queue, "both", exclusive=True, gpus=2)
    waits = queue.submit("true", vram="2G")
    assert f"  GPU 0, 1: held by job {job} (both)\n" in run_here("why", "-v", str(waits)).stdout
    assert "every GPU is in use" in run_here("queue").stdout
    gate.write_text("go\n")
    queue.wait(waits)


def test_a_first_run_is_what_a_job_waits_for_and_the_advice_starts_it(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    job, gate = start(queue, "first", device="0")
    waits, behind = (queue.shell(f"read word < {gate} # {number}", device="0") for number in (1, 2))
    queue.until_state(behind, "queued")
    text = f"until job {job} (first) has shown how much memory it uses (first run)"
    assert queue.get("/jobs", ids=str(waits))["jobs"][0]["reason"].startswith(text)
    sentence, *_ = run_here("why", str(waits)).stdout.splitlines()
    found = re.fullmatch(
        rf"job {waits} waits for 1 GPU {re.escape(text)}; `gpuyard (.*)` would start it now, if .*", sentence
    )
    assert found is not None, sentence
    assert "gpuyard edit" not in run_here("why", str(behind)).stdout
    assert run_here(*found[1].split()).returncode == 0
    queue.until_state(waits, "running")
    run_here("cancel", "all")


def test_a_cancelled_job_says_so_once(queue: QueueUnderTest) -> None:
    job, _ = start(queue, "cancelled", gpus=0)
    queue.post("/jobs/cancel", ids=str(job))
    queue.until_state(job, "cancelled")
    assert run_here("why", str(job)).stdout.splitlines()[0] == f"job {job} was cancelled"
    assert "cancelled: cancelled" not in run_here("history", str(job)).stdout
