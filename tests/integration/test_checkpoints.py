"""A disk that does not answer keeps no request waiting that it need not, and a kill meanwhile loses nothing."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.compile_library import compile_library
from tests.integration.queue_fixture import DAEMON, DEADLINE_S, QueueUnderTest, until
from tests.integration.test_queue_faults import has_in_file

pytestmark = [pytest.mark.needs("cc"), pytest.mark.linux]
GPUYARD = [sys.executable, "-m", "gpuyard"]
_SOURCE = Path(__file__).parent.parent / "fakes" / "hold_sync.c"


class SlowDisk:
    def __init__(self, queue: QueueUnderTest, folder: Path, library: Path) -> None:
        self._queue = queue
        self._hold = folder / "hold"
        self._variables = (f"LD_PRELOAD={library}", f"HOLD_SYNC={self._hold}")

    def start(self, held: str = "queue.db") -> None:
        self._queue.start(("env", *self._variables, f"HOLD_NAME={held}", *DAEMON))

    @contextlib.contextmanager
    def stuck(self) -> Iterator[None]:
        """Make syncs of the held file wait. A quiet queue syncs `queue.db`, at a checkpoint, after a second."""
        self._hold.touch()
        try:
            yield
        finally:
            self._hold.unlink()

    def await_sync(self) -> None:
        until(Path(f"{self._hold}.reached").exists, "a sync")


@pytest.fixture
def disk(own_queue: QueueUnderTest, tmp_path: Path) -> SlowDisk:
    return SlowDisk(own_queue, tmp_path, compile_library(_SOURCE, tmp_path / "hold_sync.so", "-ldl"))


def test_requests_are_answered_and_jobs_run_while_a_checkpoint_waits_for_the_disk(
    own_queue: QueueUnderTest, disk: SlowDisk
) -> None:
    queue = own_queue
    disk.start()
    held = queue.submit("true", gpus=0, hold=True)
    with disk.stuck():
        disk.await_sync()
        assert queue.counts() == {"held": 1}
        ran = queue.submit("true", gpus=0)
        queue.wait(ran)
        queue.post("/jobs/release", ids=str(held))
        queue.wait(held)
    path = queue.home / "queue.db"
    until(lambda: has_in_file(path, ran), "the jobs in the file")


def test_a_submission_is_acknowledged_when_it_is_on_disk_and_others_are_answered_before(
    own_queue: QueueUnderTest, disk: SlowDisk
) -> None:
    queue = own_queue
    disk.start("queue.db-wal")
    with disk.stuck():
        submitting = subprocess.Popen([*GPUYARD, "submit", "--gpus", "0", "--hold", "--", "true"])
        until(lambda: queue.counts() == {"held": 1}, "the stored job")
        disk.await_sync()
        queue.get("/status")
        assert submitting.poll() is None
    assert submitting.wait(DEADLINE_S) == 0


def test_a_kill_during_a_checkpoint_loses_nothing(own_queue: QueueUnderTest, disk: SlowDisk) -> None:
    queue = own_queue
    disk.start()
    jobs = queue.send("true", gpus=0, hold=True, array="1-500")
    with disk.stuck():
        disk.await_sync()
        later = queue.submit("true", gpus=0, hold=True)
        queue.kill9()
    queue.start()
    assert queue.get("/status")["notices"] == []
    assert queue.counts() == {"held": 501}
    assert later == jobs["last"] + 1
