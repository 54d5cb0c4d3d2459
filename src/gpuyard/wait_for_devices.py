"""Waits in the ledger's line for devices, with an eye on the machine."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpuyard.core.lease import Claim, Lease, Need, Share, Ticket
from gpuyard.core.scheduling.device_fit import Packing
from gpuyard.core.scheduling.foreign_load import ForeignLoad
from gpuyard.core.scheduling.placement import PlacementChoice, PlacementView, choose, in_queue_order
from gpuyard.core.scheduling.wait_reasons import Reason, ReasonKind
from gpuyard.core.snapshot import Snapshot
from gpuyard.errors import UserError, WaitedTooLong
from gpuyard.leases.file_watch import FileWatch
from gpuyard.leases.foreign_load_tracker import ForeignLoads
from gpuyard.leases.ledger import HeldLease, HeldTicket, Ledger
from gpuyard.leases.measured_usage import LEASE_VARIABLE, measure
from gpuyard.system.process_identity import is_stopped, this_process

# Many waiters wake up at once; those that follow within this time go by the same look at the machine.
_FRESH_S = 0.005
_WATCHED_AT_MOST = 16


def enclosing_lease(ledger: Ledger, need: Need) -> Lease | None:
    """The lease that this process was started with, where it has what is needed: to wait for oneself would be for ever.

    UserError where it holds every device in question, and not enough of any.
    """
    lease_id = os.environ.get(LEASE_VARIABLE)
    lease = next((lease for lease in ledger.leases() if lease.id == lease_id), None) if lease_id else None
    if lease is None or lease.holder.uid != os.getuid() or not need.devices:
        return None
    held = [share for share in lease.shares if need.only is None or share.device_id in need.only]
    enough = [share for share in held if _covers(share, need)]
    if len(enough) >= need.devices:
        return replace(lease, shares=tuple(enough[: need.devices]))
    if need.only is not None and len(held) == len(need.only):
        raise UserError(
            f"this runs inside lease {lease.id}, which holds the GPUs asked for, and less of them than is asked for",
            hint="ask for as much with `gpuyard run` around it, or for less inside",
        )
    return None


def _covers(share: Share, need: Need) -> bool:
    if share.is_exclusive:
        return True
    return not need.is_exclusive and (share.memory_mb or 0.0) >= (need.memory_mb or 0.0)


class Acquisition:
    """One need, from the first look to the lease."""

    def __init__(  # noqa: PLR0913 - a need and how to wait for it
        self,
        ledger: Ledger,
        look: Callable[[], Snapshot],
        need: Need,
        *,
        priority: int = 0,
        label: str | None = None,
        mutex_timeout_s: float = 10.0,
        max_foreign_load_percent: float | None = None,
    ) -> None:
        self._ledger = ledger
        self._look = look
        self._need = need
        self._priority = priority
        self._holder = this_process(label)
        self._mutex_timeout_s = mutex_timeout_s
        self._packing = Packing(max_foreign_load_percent=max_foreign_load_percent)
        self._foreign = ForeignLoads()
        self._loads: Mapping[str, ForeignLoad] = {}
        self._ticket: HeldTicket | None = None
        self._snapshot: Snapshot | None = None
        self._looked_at = 0.0
        self.reasons: tuple[Reason, ...] = ()

    def wait(
        self,
        max_wait_s: float,
        poll_interval_s: float,
        on_wait: Callable[[tuple[Reason, ...]], None] = lambda _: None,
    ) -> HeldLease:
        """The lease, as soon as it can be had; WaitedTooLong where that takes longer than `max_wait_s`."""
        deadline = time.monotonic() + max_wait_s
        held = self.attempt()
        if held is not None:
            return held
        with contextlib.ExitStack() as stack:
            notice = FileWatch(self._ledger.folder)
            stack.callback(notice.give_back)
            ticket = self._ticket = self._enter_line()
            stack.callback(ticket.release)
            while (held := self.attempt()) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise WaitedTooLong(self._complaint(max_wait_s))
                on_wait(self.reasons)
                notice.wait(min(left, poll_interval_s), self._in_the_way())
            return held

    def _in_the_way(self) -> list[int]:
        """Return the processes that keep devices too busy: the end of one is news."""
        loads = [load for load in self._loads.values() if load.is_over]
        return [stranger.process.pid for load in loads for stranger in load.processes][:_WATCHED_AT_MOST]

    def attempt(self) -> HeldLease | None:
        """The lease if it can be had now; otherwise `reasons` says why not."""
        self._look_again()
        return self._ledger.claim(self._holder, self._decide, self._mutex_timeout_s, self._ticket)

    def _enter_line(self) -> HeldTicket:
        return self._ledger.enter_line(self._holder, self._need, self._priority, self._mutex_timeout_s)

    def _look_again(self) -> None:
        """Before the ledger's mutex is taken: a slow driver must not hold up everybody.

        What happens in between is safe: a new lease is charged what it reserves, and one that has ended since still
        has its memory counted, as a stranger's, until the next look.
        """
        now = time.monotonic()
        if self._snapshot is None or now - self._looked_at > _FRESH_S:
            self._snapshot, self._looked_at = self._look(), now

    def _decide(self, leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> Claim | None:
        assert self._snapshot is not None
        bound = self._packing.max_foreign_load_percent
        self._loads = self._foreign.follow(self._snapshot, leases, time.monotonic(), bound)
        view = PlacementView(
            now=time.time(),
            snapshot=self._snapshot,
            leases=leases,
            measured=measure(self._snapshot, leases),
            foreign=self._loads,
            packing=self._packing,
            ahead=self._ahead(tickets),
        )
        choice: PlacementChoice = choose(self._need, view)
        self.reasons = choice.reasons
        return choice.claim

    def _ahead(self, tickets: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
        """Those before us; whoever has no ticket yet comes after all of the same priority.

        One who was halted keeps its place in the line, and for that time nothing is kept for it.
        """
        line = [ticket for ticket in in_queue_order(tickets) if not is_stopped(ticket.holder)]
        mine = self._ticket.id if self._ticket else None
        for place, ticket in enumerate(line):
            if ticket.id == mine or (mine is None and ticket.priority < self._priority):
                return tuple(line[:place])
        return tuple(line)

    def _complaint(self, waited_s: float) -> str:
        """What was missing on each device that would do, and what changes that; the others were never in question."""
        telling = [reason for reason in self.reasons if reason.kind is not ReasonKind.NOT_ASKED_FOR]
        lines = [f"  {reason.device_id or 'machine'}: {reason.text}" for reason in telling]
        lines += [f"  to change that: {remedy}" for remedy in dict.fromkeys(each.remedy for each in telling) if remedy]
        count = self._need.devices
        missed = f"{count} device{'' if count == 1 else 's'} could not be had" if count else "there was no room"
        return "\n".join([f"{missed} within {waited_s:g} s", *lines])
