"""The head of the queue with a real daemon: programs that come later do not take what it waits for."""

import os
from pathlib import Path

from tests.fakes import gated_job
from tests.integration.queue_fixture import QueueUnderTest, until


def test_a_job_of_two_gpus_is_not_overtaken_by_a_program_of_unknown_memory(
    queue: QueueUnderTest, tmp_path: Path
) -> None:
    """On two cards of 24 GB: one job holds most of the first. The later program has run once, with other arguments, and
    is expected to fit beside the head."""
    small, opened = tmp_path / "small", tmp_path / "opened"
    opened.touch()
    first = queue.submit(*gated_job.COMMAND, "--vram", "1024", str(small), environment=dict(os.environ))
    until(lambda: queue.job(first)["attempts"][-1:] and queue.job(first)["attempts"][-1]["peaks_mb"], "its memory")
    small.touch()
    queue.wait(first)
    _, gate = queue.start_gated(vram="20G", device="0")
    head = queue.shell("true # big", gpus="2")
    later = queue.submit(*gated_job.COMMAND, "--vram", "1025", str(opened), environment=dict(os.environ))
    declared = queue.shell("true # declared", vram="4G")
    queue.wait(declared)
    assert (queue.state(head), queue.state(later)) == ("queued", "queued")
    why = queue.why(later)
    assert f"reserved for job {head} (/bin/sh -c 'true # big'), ahead in the queue; how much memory" in why
    gate.write_text("on\n")
    queue.wait()
    assert queue.job(head)["started_at"] <= queue.job(later)["started_at"]
