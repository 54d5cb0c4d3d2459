"""Why jobs wait, as `queue` and `why` say it: the reason of each GPU, and jobs by their names."""

from pathlib import Path
from typing import Any

from tests.fakes.queue_command import run
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
    held, kept = f"GPU 0: held by job {alone} (alone)", "GPU 1: 14 GB free, 20 GB needed: 10 GB kept for "
    shown = run("queue").stdout
    assert f"{held}; {kept}job {sharing} (shares)" in shown
    why = run("why", str(waits)).stdout
    assert held in why
    assert f"{kept}job {sharing} (shares)" in why
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
    assert f"  GPU 0, 1: held by job {job} (both)\n" in run("why", str(waits)).stdout
    assert "every GPU is in use" in run("queue").stdout
    gate.write_text("go\n")
    queue.wait(waits)
