"""Tickets whose processes can use what is kept free for them."""

from collections.abc import Iterable

from gpuyard.core.lease import Ticket
from gpuyard.system.process_identity import is_stopped


def active_tickets(tickets: Iterable[Ticket]) -> list[Ticket]:
    """Return the tickets of processes that run, in the order given.

    A process that is stopped, as by Ctrl-Z, keeps its ticket, but no device is kept free for it meanwhile. A stopped
    process of this system is noticed at once; one in another container, or one that hangs, when its ticket is idle.
    """
    return [ticket for ticket in tickets if not ticket.is_idle and not is_stopped(ticket.holder)]
