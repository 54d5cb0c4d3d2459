"""The head of the queue with a real daemon: programs that come later do not take what it waits for."""

from tests.integration.queue_fixture import QueueUnderTest


def test_a_job_of_two_gpus_is_not_overtaken_by_a_program_of_unknown_memory(queue: QueueUnderTest) -> None:
    """On two cards of 24 GB: one job holds most of the first, and nothing is known about the others."""
    _, gate = queue.start_gated(vram="20G", device="0")
    head = queue.shell("true # big", gpus="2")
    later = queue.shell("true # later")
    told = queue.shell("true # told", vram="4G")
    queue.wait(told)
    assert (queue.state(head), queue.state(later)) == ("queued", "queued")
    assert f"(job {head}), ahead in the queue; how much memory this job needs is not known yet" in queue.why(later)
    gate.write_text("on\n")
    queue.wait()
    assert queue.job(head)["started_at"] <= queue.job(later)["started_at"]
