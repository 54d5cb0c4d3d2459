"""Acquisition: wait with a ticket until the ledger grants a lease for a need. WaitMessages: say what it waits for."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from gpuyard.config import CurrentBans, load_config
from gpuyard.errors import UserError, WaitedTooLong
from gpuyard.ledger.file_watch import FileWatch
from gpuyard.ledger.ledger import HeldLease, Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.lock_file import BEAT_EVERY_S, LockFile
from gpuyard.ledger.measured_usage import LEASE_VARIABLE, ForeignLoadTracker, HostMeter, measure
from gpuyard.ledger.records import active_tickets
from gpuyard.model.lease import Claim, Lease, Need, Share, Ticket
from gpuyard.model.machine_snapshot import Host, Snapshot
from gpuyard.model.printable_text import printable
from gpuyard.model.units import format_count, format_duration
from gpuyard.policy.declared_ram import host_closed_reason, judge_host, ram_figures
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.foreign_load import ForeignLoad, SteadyGate
from gpuyard.policy.host_room import HostUse, HostView
from gpuyard.policy.linked_sets import best_set, conditions_of
from gpuyard.policy.machine import Machine, Packing
from gpuyard.policy.placement import PlacementChoice, choose, in_queue_order
from gpuyard.policy.wait_reasons import Reason, ReasonKind, describe_wait, relevant_reasons
from gpuyard.system.processes import this_process

# A snapshot is used again for this long: one event may wake up a waiting process several times.
_FRESH_S = 0.005
_MAX_WATCHED_PIDS = 16


def enclosing_lease(ledger: Ledger, need: Need, seen: Snapshot) -> Lease | None:
    """Return the lease that this process was started with, if it covers the need: waiting for its own devices would
    never end. It has the best-linked of its devices, as many as the need asks for.

    Raises UserError if that lease holds every device that the need allows, but not enough of them.
    """
    lease_id = os.environ.get(LEASE_VARIABLE)
    lease = next((lease for lease in ledger.leases() if lease.id == lease_id), None) if lease_id else None
    if lease is None or lease.holder.uid != os.getuid() or not need.devices:
        return None
    held = [share for share in lease.shares if need.only is None or share.device_id in need.only]
    enough = [share for share in held if _covers(share, need)]
    chosen = best_set(seen.topology, [share.device_id for share in enough], conditions_of(need))
    if chosen is not None:
        return replace(lease, shares=tuple(share for share in enough if share.device_id in chosen))
    if need.only is not None and len(held) == len(need.only):
        raise UserError(
            f"this process runs inside lease {lease.id}, which holds less of the requested GPUs than is requested",
            hint="request more in the `gpuyard run` around it, or less inside",
        )
    return None


def _covers(share: Share, need: Need) -> bool:
    if share.is_exclusive:
        return True
    return not need.is_exclusive and (share.memory_mb or 0.0) >= (need.required_mb or 0.0)


class Acquisition:
    """One need, from the first snapshot to the lease.

    `look` reads the machine. `max_foreign_load_percent` is the load by foreign processes from which a device counts as
    taken (None: no limit).
    """

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
        self._bans = CurrentBans()
        self._host_limits = load_config().host.limits
        self._host_meter = HostMeter()
        self._floor_gate = SteadyGate()
        self._foreign = ForeignLoadTracker()
        self._loads: Mapping[str, ForeignLoad] = {}
        self._ticket: LockFile | None = None
        self._snapshot: Snapshot | None = None
        self._looked_at = 0.0
        self.reasons: tuple[Reason, ...] = ()

    def wait(
        self,
        max_wait_s: float,
        poll_interval_s: float,
        on_wait: Callable[[tuple[Reason, ...]], None] = lambda _: None,
    ) -> HeldLease:
        """Return the lease as soon as it is granted. Raises WaitedTooLong after `max_wait_s`.

        `on_wait` gets the reasons each time before this process waits, at most `poll_interval_s` at a time.
        """
        held: HeldLease | None = None
        try:
            held = self.attempt()
            if held is None:
                with contextlib.ExitStack() as stack:
                    held = self._wait_with_ticket(stack, max_wait_s, poll_interval_s, on_wait)
        except BaseException:  # also an interrupt that comes after the grant
            if held is not None:
                held.release()
            raise
        return held

    def _wait_with_ticket(
        self,
        stack: contextlib.ExitStack,
        max_wait_s: float,
        poll_interval_s: float,
        on_wait: Callable[[tuple[Reason, ...]], None],
    ) -> HeldLease:
        deadline = time.monotonic() + max_wait_s
        notice = FileWatch(self._ledger.folder)
        stack.callback(notice.give_back)
        stack.callback(self._return_ticket)
        mutex = hold_mutex(self._ledger.folder, self._mutex_timeout_s)
        self._ticket = self._ledger.take_ticket(self._holder, self._need, self._priority, mutex)
        while (held := self.attempt()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WaitedTooLong(self._timeout_message(max_wait_s))
            on_wait(self.reasons)
            self._wait_for_change(notice, min(left, poll_interval_s))
        return held

    def _wait_for_change(self, notice: FileWatch, timeout_s: float) -> None:
        """Wait until it is time for another attempt, and show meanwhile that this process is not stopped."""
        until, pids = time.monotonic() + timeout_s, self._blocking_pids()
        is_over = False
        while not is_over:
            left = until - time.monotonic()
            is_over = notice.wait(min(left, BEAT_EVERY_S), pids) or left <= BEAT_EVERY_S
            if self._ticket is not None:
                self._ticket.beat()

    def _return_ticket(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.release()

    def _blocking_pids(self) -> list[int]:
        """Return the foreign processes that keep devices too busy: when one ends, it is time to try again."""
        loads = [load for load in self._loads.values() if load.is_over]
        return [foreign.process.pid for load in loads for foreign in load.processes][:_MAX_WATCHED_PIDS]

    def attempt(self) -> HeldLease | None:
        """Return the lease if it is granted now; otherwise `reasons` says why not."""
        # The machine is read before the ledger's mutex is taken: a slow driver must not block other processes. Changes
        # in between are safe: a new lease is charged its reservation, and the memory of a lease that ended since counts
        # as a foreign process's until the next snapshot.
        now = time.monotonic()
        if self._snapshot is None or now - self._looked_at > _FRESH_S:
            if self._need.host is not None:
                self._host_meter.read()  # before the free RAM: what is taken in between counts as not taken yet
            self._snapshot, self._looked_at = self._look(), now
        return self._ledger.claim(self._holder, self._decide, self._mutex_timeout_s, self._ticket)

    def _decide(self, leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> Claim | None:
        assert self._snapshot is not None
        if (closed := self._below_floor(self._snapshot.host)) is not None:
            self.reasons = (closed,)
            return None
        bound = self._packing.max_foreign_load_percent
        self._loads = self._foreign.update(self._snapshot, leases, time.monotonic(), bound)
        view = Machine(
            now=time.time(),
            snapshot=self._snapshot,
            leases=leases,
            measured=measure(self._snapshot, leases),
            foreign=self._loads,
            packing=self._packing,
            host=HostView(limits=self._host_limits, used=self._measure_host(leases), machine=self._holder.machine),
            closed=closed_devices(
                self._snapshot, self._ledger.drains, self._bans.ids(self._snapshot), self._ledger.health_marks
            ),
            ahead=self._ahead(tickets),
        )
        choice: PlacementChoice = choose(self._need, view)
        self.reasons = choice.reasons
        return choice.claim

    def _below_floor(self, host: Host) -> Reason | None:
        """Return why nothing starts on this machine now: it has less RAM available than has to stay free."""
        figures = ram_figures(host, self._host_limits.keep_free_mb)
        if figures is None:
            return None
        self._floor_gate = judge_host(self._floor_gate, *figures, time.monotonic(), has_alarm=False)
        return host_closed_reason(*figures) if self._floor_gate.is_closed else None

    def _measure_host(self, leases: tuple[Lease, ...]) -> Mapping[str, HostUse]:
        return {} if self._need.host is None else self._host_meter.use_of(leases)

    def _ahead(self, tickets: tuple[Ticket, ...]) -> tuple[Ticket, ...]:
        """Return the active tickets ahead of this process. Without one, it comes after all of the same priority."""
        order = active_tickets(in_queue_order(tickets))
        mine = self._ticket.id if self._ticket else None
        for position, ticket in enumerate(order):
            if ticket.id == mine or (mine is None and ticket.priority < self._priority):
                return tuple(order[:position])
        return tuple(order)

    def _timeout_message(self, waited_s: float) -> str:
        """Say what was missing on each device that the need allows, and what would change that."""
        reasons = [reason for reason in self.reasons if reason.kind is not ReasonKind.NOT_ASKED_FOR]
        names = self._snapshot.labels if self._snapshot is not None and self._snapshot.is_mixed else {}
        places = [reason.device_id or "machine" for reason in reasons]
        lines = [f"  {names.get(at, at)}: {reason.text}" for at, reason in zip(places, reasons, strict=True)]
        lines += [f"  to change that: {remedy}" for remedy in dict.fromkeys(each.remedy for each in reasons) if remedy]
        devices = format_count(self._need.devices, "device")
        missing = f"{devices} could not be leased" if self._need.devices else "RAM or CPUs were not free"
        return "\n".join([f"{missing} within {waited_s:g} s", *lines])


class WaitMessages:
    """The messages of one wait: `write` gets a line when it starts and when it ends; none if there is no wait.

    `writes_changes`: also when the reason changes; `writes_figures`: also when only its amounts do.
    """

    def __init__(
        self,
        need: Need,
        here: Snapshot,
        write: Callable[[str], None],
        *,
        writes_changes: bool,
        writes_figures: bool = False,
    ) -> None:
        self._need = need
        self._names = here.labels
        self._write = write
        self._writes_changes, self._writes_figures = writes_changes, writes_figures
        self._written: object = None
        self._since = time.monotonic()

    @property
    def has_written(self) -> bool:
        return self._written is not None

    def report_wait(self, reasons: tuple[Reason, ...]) -> None:
        shown = relevant_reasons(self._need, reasons)
        line = f"gpuyard: {describe_wait(self._need, shown, self._names)}"
        key = line if self._writes_figures else [(each.kind, each.device_id, frozenset(each.holders)) for each in shown]
        if self._written is None or (self._writes_changes and key != self._written):
            self._written = key
            self._write(line)

    def report_end(self, lease: Lease) -> None:
        if self.has_written:
            gpus = ", ".join(self._names.get(share.device_id, share.device_id) for share in lease.shares)
            what = f"GPU {gpus}" if gpus else "the machine"
            self._write(f"gpuyard: going on with {what} after {format_duration(time.monotonic() - self._since)}")


def print_to_stderr(line: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # closed: the program goes on without messages
            sys.stderr.write(f"{printable(line)}\n")
            sys.stderr.flush()
