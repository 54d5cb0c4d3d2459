"""The ledger of the crash tests: the daemon's view of it, and other processes that lease and wait.

Unlike the ledger of `gpuyard simulate` it has tickets, leases that several processes keep, and failures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gpuyard.errors import EnvironmentFault
from gpuyard.model.lease import Drain, Holder, Lease, Need, Share, Ticket, asks_for_the_same
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.policy.foreign_load import ForeignLoad
from gpuyard.policy.host_room import HostUse
from gpuyard.policy.machine import Machine
from gpuyard.policy.placement import choose, in_queue_order
from gpuyard.ports import WantedClaim
from tests.simulation.world import Granted, World

Decide = Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[WantedClaim]]


class SimulatedClaim:
    """Implements `ports.HeldClaim`."""

    def __init__(self, world: World, granted: Granted, keeper: str, descriptor: int) -> None:
        self._world = world
        self._keeper = keeper
        self.lease = granted.lease
        self.descriptor = descriptor

    def leave(self) -> None:
        self._world.let_go(self.lease.id, self._keeper)

    def release(self) -> None:
        self._world.end_lease(self.lease.id)


class SimulatedLedger:
    """Implements `ports.LeaseLedger` for one daemon, `keeper`: its death releases what only it holds."""

    def __init__(self, world: World, holder: Holder, keeper: str, trouble: float = 0.0) -> None:
        self.descriptors: dict[int, str] = {}
        self.has_failed = False
        self._world = world
        self._holder = holder
        self._keeper = keeper
        self._trouble = trouble
        self._ticket: str | None = None
        self._waits_for: tuple[Need, int] | None = None
        self._seen: Snapshot | None = None
        self._drains: tuple[Drain, ...] = ()  # as of the last reading

    def read(self) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
        self._may_fail("grant")
        self._drains = tuple(self._world.drains.values())
        return self._world.leases(), tuple(ticket for ticket, _ in self._world.tickets.values())

    def grant(self, decide: Decide) -> list[SimulatedClaim]:
        self._may_fail("grant")
        self._drains = tuple(self._world.drains.values())
        # The times of tickets are wall times, as of files.
        to_wall = self._world.clock.to_wall
        tickets = tuple(replace(ticket, since=to_wall(ticket.since)) for ticket, _ in self._world.tickets.values())
        claims = []
        taken: list[str] = []
        for wanted in decide(self._world.leases(), tickets):
            before = self._world.granted.get(wanted.amends or "")
            if wanted.remakes is None:  # else its program has the devices already, or has just ended
                taken += [share.device_id for share in wanted.claim.shares if _takes_more(share, before)]
            if wanted.amends is not None:
                self._world.amend_lease(wanted.amends, wanted.claim, wanted.label)
                continue
            holder = replace(self._holder, label=wanted.label)
            granted = self._world.grant(holder, wanted.claim, self._keeper, wanted.remakes)
            if wanted.remakes is None and wanted.claim.host is not None:
                self._world.check_ram()
            if self._seen is not None:
                self._world.report_grant(granted.lease, self._seen)
            descriptor = self._world.number("descriptor")
            self.descriptors[descriptor] = granted.lease.id
            claims.append(SimulatedClaim(self._world, granted, self._keeper, descriptor))
        if self._seen is not None:
            self._world.check_fit(taken, self._seen)
        return claims

    def health_marks(self) -> tuple[()]:
        return ()

    def drains(self) -> tuple[Drain, ...]:
        return self._drains

    def measure_loads(self, *_: object) -> dict[tuple[str, str], float | None]:
        return {}

    def measure_host(self, *_: object, again: bool) -> dict[str, HostUse]:
        return {}

    def measure_holders(self, *_: object) -> dict[str, float]:
        return {}

    def foreign_loads(self, *_: object) -> dict[str, ForeignLoad]:
        return {}

    def measure(self, snapshot: Snapshot, leases: tuple[Lease, ...]) -> dict[tuple[str, str], float | None]:
        self._seen = snapshot
        return self._world.measure(snapshot, leases)

    def take_ticket(self, need: Need, priority: int, label: str) -> None:
        before, before_priority = self._waits_for or (None, None)
        if before is not None and before_priority == priority and asks_for_the_same(before, need):
            return
        self._may_fail("take_ticket")
        self.return_ticket()
        self._ticket = f"ticket-{self._world.number('ticket')}"
        self._waits_for = (need, priority)
        ticket = Ticket(
            id=self._ticket,
            holder=replace(self._holder, label=label),
            need=need,
            since=self._world.now,
            priority=priority,
        )
        self._world.tickets[self._ticket] = (ticket, self._keeper)

    def return_ticket(self) -> None:
        if self._ticket is not None:
            self._world.tickets.pop(self._ticket, None)
        self._ticket = self._waits_for = None

    def my_ticket(self) -> str | None:
        return self._ticket

    def die(self) -> None:
        for lease_id in list(self._world.granted):
            self._world.let_go(lease_id, self._keeper)
        for ticket_id, (_, keeper) in list(self._world.tickets.items()):
            if keeper == self._keeper:
                del self._world.tickets[ticket_id]

    def _may_fail(self, kind: str) -> None:
        self.has_failed = self._world.random(kind).random() < self._trouble
        if self.has_failed:
            raise EnvironmentFault("the ledger is busy")


def _takes_more(share: Share, before: Granted | None) -> bool:
    """Return whether the share is larger than the lease's before. Shrinking is allowed on a device that is too full.
    What is expected of a job without an estimate may grow, as that is found out while it runs."""
    had = before.lease.on(share.device_id) if before is not None else None
    if had is None:
        return True
    return not (share.spread_mb or had.is_exclusive or (had.memory_mb or 0.0) >= (share.memory_mb or 0.0))


@dataclass(kw_only=True)
class Other:
    """A script or another user's daemon, which waits with a ticket and then leases for a while."""

    name: str
    need: Need
    priority: int
    runs_s: float
    waits_s: float


