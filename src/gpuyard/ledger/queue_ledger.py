"""The ledger as the daemon uses it: many claims in one step, and one ticket for all its waiting jobs."""

import os
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from gpuyard.ledger.ledger import HeldLease, Ledger
from gpuyard.ledger.ledger_mutex import MutexTurns, prepare_directory
from gpuyard.ledger.lock_file import LockFile
from gpuyard.ledger.measured_usage import ForeignLoadTracker, HostMeter, measure, measure_loads
from gpuyard.ledger.records import active_tickets
from gpuyard.model.lease import Claim, Drain, Holder, Lease, Need, Ticket, asks_for_the_same
from gpuyard.model.machine_snapshot import HealthMark
from gpuyard.policy.host_room import HostUse
from gpuyard.ports import WantedClaim


class QueueLedger:
    measure = staticmethod(measure)
    measure_loads = staticmethod(measure_loads)

    def __init__(self, ledger: Ledger, holder: Holder) -> None:
        self.ledger = ledger
        self._holder = holder
        self._ticket: LockFile | None = None
        self._waits_for: tuple[Need, int] | None = None
        self.foreign_loads = ForeignLoadTracker().update
        self._is_private = not ledger.folder.stat().st_mode & 0o077
        self._host_meter = HostMeter()
        # Of the mutex: the queue has requests to answer, so it never waits for others.
        self.turns = MutexTurns(ledger.folder)

    def grant(
        self, decide: Callable[[tuple[Lease, ...], tuple[Ticket, ...]], Sequence[WantedClaim]]
    ) -> Sequence[HeldLease]:
        def decide_as_us(leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> list[tuple[Holder, Claim]]:
            wanted = decide(leases, tuple(active_tickets(tickets)))
            for each in wanted:
                if each.remakes is not None:
                    holder = replace(self._holder, label=each.label)
                    remade.append(self.ledger.remake(each.remakes, holder, each.claim))
                elif each.amends is not None:
                    self.ledger.amend(each.amends, each.claim, each.label)
            new = (each for each in wanted if each.amends is None and each.remakes is None)
            return [(replace(self._holder, label=each.label), each.claim) for each in new]

        remade: list[HeldLease] = []
        folder = self.ledger.folder
        # A private directory that was removed is made again, unless its parent is gone, too. For each grant: pathlib
        # takes ten times as long.
        if self._is_private and not os.path.isdir(folder) and folder.parent.is_dir():
            prepare_directory(folder)
        try:
            granted = self.ledger.claim_all(decide_as_us, self.turns.hold())
        except BaseException:
            for held in remade:
                held.release()
            raise
        return [*remade, *granted]

    def read(self) -> tuple[tuple[Lease, ...], tuple[Ticket, ...]]:
        """Return all live leases, and the tickets of processes that run. Never waits for another process."""
        contents = self.ledger.contents()
        return contents.leases, tuple(active_tickets(contents.tickets))

    def measure_host(self, leases: Sequence[Lease], *, again: bool) -> Mapping[str, HostUse]:
        if again:
            self._host_meter.forget()
        return self._host_meter.use_of(leases)

    def measure_holders(self, leases: Sequence[Lease]) -> Mapping[str, float]:
        return HostMeter().held_by(leases)

    def drains(self) -> tuple[Drain, ...]:
        return self.ledger.drains

    def health_marks(self) -> tuple[HealthMark, ...]:
        return self.ledger.health_marks

    def take_ticket(self, need: Need, priority: int, label: str) -> None:
        if self._ticket is not None and self._waits_for is not None:
            before, before_priority = self._waits_for
            if priority == before_priority and asks_for_the_same(before, need):
                self._ticket.beat()
                return
        self.return_ticket()
        holder, mutex = replace(self._holder, label=label), self.turns.hold()
        self._ticket = self.ledger.take_ticket(holder, need, priority, mutex)
        self._waits_for = (need, priority)

    def return_ticket(self) -> None:
        if self._ticket is not None:
            self._ticket.release()
        self._ticket = self._waits_for = None

    def my_ticket(self) -> str | None:
        return self._ticket.id if self._ticket is not None else None
