"""Choose devices for one request: a claim beside the requests ahead of it, or the reasons why it has to wait."""

from msgspec import Struct

from gpuyard.core.lease import Claim, Holder, Need
from gpuyard.core.scheduling import wait_reasons
from gpuyard.core.scheduling.machine import Machine
from gpuyard.core.scheduling.placement import PlacementState
from gpuyard.core.scheduling.wait_reasons import Reason

_NO_HOLDER = Holder(uid=0, user="", pid=0)


class PlacementChoice(Struct, frozen=True, kw_only=True):
    claim: Claim | None
    reasons: tuple[Reason, ...] = ()


def choose(need: Need, machine: Machine) -> PlacementChoice:
    """Return a claim on the best devices for `need`, or the reasons why none is possible now."""
    placement = PlacementState(machine)
    claim = placement.find_claim(need)
    for ticket in machine.ahead:
        if claim is None:
            break  # more reservations would not change that
        placement.reserve_for_ticket(ticket)
        claim = placement.find_claim(need)
    if claim is None:
        return PlacementChoice(claim=None, reasons=tuple(placement.explain(need)))
    blocked = _first_blocked(claim, machine)
    if blocked is None:
        return PlacementChoice(claim=claim)
    places = tuple(share.device_id for share in claim.shares) or (None,)
    reasons = (wait_reasons.awaited(device_id, (blocked,)) for device_id in places)
    return PlacementChoice(claim=None, reasons=tuple(reasons))


def _first_blocked(claim: Claim, machine: Machine) -> Holder | None:
    """Return the holder of the first ticket ahead that this claim would block, or None. Reservations alone do not rule
    this out: beside the claim, the requests ahead may be placed on other devices than reserved, and then block each
    other."""
    before, after = PlacementState(machine), PlacementState(machine)
    after.add_claim(claim, _NO_HOLDER)
    for ticket in machine.ahead:
        without_claim, with_claim = before.find_claim(ticket.need), after.find_claim(ticket.need)
        if without_claim is None:
            return None
        if with_claim is None:
            return ticket.holder
        before.add_claim(without_claim, ticket.holder)
        after.add_claim(with_claim, ticket.holder)
    return None