class Others:
    """All other processes. They try again whenever something may have changed, and keep the ledger's rules."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: dict[str, Other] = {}

    def arrive(self, other: Other) -> None:
        world = self._world
        ticket = Ticket(
            id=f"ticket-{world.number('ticket')}",
            holder=Holder(uid=7, user="other", pid=7000 + world.number("other"), label=other.name),
            need=other.need,
            since=world.now,
            priority=other.priority,
        )
        world.tickets[ticket.id] = (ticket, other.name)
        self._waiting[ticket.id] = other
        world.after(other.waits_s, lambda: self._give_up(ticket.id))
        self.try_again()

    def try_again(self) -> None:
        """Let all waiting processes try in queue order; those from before a reboot are gone."""
        world = self._world
        order = in_queue_order([ticket for ticket, _ in world.tickets.values()])
        for position, ticket in enumerate(order):
            other = self._waiting.get(ticket.id)
            if other is None or ticket.id not in world.tickets:
                continue
            ahead = tuple(other_ticket for other_ticket in order[:position] if other_ticket.id in world.tickets)
            seen, leases = world.snapshot(), world.leases()
            view = Machine(
                now=world.now, snapshot=seen, leases=leases, measured=world.measure(seen, leases), ahead=ahead
            )
            claim = choose(other.need, view).claim
            if claim is not None:
                granted = world.grant(ticket.holder, claim, other.name)
                world.check_fit([share.device_id for share in claim.shares], seen)
                lease_id, name = granted.lease.id, other.name
                world.after(other.runs_s, lambda lease_id=lease_id, name=name: world.let_go(lease_id, name))  # type: ignore[misc]
                self._give_up(ticket.id)

    def leave(self) -> None:
        for ticket_id in list(self._waiting):
            self._give_up(ticket_id)

    def _give_up(self, ticket_id: str) -> None:
        self._world.tickets.pop(ticket_id, None)
        self._waiting.pop(ticket_id, None)
