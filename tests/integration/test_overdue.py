"""The estimated start of a job behind one that runs for longer than expected."""

import re

from tests.fakes.queue_command import run
from tests.integration.queue_fixture import QueueUnderTest, until


def test_a_start_that_should_have_come_is_overdue(own_queue: QueueUnderTest) -> None:
    own_queue.start()
    _, gate = own_queue.start_gated(duration="1s", exclusive=True, device="0")
    behind = own_queue.shell("true", exclusive=True, device="0")
    until(lambda: own_queue.get(f"/jobs/{behind}/why")["is_overdue"], "the end of the second that it should take")
    text = run("why", str(behind)).stdout
    assert re.search(r"was expected to start \d.*: overdue by \d+s: the jobs before it take longer than expected", text)
    assert "in about 0s" not in text
    gate.write_text("go\n")
    own_queue.wait(behind)
