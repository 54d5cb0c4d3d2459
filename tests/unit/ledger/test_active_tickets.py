import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuyard.ledger.ledger import Ledger, QueueLedger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.records import active_tickets
from gpuyard.model.lease import Need
from gpuyard.system.processes import this_process
from tests.unit.ledger import DEADLINE_S, ME

pytestmark = pytest.mark.linux("elsewhere a ticket cannot show that its process runs")


class Clock:
    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def active(ledger: Ledger) -> list[str]:
    return [ticket.id for ticket in active_tickets(ledger.contents().tickets)]


def test_a_ticket_whose_process_does_not_beat_keeps_nothing_free(tmp_path: Path, clock: Clock) -> None:
    ledger = Ledger(tmp_path)
    ticket = ledger.take_ticket(ME, Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
    since = ledger.contents().tickets[0].since
    for _ in range(4):
        clock.now += 25
        assert active(ledger) == [ticket.id]
        ticket.beat()
    clock.now += 40
    assert active(ledger) == []
    assert [each.id for each in ledger.contents().tickets] == [ticket.id]
    ticket.beat()
    assert active(ledger) == [ticket.id]
    assert ledger.contents().tickets[0].since == since, "it lost its place"
    ticket.release()


def test_the_queue_beats_with_each_step(tmp_path: Path, clock: Clock) -> None:
    queue_ledger = QueueLedger(Ledger(tmp_path), ME)
    queue_ledger.take_ticket(Need(), 0, "job 1")
    for _ in range(3):
        clock.now += 25
        queue_ledger.take_ticket(Need(), 0, "job 1")
    assert [ticket.id for ticket in queue_ledger.read()[1]] == [queue_ledger.my_ticket()]
    queue_ledger.return_ticket()


def test_the_pid_of_a_ticket_in_another_container_is_not_taken_for_a_process_here(tmp_path: Path) -> None:
    program = "import os, signal; print(flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE) as stopped:
        try:
            os.waitpid(stopped.pid, os.WUNTRACED)
            ledger = Ledger(tmp_path)
            theirs = replace(this_process(), pid=stopped.pid, pid_started=1.0)
            ticket = ledger.take_ticket(theirs, Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
            assert active(ledger) == [ticket.id]
            ticket.release()
        finally:
            stopped.kill()
