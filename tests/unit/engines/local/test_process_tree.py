"""Whom a signal reaches among the processes of an attempt, round by round."""

import signal

import pytest

from gpuyard.core.job.job import Attempt
from gpuyard.engines.local import process_tree
from gpuyard.engines.local.process_tree import TrackedProcess, signal_all

ATTEMPT = Attempt(job_id=1, number=1, pid=9, boot_id=None, started_at=0.0)


@pytest.mark.parametrize(("signum", "reached"), [(signal.SIGKILL, [10, 11, 12]), (signal.SIGTERM, [10])])
def test_a_kill_goes_on_until_nobody_new_is_found(
    monkeypatch: pytest.MonkeyPatch, signum: int, reached: list[int]
) -> None:
    """Each time one is killed, its child is already there; a signal that can be answered is sent once."""
    rounds = iter([[10], [10, 11], [12], []])
    told: list[int] = []

    def send(process: TrackedProcess, _: int) -> bool:
        told.append(process.pid)
        return True

    monkeypatch.setattr(process_tree, "processes_of", lambda *_: [process(pid) for pid in next(rounds)])
    monkeypatch.setattr(process_tree, "send", send)
    assert signal_all(ATTEMPT, "queue", signum) == len(reached)
    assert told == reached


def process(pid: int) -> TrackedProcess:
    return TrackedProcess(pid=pid, parent=1, session=pid, started=float(pid), is_dead=False, is_stopped=False)
