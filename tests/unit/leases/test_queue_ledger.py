"""The ledger as the queue uses it: which tickets it waits for."""

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
            ticket = ledger.take_ticket(replace(ME, pid=sleeper.pid), Need(), 0, DEADLINE_S)
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
