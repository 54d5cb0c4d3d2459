"""The ticket of the queue in the ledger: when it is taken, kept and returned."""

from typing import Any, cast

import pytest

from gpuyard.model.lease import Need
from gpuyard.policy.queue_order import Lane
from gpuyard.policy.wait_reasons import Reason, ReasonKind
from gpuyard.policy.world import WaitingJob
from gpuyard.ports import LeaseLedger
from gpuyard.queue.own_leases import TICKET_AFTER_S, QueueTicket


class TicketLedger:
    """The part of a ledger that has tickets."""

    def __init__(self) -> None:
        self.tickets: list[str] = []
        self.ticket: str | None = None

    def take_ticket(self, need: Need, priority: int, label: str) -> None:
        if self.ticket is None:
            self.ticket = label
            self.tickets.append(label)

    def return_ticket(self) -> None:
        self.ticket = None

    def my_ticket(self) -> str | None:
        return self.ticket


@pytest.fixture
def ledger() -> TicketLedger:
    return TicketLedger()


@pytest.fixture
def queue_ticket(ledger: TicketLedger) -> QueueTicket:
    return QueueTicket(cast("LeaseLedger", ledger))


def head(job_id: int = 1, kind: ReasonKind = ReasonKind.LEASED, **of_lane: Any) -> WaitingJob:
    lane = Lane(id=1, priority=0, user="me", tag="", need=Need(), **of_lane)
    return WaitingJob(job_id=job_id, lane=lane, need=Need(), reasons=(Reason(kind, "why"),))


def test_a_job_that_waits_for_leases_takes_a_ticket_later(ledger: TicketLedger, queue_ticket: QueueTicket) -> None:
    queue_ticket.update(head(), 100.0, has_started=False, others_wait=False)
    assert [ledger.ticket] == [None]
    assert queue_ticket.wake_at(100.0) == 100.0 + TICKET_AFTER_S
    queue_ticket.update(head(), 100.0 + TICKET_AFTER_S, has_started=False, others_wait=False)
    assert ledger.ticket == "job 1"
    assert queue_ticket.wake_at(100.0 + TICKET_AFTER_S) is None


def test_where_others_wait_it_takes_a_ticket_at_once(ledger: TicketLedger, queue_ticket: QueueTicket) -> None:
    queue_ticket.update(head(), 100.0, has_started=True, others_wait=True)
    assert ledger.ticket == "job 1"


def test_after_a_start_the_queue_takes_a_new_ticket_until_none_waits(
    ledger: TicketLedger, queue_ticket: QueueTicket
) -> None:
    for now in (100.0, 101.0):
        queue_ticket.update(head(), now, has_started=False, others_wait=False)
    queue_ticket.update(head(job_id=2), 102.0, has_started=True, others_wait=False)
    assert ledger.ticket is None
    queue_ticket.update(head(job_id=2), 103.0, has_started=False, others_wait=False)
    assert ledger.tickets == ["job 1", "job 2"]
    for now in (100.0, 101.0):
        queue_ticket.update(head(), now, has_started=False, others_wait=False)
    queue_ticket.update(None, 102.0, has_started=False, others_wait=False)
    assert ledger.ticket is None
    assert queue_ticket.wake_at(102.0) is None


@pytest.mark.parametrize("kind", [ReasonKind.PAUSED, ReasonKind.ENGINE])
def test_a_job_held_back_by_gpuyard_takes_no_ticket(
    ledger: TicketLedger, queue_ticket: QueueTicket, kind: ReasonKind
) -> None:
    for now in (100.0, 101.0):
        queue_ticket.update(head(kind=kind), now, has_started=False, others_wait=False)
    assert ledger.tickets == []
