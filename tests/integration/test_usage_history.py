"""The history of the GPUs on the page outlasts the daemon."""

import signal

from tests.integration.queue_fixture import QueueUnderTest, until


def times(queue: QueueUnderTest) -> list[float]:
    queue.get("/devices")  # as the page does: the machine is sampled
    found = queue.get("/devices/history", span="10m")["devices"].get("SIM-0")
    return [] if found is None else found["at"]


def test_the_history_of_the_gpus_survives_a_restart(own_queue: QueueUnderTest) -> None:
    queue = own_queue
    queue.start()
    until(lambda: len(times(queue)) >= 2, "two points of the history")
    before = times(queue)
    queue.restart(signal.SIGTERM)
    until(lambda: times(queue)[: len(before) - 1] == before[:-1], "what was measured before the restart")
    assert (queue.home / "usage-history").stat().st_mode & 0o777 == 0o600
    (queue.home / "usage-history").write_bytes(b"garbage")
    queue.restart()
    until(lambda: times(queue), "a history that begins anew")
