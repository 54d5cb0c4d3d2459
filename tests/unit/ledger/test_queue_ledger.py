"""The ledger as the queue uses it: which tickets it waits for."""

import os
import signal
import subprocess
from pathlib import Path

from msgspec.structs import replace

from gpuyard.ledger.ledger import Ledger, QueueLedger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.model.lease import FixedMemory, Lease, Need, Ticket, UncertainMemory
from gpuyard.ports import WantedClaim
from tests.unit.ledger import DEADLINE_S, ME


def waiting(queue_ledger: QueueLedger) -> list[str]:
    """Return the ids of the tickets that the queue decides on."""
    shown: list[str] = []

    def decide(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[WantedClaim]:
        shown.extend(ticket.id for ticket in tickets)
        return []

    queue_ledger.grant(decide)
    return shown


def test_a_stopped_waiter_keeps_its_ticket_and_blocks_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    queue_ledger = QueueLedger(ledger, ME)
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            ticket = ledger.take_ticket(replace(ME, pid=sleeper.pid), Need(), 0, hold_mutex(ledger.folder, DEADLINE_S))
            assert waiting(queue_ledger) == [ticket.id]
            os.kill(sleeper.pid, signal.SIGSTOP)
            os.waitpid(sleeper.pid, os.WUNTRACED)
            assert waiting(queue_ledger) == []
            os.kill(sleeper.pid, signal.SIGCONT)
            os.waitpid(sleeper.pid, os.WCONTINUED)
            assert waiting(queue_ledger) == [ticket.id]
            ticket.release()
        finally:
            sleeper.kill()


def test_the_queue_keeps_its_place_while_what_is_expected_of_its_first_job_changes(tmp_path: Path) -> None:
    queue_ledger = QueueLedger(Ledger(tmp_path), ME)
    queue_ledger.take_ticket(Need(memory=UncertainMemory(9000.0, 5000.0, 3000.0)), 0, "job 1")
    ticket = queue_ledger.my_ticket()
    queue_ledger.take_ticket(Need(memory=UncertainMemory(7000.0, 4500.0, 2000.0)), 0, "job 1")
    assert queue_ledger.my_ticket() == ticket
    for need, priority in ((Need(memory=FixedMemory(4000.0)), 0), (Need(devices=2), 0), (Need(devices=2), 1)):
        before = queue_ledger.my_ticket()
        queue_ledger.take_ticket(need, priority, "job 1")
        assert queue_ledger.my_ticket() != before, "another need has another place"
    queue_ledger.return_ticket()
