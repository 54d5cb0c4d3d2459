"""The queue's own ticket in the ledger, for the job at the head of the queue."""

import contextlib
from typing import TypeAlias

from gpuyard.core.lease import Lease, Ticket
from gpuyard.core.scheduling.plan import WaitingJob
from gpuyard.core.scheduling.wait_reasons import ReasonKind
from gpuyard.errors import EnvironmentFault
from gpuyard.ports import LeaseLedger

# A job waits this long before it gets a ticket: most waits are over by then, and a ticket is a file. Where others wait
# with tickets, it gets one at once.
TICKET_AFTER_S = 0.25
LedgerState: TypeAlias = tuple[tuple[Lease, ...], tuple[Ticket, ...]]
_WAITS_FOR_US = frozenset({ReasonKind.PAUSED, ReasonKind.ENGINE, ReasonKind.RESOURCE_LIMIT})


class QueueTicket:
    def __init__(self, leases: LeaseLedger) -> None:
        self._leases = leases
        self._head_since: tuple[int, float] | None = None
        self._after_s = TICKET_AFTER_S

    def update(self, head: WaitingJob | None, now: float, *, has_started: bool, others_wait: bool) -> None:
        """Keep a ticket for `head`, unless it waits only for this queue itself. After a start of one of our jobs, the
        ticket is given up, so that the queue goes behind those that already wait."""
        self._after_s = 0.0 if others_wait else TICKET_AFTER_S
        if head is None or has_started:
            self._leases.return_ticket()
            self._head_since = None
        if head is None:
            return
        if self._head_since is None or self._head_since[0] != head.lane.id:
            self._head_since = (head.lane.id, now)
        waits_for_others = not any(reason.kind in _WAITS_FOR_US for reason in head.reasons)
        if now - self._head_since[1] >= self._after_s and waits_for_others:
            with contextlib.suppress(EnvironmentFault):
                self._leases.take_ticket(head.need, head.lane.priority, f"job {head.job_id}")

    def wake_at(self, now: float) -> float | None:
        """Return when the head is due to get a ticket, or None."""
        if self._head_since is None or self._leases.my_ticket() is not None:
            return None
        due_at = self._head_since[1] + self._after_s
        return due_at if now < due_at else None
