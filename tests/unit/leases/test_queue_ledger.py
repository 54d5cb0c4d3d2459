"""The ledger as the queue uses it: whom it waits for."""

import os
import signal
import subprocess
from pathlib import Path

from msgspec.structs import replace

from gpuyard.core.lease import Lease, Need, Ticket
from gpuyard.leases.ledger import Ledger
from gpuyard.leases.queue_ledger import QueueLedger
from gpuyard.ports import WantedClaim
from tests.unit.leases import DEADLINE_S, ME


def waiting(book: QueueLedger) -> list[str]:
    """The tickets that the queue is shown when it decides."""
    seen: list[str] = []

    def decide(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[WantedClaim]:
        seen.extend(ticket.id for ticket in tickets)
        return []

    book.grant(decide)
    return seen


def test_a_stopped_waiter_keeps_its_ticket_and_blocks_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    book = QueueLedger(ledger, ME)
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        try:
            ticket = ledger.take_ticket(replace(ME, pid=sleeper.pid), Need(), 0, DEADLINE_S)
            assert waiting(book) == [ticket.id]
            os.kill(sleeper.pid, signal.SIGSTOP)
            os.waitpid(sleeper.pid, os.WUNTRACED)
            assert waiting(book) == []
            os.kill(sleeper.pid, signal.SIGCONT)
            os.waitpid(sleeper.pid, os.WCONTINUED)
            assert waiting(book) == [ticket.id]
            ticket.release()
        finally:
            sleeper.kill()
