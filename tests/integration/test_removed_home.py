"""A queue's folder that is removed, renamed or replaced under its daemon."""

import os
import shutil
from pathlib import Path

import pytest

from gpuyard.errors import GpuyardError
from gpuyard.ledger.ledger import open_ledger
from tests.integration.queue_fixture import Daemon, QueueUnderTest, until

MOST_OF_A_CARD = "20G"


def move_away(queue: QueueUnderTest) -> Path:
    away = queue.home.with_name("away")
    os.rename(queue.home, away)
    return away


def old_daemon(queue: QueueUnderTest) -> Daemon:
    daemon, queue.daemon = queue.daemon, None
    assert daemon is not None
    return daemon


@pytest.mark.parametrize("is_removed", [True, False])
def test_the_daemon_starts_nothing_more_guards_its_jobs_and_ends_with_them(
    queue: QueueUnderTest, is_removed: bool
) -> None:
    running, gate = queue.start_gated(vram=MOST_OF_A_CARD)
    (lease,) = open_ledger().leases()
    away = move_away(queue)
    if is_removed:
        shutil.rmtree(away)
    old = old_daemon(queue)
    until(lambda: "was removed, renamed or replaced" in old.log, "its notice")
    (notice,) = queue.get("/status")["notices"]
    assert "starts no more jobs" in notice
    with pytest.raises(GpuyardError, match="was removed, renamed or replaced"):
        queue.submit("true", gpus=0)
    queue.client.close()
    queue.start()  # a second daemon, at the same path
    assert queue.daemon is not None
    assert "of an earlier queue" in queue.daemon.log
    assert f"job {running}" in queue.get("/status")["notices"][0]
    until(lambda: [each.id for each in open_ledger().leases()] == [lease.id], "the lease in the new ledger")
    beside, beside_gate = queue.start_gated("beside", vram=MOST_OF_A_CARD)
    assert beside > running, "the second queue does not give the ids of jobs that still run"
    waiting = queue.submit("true", vram=MOST_OF_A_CARD)
    until(lambda: "GPU" in queue.why(waiting), "a reason")
    assert queue.state(waiting) == "queued"
    gate.write_text("go\n")
    assert old.wait() == 1
    assert queue.wait(waiting)["succeeded"] == 1, "the second daemon still has its socket"
    beside_gate.write_text("go\n")
    queue.wait()
    shutil.rmtree(away, ignore_errors=True)


def test_an_idle_daemon_whose_folder_is_gone_ends(queue: QueueUnderTest) -> None:
    queue.submit("true", gpus=0, hold=True)
    away = move_away(queue)
    old = old_daemon(queue)
    assert old.wait() == 1
    assert "was removed, renamed or replaced" in old.log
    queue.client.close()
    shutil.rmtree(queue.home, ignore_errors=True)  # where the simulated GPUs left a file
    os.rename(away, queue.home)
    queue.start()
    assert queue.counts() == {"held": 1}


def test_a_lock_file_that_is_replaced_counts_as_another_home(queue: QueueUnderTest) -> None:
    lock = queue.home / "daemon.lock"
    lock.unlink()
    lock.write_text("")
    old = old_daemon(queue)
    assert old.wait() == 1
    queue.client.close()
    assert not (queue.home / "daemon.sock").exists()
