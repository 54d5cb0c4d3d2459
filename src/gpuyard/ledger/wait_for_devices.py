"""Acquisition: wait with a ticket until the ledger grants a lease for a need. WaitMessages: say what it waits for."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpuyard.config import CurrentBans, load_config
from gpuyard.errors import UserError, WaitedTooLong
from gpuyard.ledger.ledger import HeldLease, Ledger
from gpuyard.ledger.ledger_mutex import hold_mutex
from gpuyard.ledger.lock_file import BEAT_EVERY_S, LockFile
from gpuyard.ledger.measured_usage import LEASE_VARIABLE, ForeignLoadTracker, HostMeter, measure
from gpuyard.ledger.records import active_tickets
from gpuyard.model.lease import Claim, Lease, Need, Ticket
from gpuyard.model.machine_snapshot import Snapshot
from gpuyard.model.printable_text import printable
from gpuyard.model.units import format_count, format_duration
from gpuyard.policy.device_health import closed_devices
from gpuyard.policy.foreign_load import ForeignLoad, SteadyGate
from gpuyard.policy.host_room import HostView
from gpuyard.policy.linked_sets import best_set, conditions_of
from gpuyard.policy.machine import Machine, Packing
from gpuyard.policy.memory_guards import host_closed_reason, judge_host, ram_figures
from gpuyard.policy.placement import PlacementChoice, choose, in_queue_order
from gpuyard.policy.wait_reasons import Reason, ReasonKind, describe_wait, relevant_reasons
from gpuyard.system.processes import this_process

if TYPE_CHECKING:
    from gpuyard.ledger.file_watch import FileWatch


def enclosing_lease(ledger: Ledger, need: Need, seen: Snapshot) -> Lease | None:
    """Return the lease that this process was started with, if it covers the need: waiting for its own devices would
    never end. It has the best-linked of its devices, as many as the need asks for. Raises UserError if that lease holds
    every device that the need allows, but not enough of them."""
    lease_id = os.environ.get(LEASE_VARIABLE)
    lease = next((lease for lease in ledger.leases() if lease.id == lease_id), None) if lease_id else None
    if lease is None or lease.holder.uid != os.getuid() or not need.devices:
        return None
    held = [share for share in lease.shares if need.only is None or share.device_id in need.only]
    least_mb = math.inf if need.is_exclusive else need.required_mb or 0.0
    enough = [share for share in held if share.is_exclusive or (share.memory_mb or 0.0) >= least_mb]
    chosen = best_set(seen.topology, [share.device_id for share in enough], conditions_of(need))
    if chosen is not None:
        return replace(lease, shares=tuple(share for share in enough if share.device_id in chosen))
    if need.only is not None and len(held) == len(need.only):
        raise UserError(
            f"this process runs inside lease {lease.id}, which holds less of the requested GPUs than is requested",
            hint="request more in the `gpuyard run` around it, or less inside",
        )
    return None


class Acquisition:
    """One need, from the first snapshot to the lease. `look` reads the machine."""

    def __init__(  # noqa: PLR0913 - a need and how to wait for it
        self,
        ledger: Ledger,
        look: Callable[[], Snapshot],
        need: Need,
        *,
        priority: int = 0,
        label: str | None = None,
        mutex_timeout_s: float = 10.0,
    ) -> None:
        self._ledger, self._look = ledger, look
        self._need, self._priority = need, priority
        self._holder = this_process(label)
        self._mutex_timeout_s, self._bans = mutex_timeout_s, CurrentBans()
        config = load_config()
        self._packing = Packing(max_foreign_load_percent=config.queue.max_foreign_load_percent)
        self._host_limits, self._host_meter = config.host.limits, HostMeter()
        self._floor_gate, self._foreign = SteadyGate(), ForeignLoadTracker()
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
        """Return the lease, or raise WaitedTooLong. `on_wait` gets the reasons, every `poll_interval_s` or earlier."""
        held: HeldLease | None = None
        try:
            if (held := self.attempt()) is not None:
                return held
            from gpuyard.ledger.file_watch import FileWatch  # most leases need no wait

            deadline = time.monotonic() + max_wait_s
            with contextlib.ExitStack() as stack:
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
        except BaseException:  # also an interrupt that comes after the grant
            if held is not None:
                held.release()
            raise

    def _wait_for_change(self, notice: "FileWatch", timeout_s: float) -> None:
        """Wait until it is time for another attempt, and show meanwhile that this process is not stopped."""
        # When a foreign process that keeps a device too busy ends, it is time, too.
        loads = [load for load in self._loads.values() if load.is_over]
        pids = [foreign.process.pid for load in loads for foreign in load.processes][:16]
        until = time.monotonic() + timeout_s
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

    def attempt(self) -> HeldLease | None:
        """Return the lease if it is granted now; otherwise `reasons` says why not."""
        # The machine is read before the ledger's mutex is taken: a slow driver must not block other processes. Changes
        # in between are safe: a new lease is charged its reservation, and the memory of a lease that ended since counts
        # as a foreign process's until the next snapshot.
        now = time.monotonic()
        # One event may wake up a waiting process several times.
        if self._snapshot is None or now - self._looked_at > 0.005:
            if self._need.host is not None:
                self._host_meter.read()  # before the free RAM: what is taken in between counts as not taken yet
            self._snapshot, self._looked_at = self._look(), now
        return self._ledger.claim(self._holder, self._decide, self._mutex_timeout_s, self._ticket)

    def _decide(self, leases: tuple[Lease, ...], tickets: tuple[Ticket, ...]) -> Claim | None:
        assert self._snapshot is not None
        # Nothing starts while the machine has less RAM available than has to stay free.
        if (figures := ram_figures(self._snapshot.host, self._host_limits.keep_free_mb)) is not None:
            self._floor_gate = judge_host(self._floor_gate, *figures, time.monotonic(), has_alarm=False)
            if self._floor_gate.is_closed:
                self.reasons = (host_closed_reason(*figures),)
                return None
        most = self._packing.max_foreign_load_percent
        self._loads = self._foreign.update(self._snapshot, leases, time.monotonic(), most)
        bans, ledger = self._bans.ids(self._snapshot), self._ledger
        used = {} if self._need.host is None else self._host_meter.use_of(leases)
        # Without a ticket, this process comes after all of the same priority.
        order, mine = active_tickets(in_queue_order(tickets)), self._ticket.id if self._ticket else None
        ahead = takewhile(lambda each: each.priority >= self._priority if mine is None else each.id != mine, order)
        view = Machine(
            now=time.time(), snapshot=self._snapshot, leases=leases, measured=measure(self._snapshot, leases),
            foreign=self._loads, packing=self._packing,
            host=HostView(limits=self._host_limits, used=used, machine=self._holder.machine),
            closed=closed_devices(self._snapshot, ledger.drains, bans, ledger.health_marks), ahead=tuple(ahead),
        )  # fmt: skip
        choice: PlacementChoice = choose(self._need, view)
        self.reasons = choice.reasons
        return choice.claim

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
    `writes_changes`: also when the reason changes; `writes_figures`: also when only its amounts do."""

    def __init__(
        self,
        need: Need,
        here: Snapshot,
        write: Callable[[str], None],
        *,
        writes_changes: bool,
        writes_figures: bool = False,
    ) -> None:
        self._need, self._names, self._write = need, here.labels, write
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
