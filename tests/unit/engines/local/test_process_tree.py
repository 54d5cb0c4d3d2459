"""Which processes of an attempt a signal reaches, round by round."""

import signal
from types import SimpleNamespace

import pytest

from gpuyard.engines.local import attempt_processes as process_tree
from gpuyard.engines.local.attempt_processes import TrackedProcess, signal_each
from gpuyard.model.job import Attempt, Started

ATTEMPT = Attempt(job_id=1, number=1, phase=Started(at=0.0, keeper_pid=9), boot_id=None)


@pytest.mark.parametrize(("signum", "reached"), [(signal.SIGKILL, [10, 11, 12]), (signal.SIGTERM, [10])])
def test_a_kill_is_repeated_for_new_processes(monkeypatch: pytest.MonkeyPatch, signum: int, reached: list[int]) -> None:
    """Each killed process has forked already; a signal that a process can catch is sent once."""
    rounds = iter([[10], [10, 11], [12], []])
    signalled: list[int] = []

    def send(process: TrackedProcess, _: int) -> bool:
        signalled.append(process.pid)
        return True

    def table(_: str) -> SimpleNamespace:
        found = [process(pid) for pid in next(rounds)]
        return SimpleNamespace(of=lambda _: found)

    monkeypatch.setattr(process_tree, "ProcessTable", table)
    monkeypatch.setattr(process_tree, "send", send)
    assert signal_each([ATTEMPT], "queue", signum) == [len(reached)]
    assert signalled == reached


def process(pid: int) -> TrackedProcess:
    return TrackedProcess(pid=pid, parent=1, session=pid, started=float(pid), is_dead=False, is_stopped=False)
